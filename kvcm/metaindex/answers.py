"""Locations in wire form: the bytes that answers are cut from (wire.md §2 CacheLocation).

PROTO entries are complete ``locations`` fields (tag, length, message); JSON entries are objects,
each followed by a comma. A test holds both against the generated classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby

import msgspec

from kvcm.core.keys import encode_varint
from kvcm.core.limits import SPECS_PER_INSTANCE_MAX
from kvcm.core.storage import ExtentName
from kvcm.core.types import StorageType
from kvcm.metaindex import bits
from kvcm.metaindex.ids import extent_name
from kvcm.metaindex.layout import spec_positions, spec_slots
from kvcm.metaindex.ports import Addresses
from kvcm.metaindex.records import Extent

NO_SPECS = 1 << SPECS_PER_INSTANCE_MAX
LOOKUP_TAG = b"\x12"
START_TAG = b"\x22"
_BLOCKS_PER_STEP = 1024
_TYPE_NAMES = {
    StorageType.UNSPECIFIED: "ST_UNSPECIFIED",
    StorageType.HF3FS: "ST_3FS",
    StorageType.MOONCAKE: "ST_MOONCAKE",
    StorageType.TAIRMEMPOOL: "ST_TAIRMEMPOOL",
    StorageType.NFS: "ST_NFS",
    StorageType.VCNS_HF3FS: "ST_VCNS_3FS",
    StorageType.PLUGIN: "ST_PLUGIN",
}
_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """How a request wants its locations: form, and the specs it asks for as a bit set.

    ``asked`` 0 = no filter, NO_SPECS = a filter that names no spec of the instance. One object per
    distinct wish and instance: compared by identity.
    """

    json: bool
    asked: int


class Answers:
    """Encoded locations of an extent: entry i is ``data[offsets[i]:offsets[i + 1]]``.

    ``ok`` are the positions that serve and carry every spec asked for; ``whole``: all ``count``.
    """

    __slots__ = ("count", "data", "offsets", "ok", "whole")

    def __init__(self, data: bytes, offsets: array[int], ok: int) -> None:
        self.data = data
        self.offsets = offsets
        self.ok = ok
        self.count = len(offsets) - 1
        self.whole = ok == bits.ones(self.count)


def owner_of(cluster_uid: str, instance_uid: str, extent: Extent) -> ExtentName:
    """The owner under which a storage names the extent's addresses."""
    return ExtentName(cluster_uid, instance_uid, extent_name(extent.extent_id))


def location_entries(
    extent: Extent,
    owner: ExtentName,
    storage: Addresses,
    asked: int,
    as_json: bool,
    tag: bytes = LOOKUP_TAG,
) -> Iterator[list[bytes]]:
    """One encoded CacheLocation a block, framed: with tag and length, or with a comma behind.

    Yields lists of up to 1,024 blocks, so that a caller on the event loop can pause between them.
    """
    wanted = [s for s in range(len(extent.specs)) if not asked or asked >> s & 1]
    encode = _json_locations if as_json else _proto_locations
    specs = spec_slots(extent)
    uris = storage.uris
    if not extent.subset_of:
        subset = extent.spec_sets[0]
        carried = [specs[s] for s in wanted if subset >> s & 1]
        for first in range(0, extent.count, _BLOCKS_PER_STEP):
            count = min(_BLOCKS_PER_STEP, extent.count - first)
            columns = [
                (spec.name, uris(extent.descriptor, owner, spec, first, count)) for spec in carried
            ]
            yield encode(extent.storage_type, subset.bit_count(), columns, count, tag)
        return
    per_spec = [
        uris(extent.descriptor, owner, spec, 0, spec.slots) if spec.slots else [] for spec in specs
    ]
    out: list[bytes] = []
    cursors = [0] * len(specs)
    for position in range(extent.count):
        subset = extent.set_at(position)
        columns = [
            (specs[s].name, per_spec[s][cursors[s] : cursors[s] + 1])
            for s in wanted
            if subset >> s & 1
        ]
        out += encode(extent.storage_type, subset.bit_count(), columns, 1, tag)
        for s in range(len(cursors)):
            cursors[s] += subset >> s & 1
        if len(out) == _BLOCKS_PER_STEP:
            yield out
            out = []
    yield out


Columns = Sequence[tuple[str, Sequence[str]]]
"""Spec name and its URIs, one a block."""


def _encoded(uris: Sequence[str]) -> list[bytes]:
    """UTF-8, in one pass: a URI holds no NUL."""
    return "\0".join(uris).encode().split(b"\0") if uris else []


def _proto_locations(
    storage_type: int, spec_size: int, columns: Columns, count: int, tag: bytes
) -> list[bytes]:
    if len(columns) == 1:
        name, uris = columns[0]
        encoded = _encoded(uris)
        before = {
            size: _proto_before(storage_type, spec_size, name, size, tag)
            for size in set(map(len, encoded))
        }
        return [before[len(uri)] + uri for uri in encoded]
    head = _proto_head(storage_type, spec_size)
    parts = []
    for name, uris in columns:
        encoded = _encoded(uris)
        heads = {size: _spec_head(name, size) for size in set(map(len, encoded))}
        parts.append([heads[len(uri)] + uri for uri in encoded])
    bodies = [head + b"".join(specs) for specs in zip(*parts, strict=True)] or [head] * count
    prefix = {size: tag + encode_varint(size) for size in set(map(len, bodies))}
    return [prefix[len(body)] + body for body in bodies]


