"""The stored records and their bytes: format byte, checksum, fields; what does not parse is
CorruptRecord.

An extent's immutable part is stored in chunks of at most 512 keys, its state as one small record
whose first 8 bytes are its version. A row is a list of (extent id, position).
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from kvcm.core.errors import CorruptRecord
from kvcm.core.limits import BLOCKS_PER_CHUNK_MAX, BLOCKS_PER_EXTENT_MAX
from kvcm.core.types import StorageType
from kvcm.metaindex import bits
from kvcm.metaindex.ids import EXTENT_ID_BYTES
from kvcm.metaindex.store import VERSION_BYTES

_log = logging.getLogger(__name__)
_FORMAT = b"\x01"
_CHUNK_KEY = struct.Struct(">H")
_USE = struct.Struct(">BQd")
_REF = struct.Struct(">12sH")
_pack = msgspec.msgpack.Encoder().encode
# Typed, so that whatever stands in a damaged record is refused before anything is made of it.
_read_state = msgspec.msgpack.Decoder(tuple[int, int, bytes, bytes, bytes, int, int, int]).decode
_read_trash = msgspec.msgpack.Decoder(tuple[str, bytes, int, bool, bool]).decode


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An extent's header as it is stored: an array, whose last field older records lack."""

    count: int
    storage: str
    storage_type: int
    descriptor: bytes
    specs: tuple[tuple[str, int], ...]
    spec_sets: tuple[int, ...]
    subset_of: bytes
    trim: int
    runs: tuple[tuple[int, int, bytes | None, int], ...]
    started_ms: int
    timeout_s: int
    followers: tuple[bytes, ...] = ()


_read_header = msgspec.msgpack.Decoder(_Header).decode


class Phase(IntEnum):
    """Life of an extent."""

    OPEN = 1
    SETTLED = 2
    RETIRED = 3
    ABORTED = 4


