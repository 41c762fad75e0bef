"""Locations in wire form: the bytes that answers are cut from (wire.md §2 CacheLocation).

PROTO entries are complete ``locations`` fields (tag, length, message); JSON entries are objects,
each followed by a comma. A test holds both against the generated classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvcm.core.keys import encode_varint
from kvcm.core.storage import ExtentName
from kvcm.core.types import StorageType
from kvcm.metaindex import bits
from kvcm.metaindex.ids import extent_name
from kvcm.metaindex.layout import spec_positions, spec_slots
from kvcm.metaindex.ports import Addresses
from kvcm.metaindex.records import Extent

LOOKUP_TAG = b"\x12"
START_TAG = b"\x22"
_TYPE_NAMES = {
    StorageType.UNSPECIFIED: "ST_UNSPECIFIED",
    StorageType.HF3FS: "ST_3FS",
    StorageType.MOONCAKE: "ST_MOONCAKE",
    StorageType.TAIRMEMPOOL: "ST_TAIRMEMPOOL",
    StorageType.NFS: "ST_NFS",
    StorageType.VCNS_HF3FS: "ST_VCNS_3FS",
}
_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class Selector:
    """How a request wants its locations: form, and the specs it asks for as a bit set.

    ``asked`` 0 = no filter. One object per distinct wish and instance: compared by identity.
    """

    json: bool
    asked: int


class Answers:
    """Encoded locations of an extent: entry i is ``data[offsets[i]:offsets[i + 1]]``.

    ``ok`` are the positions that serve and carry every spec asked for; ``whole``: all of them.
    """

    __slots__ = ("data", "offsets", "ok", "whole")

    def __init__(self, data: bytes, offsets: array[int], ok: int) -> None:
        self.data = data
        self.offsets = offsets
        self.ok = ok
        self.whole = ok == bits.ones(len(offsets) - 1)


def owner_of(cluster_uid: str, instance_uid: str, extent: Extent) -> ExtentName:
    """The owner under which a storage names the extent's addresses."""
    return ExtentName(cluster_uid, instance_uid, extent_name(extent.extent_id))


def uris_of(extent: Extent, owner: ExtentName, storage: Addresses) -> list[list[str]]:
    """For each spec the URIs of the blocks that carry it, in position order."""
    return [
        storage.uris(extent.descriptor, owner, spec, 0, spec.slots) if spec.slots else []
        for spec in spec_slots(extent)
    ]


def location_entries(
    extent: Extent, owner: ExtentName, storage: Addresses, asked: int, as_json: bool
) -> list[bytes]:
    """One encoded CacheLocation a block, without tag and length (or without comma)."""
    encode = _json_spec if as_json else _proto_spec
    finish = _json_location if as_json else _proto_location
    per_spec = [
        [encode(name, uri) for uri in uris]
        for (name, _), uris in zip(extent.specs, uris_of(extent, owner, storage), strict=True)
    ]
    wanted = [s for s in range(len(extent.specs)) if not asked or asked >> s & 1]
    if not extent.subset_of:
        subset = extent.spec_sets[0]
        columns = [per_spec[s] for s in wanted if subset >> s & 1]
        return finish(extent.storage_type, subset.bit_count(), columns, extent.count)
    out: list[bytes] = []
    cursors = [0] * len(extent.specs)
    for position in range(extent.count):
        subset = extent.set_at(position)
        columns = [[per_spec[s][cursors[s]]] for s in wanted if subset >> s & 1]
        out += finish(extent.storage_type, subset.bit_count(), columns, 1)
        for s in range(len(cursors)):
            cursors[s] += subset >> s & 1
    return out


def _proto_spec(name: str, uri: str) -> bytes:
    n, u = name.encode(), uri.encode()
    body = b"\x0a" + encode_varint(len(n)) + n if n else b""
    if u:
        body += b"\x12" + encode_varint(len(u)) + u
    return b"\x1a" + encode_varint(len(body)) + body


def _proto_location(
    storage_type: int, spec_size: int, columns: Sequence[Sequence[bytes]], count: int
) -> list[bytes]:
    head = b"\x08" + encode_varint(storage_type) if storage_type else b""
    head += b"\x10" + encode_varint(spec_size) if spec_size else b""
    if not columns:
        return [head] * count
    if len(columns) == 1:
        return [head + spec for spec in columns[0]]
    return [head + b"".join(specs) for specs in zip(*columns, strict=True)]


def _json_spec(name: str, uri: str) -> bytes:
    return b'{"name":' + _json(name) + b',"uri":' + _json(uri) + b"}"


def _json_location(
    storage_type: int, spec_size: int, columns: Sequence[Sequence[bytes]], count: int
) -> list[bytes]:
    name = _TYPE_NAMES[StorageType(storage_type)]
    head = f'{{"type":"{name}","spec_size":{spec_size},"location_specs":['.encode()
    if not columns:
        return [head + b"]}"] * count
    return [head + b",".join(specs) + b"]}" for specs in zip(*columns, strict=True)]


def frame(entries: Sequence[bytes], tag: bytes, as_json: bool) -> list[bytes]:
    """Entries as they stand in an answer: with tag and length, or with a comma behind."""
    if as_json:
        return [e + b"," for e in entries]
    lengths = {len(e) for e in entries}
    prefix = {n: tag + encode_varint(n) for n in lengths}
    return [prefix[len(e)] + e for e in entries]


def build(
    extent: Extent, serving: int, owner: ExtentName, storage: Addresses, selector: Selector
) -> Answers:
    """Encode all blocks of an extent for one kind of request; ``ok`` is within ``serving``."""
    entries = location_entries(extent, owner, storage, selector.asked, selector.json)
    framed = frame(entries, LOOKUP_TAG, selector.json)
    offsets = array("I", [0])
    total = 0
    for entry in framed:
        total += len(entry)
        offsets.append(total)
    return Answers(b"".join(framed), offsets, carrying(extent, selector.asked) & serving)


def carrying(extent: Extent, asked: int) -> int:
    """Positions whose block carries every spec of ``asked`` (0: at least one spec)."""
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
    encode = _json_spec if as_json else _proto_spec
    finish = _json_location if as_json else _proto_location
    columns = [
        [encode(name, "")] for s, name in enumerate(spec_names) if not asked or asked >> s & 1
    ]
    entry = finish(StorageType.UNSPECIFIED, len(spec_names), columns, 1)
    return frame(entry, LOOKUP_TAG, as_json)[0]


def close_body(pieces: Sequence[bytes], as_json: bool) -> bytes:
    """Join framed entries into an answer's body (JSON loses its last comma)."""
    body = b"".join(pieces)
    return body[:-1] if as_json and body else body