def _proto_head(storage_type: int, spec_size: int) -> bytes:
    """A CacheLocation up to its specs."""
    head = b"\x08" + encode_varint(storage_type) if storage_type else b""
    return head + b"\x10" + encode_varint(spec_size) if spec_size else head


@lru_cache(maxsize=4096)
def _proto_before(storage_type: int, spec_size: int, name: str, size: int, tag: bytes) -> bytes:
    """An entry of one spec up to its URI, which depends on the URI's length alone."""
    head = _proto_head(storage_type, spec_size) + _spec_head(name, size)
    return tag + encode_varint(len(head) + size) + head


def _spec_head(name: str, uri_size: int) -> bytes:
    """A LocationSpec field up to its URI's bytes."""
    n = name.encode()
    body = b"\x0a" + encode_varint(len(n)) + n if n else b""
    if uri_size:
        body += b"\x12" + encode_varint(uri_size)
    return b"\x1a" + encode_varint(len(body) + uri_size) + body


def _json_locations(
    storage_type: int, spec_size: int, columns: Columns, count: int, _tag: bytes
) -> list[bytes]:
    name = _TYPE_NAMES[StorageType(storage_type)]
    head = f'{{"type":"{name}","spec_size":{spec_size},"location_specs":['.encode()
    if not columns:
        return [head + b"]},"] * count
    parts = []
    for i, (spec, uris) in enumerate(columns):
        before = (b"," if i else head) + b'{"name":' + _json(spec) + b',"uri":'
        parts.append([before + _json(uri) for uri in uris])
    if len(parts) == 1:
        return [part + b"}]}," for part in parts[0]]
    return [b"}".join(specs) + b"}]}," for specs in zip(*parts, strict=True)]


def build(
    extent: Extent, serving: int, owner: ExtentName, storage: Addresses, selector: Selector
) -> Answers:
    """Encode all blocks of an extent for one kind of request; ``ok`` is within ``serving``."""
    ok = carrying(extent, selector.asked) & serving
    carried = [s for s in range(len(extent.specs)) if extent.spec_sets[0] >> s & 1]
    if not selector.json and not selector.asked and not extent.subset_of and len(carried) == 1:
        return Answers(*_proto_body(extent, owner, storage, carried[0]), ok)
    steps = location_entries(extent, owner, storage, selector.asked, selector.json)
    framed = list(chain.from_iterable(steps))
    offsets = array("I", accumulate(map(len, framed), initial=0))
    return Answers(b"".join(framed), offsets, ok)


def _proto_body(
    extent: Extent, owner: ExtentName, storage: Addresses, spec: int
) -> tuple[bytes, array[int]]:
    """All entries of an extent whose blocks carry one spec, and their offsets, without a step per
    block: entries whose URIs are equally long differ in the URI alone."""
    slots = spec_slots(extent)[spec]
    uris = storage.uris(extent.descriptor, owner, slots, 0, slots.slots)
    parts: list[bytes] = []
    offsets = array("I", [0])
    for size, run in groupby(_encoded(uris), len):
        same = list(run)
        before = _proto_before(extent.storage_type, 1, slots.name, size, LOOKUP_TAG)
        parts += (before, before.join(same))
        step = len(before) + size
        offsets.extend(range(offsets[-1] + step, offsets[-1] + step * len(same) + 1, step))
    return b"".join(parts), offsets


def carrying(extent: Extent, asked: int) -> int:
    """Positions whose block carries every spec of ``asked`` (none: at least one spec)."""
    asked &= ~NO_SPECS
    if not extent.subset_of:
        subset = extent.spec_sets[0]
        fits = subset & asked == asked if asked else subset != 0
        return bits.ones(extent.count) if fits else 0
    per_spec = spec_positions(extent)
    if not asked:
        any_spec = 0
        for positions in per_spec:
            any_spec |= positions
        return any_spec
    every = bits.ones(extent.count)
    for s, positions in enumerate(per_spec):
        if asked >> s & 1:
            every &= positions
    return every


def placeholder(spec_names: Sequence[str], asked: int, as_json: bool) -> bytes:
    """The entry of a miss (wire.md §4), framed like the others."""
    encode = _json_locations if as_json else _proto_locations
    columns = [(name, [""]) for s, name in enumerate(spec_names) if not asked or asked >> s & 1]
    return encode(StorageType.UNSPECIFIED, len(spec_names), columns, 1, LOOKUP_TAG)[0]


def closed(pieces: Sequence[bytes], as_json: bool) -> Sequence[bytes]:
    """Framed entries as the pieces of an answer's body (JSON loses its last comma)."""
    if not as_json:
        return pieces
    last = next((i for i in range(len(pieces) - 1, -1, -1) if pieces[i]), None)
    return () if last is None else (*pieces[:last], pieces[last][:-1])
