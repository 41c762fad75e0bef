"""How RocksStore lays shards out in one ordered key space.

A key is ``length of the space (1) | space | shard (2) | table (1) | record's key``. Table 0 holds
one record, the shard's meta.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.core.clock import Clock
from kvcm.core.errors import CorruptRecord, InvalidArgument
from kvcm.metaindex.store import Fence, ShardId, Table
from kvcm.metaindex.stores.common import below, check_shard

FORMAT = 1
"""Version of the key layout and of the meta record; a store of a newer one is refused."""
FORMAT_KEY = b"\x00kvcm-format"
"""Where the version stands: no shard's key begins with 0, since a space is never empty."""
FIRST_SPACE = b"\x01"
"""Not above any shard's key, above all others."""
META_TABLE = 0
_HEAD = struct.Struct(">BQQQH")
_COUNTER = struct.Struct(">Hq")


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta record of a shard and the key prefix of each of its tables, by table number."""

    prefixes: Sequence[bytes]
    fence: Fence
    number: int
    counters: dict[bytes, int]

    def encode(self) -> bytes:
        """The record; InvalidArgument when a counter or the fence leaves its 64 bits."""
        try:
            parts = [_HEAD.pack(FORMAT, *self.fence, self.number, len(self.counters))]
            for name, total in self.counters.items():
                parts += (_COUNTER.pack(len(name), total), name)
        except struct.error as error:
            raise InvalidArgument(f"fence {self.fence} or a counter: {error}") from error
        return b"".join(parts)


def decode_meta(prefixes: Sequence[bytes], value: bytes) -> Meta:
    """The inverse of `Meta.encode`; CorruptRecord when it does not parse."""
    try:
        version, epoch, n, number, length = _HEAD.unpack_from(value)
        counters: dict[bytes, int] = {}
        at = _HEAD.size
        for _ in range(length):
            size, total = _COUNTER.unpack_from(value, at)
            at += _COUNTER.size + size
            counters[value[at - size : at]] = total
        if version != FORMAT or at != len(value):
            raise CorruptRecord(f"meta record at {prefixes[0].hex()}: version or length is wrong")
    except struct.error as error:
        raise CorruptRecord(f"meta record at {prefixes[0].hex()}: {error}") from error
    return Meta(prefixes, Fence(epoch, n), number, counters)


def shard_prefix(shard: ShardId) -> bytes:
    """What all keys of a shard, and no others, begin with; InvalidArgument if out of bounds."""
    check_shard(shard)
    # The leading length keeps a space that begins like another one apart from it.
    return b"%c%b%b" % (len(shard.space), shard.space, shard.number.to_bytes(2, "big"))


def table_prefix(shard: ShardId, table: int) -> bytes:
    """What all keys of a table, and no others, begin with."""
    return b"%b%c" % (shard_prefix(shard), table)


def after(prefix: bytes) -> bytes:
    """The first key behind all that begin with ``prefix``, whose first byte is below 0xff."""
    cut = prefix.rstrip(b"\xff")
    return b"%b%c" % (cut[:-1], cut[-1] + 1)


def table_prefixes(shard: ShardId) -> list[bytes]:
    """The prefix of every table, by number, meta's included."""
    prefix = shard_prefix(shard)
    return [b"%b%c" % (prefix, table) for table in range(max(Table) + 1)]


def point_between(first: bytes, last: bytes, clock: Clock) -> bytes:
    """A random key from about ``first`` to about ``last``, which is above it."""
    common = next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
    )
    low, high = (
        int.from_bytes(key[common : common + 8].ljust(8, b"\0"), "big") for key in (first, last)
    )
    return first[:common] + (low + below(high - low + 1, clock)).to_bytes(8, "big")
