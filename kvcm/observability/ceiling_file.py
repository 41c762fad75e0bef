"""The windows in a file of the data folder, so that a restart keeps them.

A line that names format and version, then records: length, CRC-32, MessagePack. The last one
counts those before it. Replaced as a whole; whatever is not exactly this is not read at all.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvcm.core.errors import InvalidArgument
from kvcm.observability.causes import SavedKeys
from kvcm.observability.windows import Saved

_MAGIC = b"kvcm-ceiling 1\n"
_HEAD = struct.Struct("<II")
_FILE_BYTES_MAX = 1 << 30


class Scope(msgspec.Struct, array_like=True, tag="scope"):
    """Windows of an instance (by uid) or of a group (by name)."""

    is_group: bool
    name: str
    windows: Saved


class Keys(msgspec.Struct, array_like=True, tag="keys"):
    """A part of the sample."""

    keys: SavedKeys


class Rest(msgspec.Struct, array_like=True, tag="rest"):
    """How often the sample was halved, what each group has evicted, and when instances (by uid)
    were trimmed."""

    halvings: int
    evicted: dict[str, int]
    trimmed_s: dict[str, int]


class End(msgspec.Struct, array_like=True, tag="end"):
    """The last record. ``cluster``: uid of the registry that the instances are from."""

    records: int
    cluster: str


Content = Scope | Keys | Rest
_decoder = msgspec.msgpack.Decoder(Content | End)


def encode(record: Content | End) -> bytes:
    """One record as it stands in the file."""
    body = msgspec.msgpack.encode(record)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def write(path: Path, records: Iterable[bytes]) -> None:
    """Replace the file. Blocks.

    Raises:
        OSError: the old one stays as it was.
    """
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(_MAGIC)
        file.writelines(records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read(path: Path, cluster: str) -> list[Content]:
    """What was saved; nothing when there is no file. Blocks.

    Raises:
        InvalidArgument: damaged, another version, or of another registry.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return []
    if not data.startswith(_MAGIC):
        raise InvalidArgument("not a file of this version of kvcm")
    found: list[Content] = []
    at = len(_MAGIC)
    while True:
        if len(data) < at + _HEAD.size:
            raise InvalidArgument("the file is cut off")
        size, checksum = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        body = data[at : at + size]
        at += size
        if len(body) != size or zlib.crc32(body) != checksum:
            raise InvalidArgument(f"the record before byte {at} is damaged")
        try:
            record = _decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the record before byte {at}: {error}") from error
        if isinstance(record, End):
            if record.records != len(found) or at != len(data):
                raise InvalidArgument("the file does not end where it should")
            if record.cluster != cluster:
                raise InvalidArgument("the file is of another registry")
            return found
        found.append(record)