class Cause(IntEnum):
    """Why an extent was aborted, or its blocks were taken out."""

    NONE = 0
    EXPIRED = 1
    CANCELLED = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous positions of an extent that followed each other in the request.

    ``parent`` is the extent of the block just before the run in the request, None at its head.
    """

    start: int
    depth: int
    parent: bytes | None
    parent_position: int


@dataclass(frozen=True, slots=True)
class Extent:
    """What one StartWrite granted; never changes.

    ``keys`` is raw little-endian int64, 8 bytes a block. ``spec_sets`` has one bit set per spec of
    ``specs`` for each distinct subset in use; ``subset_of`` names the subset of each block by one
    byte, empty when all blocks use ``spec_sets[0]``. ``followers`` are extents that were there
    before and hold blocks behind its own: it filled a gap.
    """

    extent_id: bytes
    keys: bytes
    storage: str
    storage_type: int
    descriptor: bytes
    specs: tuple[tuple[str, int], ...]
    spec_sets: tuple[int, ...]
    subset_of: bytes
    trim: int
    runs: tuple[Run, ...]
    started_ms: int
    timeout_s: int
    followers: tuple[bytes, ...] = ()

    @property
    def count(self) -> int:
        """Blocks granted."""
        return len(self.keys) // 8

    def set_at(self, position: int) -> int:
        """Specs of the block at ``position``, as a bit set over ``specs``."""
        return self.spec_sets[self.subset_of[position] if self.subset_of else 0]


@dataclass(frozen=True, slots=True)
class State:
    """The mutable part. Bit sets are over positions.

    ``serving`` are the published blocks, ``finished`` the mask the client finished with,
    ``cancelled`` blocks that RemoveCache or Trim took from an open session. ``dead`` are the bytes
    of retired slots whose object still holds a live block.
    """

    version: bytes
    phase: Phase
    stamp_ms: int
    serving: int = 0
    finished: int = 0
    cancelled: int = 0
    finished_ms: int = 0
    cause: Cause = Cause.NONE
    dead: int = 0

    def next(self, version: bytes, **changes: Any) -> State:
        """A changed copy under a new version."""
        return replace(self, version=version, **changes)


@dataclass(frozen=True, slots=True)
class Trash:
    """Objects of an extent whose bytes are still to be deleted.

    ``objects`` is a bit set over the backend's object list of the extent. ``late_writer``: its
    writer may still create them, so they are deleted once more later (``again``). ``size`` is in
    bytes; those of ``again`` are free already.
    """

    extent_id: bytes
    serial: bytes
    storage: str
    objects: int
    size: int
    late_writer: bool
    again: bool = False

    @property
    def key(self) -> bytes:
        """Its key in the trash table."""
        return self.extent_id + self.serial

    @property
    def counted(self) -> int:
        """Bytes that the ledger counts for it."""
        return 0 if self.again else self.size


def _seal(bound: bytes, body: bytes) -> bytes:
    """Format byte, checksum, body. A flipped bit must never pass for another key or for a block
    that serves, nor a record for one of another key (``bound``)."""
    return _FORMAT + zlib.crc32(body, zlib.crc32(bound)).to_bytes(4, "big") + body


def _unseal(bound: bytes, data: bytes) -> bytes:
    body = data[5:]
    if data[:1] != _FORMAT:
        raise ValueError(f"format {data[:1]!r}")
    if data[1:5] != zlib.crc32(body, zlib.crc32(bound)).to_bytes(4, "big"):
        raise ValueError("checksum")
    return body


def chunk_key(extent_id: bytes, chunk: int) -> bytes:
    """Key of one chunk in the extents table."""
    return extent_id + _CHUNK_KEY.pack(chunk)


def encode_extent(extent: Extent) -> list[tuple[bytes, bytes]]:
    """(key, value) of each chunk; the first one holds the header."""
    fields: tuple[Any, ...] = (
        extent.count,
        extent.storage,
        extent.storage_type,
        extent.descriptor,
        extent.specs,
        extent.spec_sets,
        extent.subset_of,
        extent.trim,
        [(r.start, r.depth, r.parent, r.parent_position) for r in extent.runs],
        extent.started_ms,
        extent.timeout_s,
    )
    header = _pack((*fields, extent.followers) if extent.followers else fields)
    step = BLOCKS_PER_CHUNK_MAX * 8
    bodies = [extent.keys[at : at + step] for at in range(0, len(extent.keys), step)]
    bodies[0] = struct.pack(">I", len(header)) + header + bodies[0]
    keys = [chunk_key(extent.extent_id, i) for i in range(len(bodies))]
    return [(key, _seal(key, body)) for key, body in zip(keys, bodies, strict=True)]


def chunk_count(blocks: int) -> int:
    """Chunks of an extent of so many blocks."""
    return max(1, -(-blocks // BLOCKS_PER_CHUNK_MAX))


def decode_header(extent_id: bytes, first: bytes) -> tuple[Extent, int]:
    """The extent with the first chunk's keys, and how many blocks it has in all.

    Raises:
        CorruptRecord: it does not parse.
    """
    try:
        body = _unseal(chunk_key(extent_id, 0), first)
        (size,) = struct.unpack_from(">I", body)
        head = _read_header(body[4 : 4 + size])
        count, specs, sets, subset_of = head.count, head.specs, head.spec_sets, head.subset_of
        keys = body[4 + size :]
        if not 0 < count <= BLOCKS_PER_EXTENT_MAX:
            raise ValueError(f"count {count}")
        if len(keys) != min(count, BLOCKS_PER_CHUNK_MAX) * 8:
            raise ValueError("keys cut short")
        if any(spec_size <= 0 for _, spec_size in specs):
            raise ValueError("spec size")
        if not sets or any(s >> len(specs) for s in sets):
            raise ValueError("spec subsets")
        if subset_of and (len(subset_of) != count or max(subset_of) >= len(sets)):
            raise ValueError("spec subset index")
        if any(len(follower) != EXTENT_ID_BYTES for follower in head.followers):
            raise ValueError("follower")
        extent = Extent(
            extent_id=extent_id,
            keys=keys,
            storage=head.storage,
            storage_type=int(StorageType(head.storage_type)),
            descriptor=head.descriptor,
            specs=specs,
            spec_sets=sets,
            subset_of=subset_of,
            trim=head.trim,
            runs=tuple(Run(*run) for run in head.runs),
            started_ms=head.started_ms,
            timeout_s=head.timeout_s,
            followers=head.followers,
        )
    except (ValueError, TypeError, IndexError, struct.error, msgspec.MsgspecError) as error:
        raise CorruptRecord(f"extent {extent_id.hex()}: {error}") from error
    return extent, count


def join_chunks(extent: Extent, count: int, rest: Sequence[bytes | None]) -> Extent:
    """The whole extent from its first chunk and the values of the following ones.

    Raises:
        CorruptRecord: a chunk is missing or of a wrong length.
    """
    parts = [extent.keys]
    for number, chunk in enumerate(rest, 1):
        if chunk is None:
            raise CorruptRecord(f"extent {extent.extent_id.hex()}: a chunk is missing")
        try:
            parts.append(_unseal(chunk_key(extent.extent_id, number), chunk))
        except ValueError as error:
            raise CorruptRecord(f"extent {extent.extent_id.hex()}: {error}") from error
    keys = b"".join(parts)
    if len(keys) != count * 8:
        raise CorruptRecord(f"extent {extent.extent_id.hex()}: keys cut short")
    return replace(extent, keys=keys)


def encode_state(state: State) -> bytes:
    """Version, then the sealed fields."""
    fields = _pack(
        (
            int(state.phase),
            state.stamp_ms,
            bits.to_bytes(state.serving),
            bits.to_bytes(state.finished),
            bits.to_bytes(state.cancelled),
            state.finished_ms,
            int(state.cause),
            state.dead,
        )
    )
    return state.version + _seal(state.version, fields)


def decode_state(extent_id: bytes, data: bytes) -> State:
    """Inverse of ``encode_state``; ``extent_id`` is for the error.

    Raises:
        CorruptRecord: it does not parse.
    """
    try:
        f = _read_state(_unseal(data[:VERSION_BYTES], data[VERSION_BYTES:]))
        return State(
            version=data[:VERSION_BYTES],
            phase=Phase(f[0]),
            stamp_ms=f[1],
            serving=bits.from_bytes(f[2]),
            finished=bits.from_bytes(f[3]),
            cancelled=bits.from_bytes(f[4]),
            finished_ms=f[5],
            cause=Cause(f[6]),
            dead=f[7],
        )
    except (ValueError, TypeError, IndexError, msgspec.MsgspecError) as error:
        raise CorruptRecord(f"state of extent {extent_id.hex()}: {error}") from error


def encode_trash(trash: Trash) -> bytes:
    """Value in the trash table."""
    fields = _pack(
        (trash.storage, bits.to_bytes(trash.objects), trash.size, trash.late_writer, trash.again)
    )
    return _seal(trash.key, fields)


def decode_trash(key: bytes, data: bytes) -> Trash:
    """Inverse of ``encode_trash``.

    Raises:
        CorruptRecord: it does not parse.
    """
    try:
        if len(key) <= EXTENT_ID_BYTES:
            raise ValueError("key")
        f = _read_trash(_unseal(key, data))
        return Trash(
            extent_id=key[:EXTENT_ID_BYTES],
            serial=key[EXTENT_ID_BYTES:],
            storage=f[0],
            objects=bits.from_bytes(f[1]),
            size=f[2],
            late_writer=f[3],
            again=f[4],
        )
    except (ValueError, TypeError, IndexError, msgspec.MsgspecError) as error:
        raise CorruptRecord(f"trash {key.hex()}: {error}") from error


class Use(NamedTuple):
    """What is stored of an extent's use: when it last was, how often (-inf: not counted), and what
    requests showed that it builds on though its header does not say so, by extent id."""

    stamp_ms: int = 0
    heat: float = -math.inf
    parents: tuple[bytes, ...] = ()


def encode_use(use: Use) -> bytes:
    """Just the stamp where there is no more to say."""
    if use.heat == -math.inf and not use.parents:
        return use.stamp_ms.to_bytes(8, "big")
    return _USE.pack(1, use.stamp_ms, use.heat) + b"".join(use.parents)


def decode_use(data: bytes) -> Use:
    """Inverse of ``encode_use``; what does not parse was never used."""
    if len(data) == 8:
        return Use(int.from_bytes(data, "big"))
    rest = len(data) - _USE.size
    if rest < 0 or rest % EXTENT_ID_BYTES or data[0] != 1:
        return Use()
    _, stamp_ms, heat = _USE.unpack_from(data)
    parents = [
        data[at : at + EXTENT_ID_BYTES] for at in range(_USE.size, len(data), EXTENT_ID_BYTES)
    ]
    return Use(stamp_ms, heat if math.isfinite(heat) else -math.inf, tuple(parents))


REF_BYTES = _REF.size
"""One reference of a row."""


def encode_ref(extent_id: bytes, position: int) -> bytes:
    """One 14-byte reference of a row."""
    return _REF.pack(extent_id, position)


def decode_row(data: bytes) -> list[tuple[bytes, int]]:
    """The references of a row.

    Raises:
        CorruptRecord: not a whole number of references.
    """
    if not data or len(data) % _REF.size:
        raise CorruptRecord(f"row of {len(data)} bytes")
    return [(ref[0], ref[1]) for ref in _REF.iter_unpack(data)]


@dataclass(slots=True)
class Quarantine:
    """Records that did not parse: counted and reported, served as misses."""

    count: int = 0
    last: list[str] = field(default_factory=list)

    def add(self, error: CorruptRecord) -> None:
        """Count and log one; the latest 16 messages are kept, and not logged again."""
        self.count += 1
        message = str(error)
        if message not in self.last:
            self.last = [*self.last[-15:], message]
            _log.error("a record does not parse and counts as absent: %s", message)
