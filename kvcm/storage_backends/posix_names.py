"""Paths and URIs of block files. Pure: no I/O.

``<root>/<cluster uid>/<instance uid>/<xx>/<extent>_<spec>_<n>``: file ``n`` of a spec holds its
slots [n × key_count_per_file, …), each slot at offset ``blkid × size``. See
docs/decisions/0003-storage-paths.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from kvcm.core.errors import CorruptRecord, InvalidArgument, StorageError
from kvcm.core.limits import (
    ENTITY_NAME_BYTES_MAX,
    KEYS_PER_FILE_MAX,
    STORAGE_ROOT_BYTES_MAX,
)
from kvcm.storage_backends.base import ExtentName, ObjectRef, SpecSlots

FOLDERS: tuple[str, ...] = tuple(f"{i:02x}" for i in range(256))
"""Names of the fan-out folders of an instance."""

_FORMAT = b"\x01"
_TOKEN = re.compile(r"[a-z0-9]{1,32}")
_HOST = re.compile(r"[A-Za-z0-9_.-]+")
_ROOT = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_PLAIN_SPEC = re.compile(r"[A-Za-z0-9_-]{1,40}")
_OBJECT = re.compile(
    r"(/.+)/([a-z0-9]{1,32})/([a-z0-9]{1,32})/([0-9a-f]{2})"
    r"/([a-z0-9]{1,32}_[A-Za-z0-9_.-]{1,60}_[0-9]{1,6})"
)
_FILE = re.compile(r"[a-z0-9]{1,32}_[A-Za-z0-9_.-]{1,60}_[0-9]{1,6}")


class Layout(NamedTuple):
    """How an extent's files are named; fixed when its addresses were granted."""

    scheme: str
    storage: str
    root: str
    keys_per_file: int


class ObjectPath(NamedTuple):
    """The parts of an object's name."""

    root: str
    cluster: str
    instance: str
    folder: str
    file: str


def check_storage_name(name: str) -> None:
    """A storage's name is the host of its URIs.

    Raises:
        InvalidArgument: empty, too long, or characters outside ``[A-Za-z0-9_.-]``.
    """
    if not _HOST.fullmatch(name) or len(name) > ENTITY_NAME_BYTES_MAX:
        raise InvalidArgument(
            f"global_unique_name {name[:64]!r} must be 1 to {ENTITY_NAME_BYTES_MAX} "
            "characters of [A-Za-z0-9_.-]: it is the host of location URIs"
        )


def check_root(field: str, path: Any) -> str:
    """A root folder without doubled or trailing slashes.

    Raises:
        InvalidArgument: naming ``field``; not an absolute path, ``/`` itself, ``.`` or ``..`` in
            it, too long, or characters that a URI would have to escape.
    """
    if not isinstance(path, str) or not path.startswith("/"):
        raise InvalidArgument(f"{field} {path!r} must be an absolute path")
    parts = [part for part in path.split("/") if part]
    root = "".join(f"/{part}" for part in parts)
    if not parts:
        raise InvalidArgument(f"{field} {path!r} must not be the root of the file system")
    if "." in parts or ".." in parts:
        raise InvalidArgument(f"{field} {path!r} must not contain '.' or '..'")
    if not _ROOT.fullmatch(root):
        raise InvalidArgument(
            f"{field} {path!r} has characters that location URIs would have to escape, "
            "which existing clients do not undo"
        )
    if len(root) > STORAGE_ROOT_BYTES_MAX:
        raise InvalidArgument(f"{field} has {len(root)} bytes, more than {STORAGE_ROOT_BYTES_MAX}")
    return root


def check_keys_per_file(spec: Mapping[str, Any]) -> int:
    """``key_count_per_file`` of a storage spec; 0 or absent means 1.

    Raises:
        InvalidArgument: not an integer from 0 to KEYS_PER_FILE_MAX.
    """
    value = spec.get("key_count_per_file", 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= KEYS_PER_FILE_MAX:
        raise InvalidArgument(
            f"key_count_per_file {value!r} must be an integer from 0 to {KEYS_PER_FILE_MAX}"
        )
    return value or 1


def check_tokens(*tokens: str) -> None:
    """Refuse ids that are not ``[a-z0-9]{1,32}``: they become folder and file names.

    Raises:
        InvalidArgument: naming the first bad one.
    """
    for token in tokens:
        if not _TOKEN.fullmatch(token):
            raise InvalidArgument(f"{token!r} is not a token of 1 to 32 characters of [a-z0-9]")


def encode_layout(layout: Layout) -> bytes:
    """The descriptor of an allocation: a format byte, then msgpack. Below 1 KiB."""
    return _FORMAT + msgspec.msgpack.encode(layout)


@lru_cache(maxsize=1024)
def decode_layout(descriptor: bytes) -> Layout:
    """Inverse of ``encode_layout``.

    Raises:
        CorruptRecord: another format, or bytes that do not parse.
    """
    if descriptor[:1] != _FORMAT:
        raise CorruptRecord(f"file descriptor of unknown format {descriptor[:1]!r}")
    try:
        return msgspec.msgpack.decode(descriptor[1:], type=Layout)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"file descriptor does not parse: {error}") from error


@lru_cache(maxsize=4096)
def spec_component(name: str) -> str:
    """A spec's part of a file name: below 64 bytes, different for different names.

    Short plain names stand as they are. Others become a readable rest, a dot, which no plain name
    has, and 128 bits of SHA-256; case is kept apart on file systems that distinguish it.
    """
    if _PLAIN_SPEC.fullmatch(name):
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{re.sub('[^A-Za-z0-9-]+', '-', name)[:16]}.{digest}"


@lru_cache(maxsize=64)
def _slot_suffixes(keys_per_file: int, size: int) -> tuple[str, ...]:
    return tuple(f"?blkid={slot}&size={size}" for slot in range(keys_per_file))


def _file_parts(layout: Layout, extent: ExtentName, spec: str) -> tuple[str, str, int]:
    """(folder prefix, file prefix, first folder): file n lies in folder (first + n) mod 256.

    Counting on from file to file keeps folders even when one extent has thousands of files.
    """
    stem = f"{extent.extent}_{spec_component(spec)}"
    folder = f"{layout.root}/{extent.cluster_uid}/{extent.instance_uid}/"
    return folder, f"/{stem}_", crc32(stem.encode())


def slot_uris(
    layout: Layout, extent: ExtentName, spec: SpecSlots, first: int, count: int
) -> list[str]:
    """URIs of slots [first, first + count) of a spec. Hot: nothing is called per URI."""
    folder, stem, start = _file_parts(layout, extent, spec.name)
    prefix = f"{layout.scheme}://{layout.storage}{folder}"
    per_file = layout.keys_per_file
    if per_file == 1:
        tail = f"?size={spec.size}"
        return [
            f"{prefix}{FOLDERS[(start + n) & 255]}{stem}{n}{tail}"
            for n in range(first, first + count)
        ]
    suffixes = _slot_suffixes(per_file, spec.size)
    file, skipped = divmod(first, per_file)
    last, rest = divmod(first + count, per_file)
    paths = [f"{prefix}{FOLDERS[(start + n) & 255]}{stem}{n}" for n in range(file, last + 1)]
    if file == last:
        return [paths[0] + suffix for suffix in suffixes[skipped:rest]]
    uris = [paths[0] + suffix for suffix in suffixes[skipped:]]
    uris += [path + suffix for path in paths[1:-1] for suffix in suffixes]
    uris += [paths[-1] + suffix for suffix in suffixes[:rest]]
    return uris


def file_objects(layout: Layout, extent: ExtentName, specs: Sequence[SpecSlots]) -> list[ObjectRef]:
    """All files of an extent; names are absolute paths."""
    per_file = layout.keys_per_file
    result: list[ObjectRef] = []
    for index, spec in enumerate(specs):
        folder, stem, start = _file_parts(layout, extent, spec.name)
        for n, first in enumerate(range(0, spec.slots, per_file)):
            count = min(per_file, spec.slots - first)
            name = f"{folder}{FOLDERS[(start + n) & 255]}{stem}{n}"
            result.append(ObjectRef(name, index, first, count, count * spec.size))
    return result


def parse_object(name: str, roots: Sequence[str]) -> ObjectPath:
    """The parts of an object's name, which must be of the shape ``file_objects`` makes.

    Raises:
        StorageError: another shape, or a root that is not among ``roots``.
    """
    match = _OBJECT.fullmatch(name)
    if match is None:
        raise StorageError(f"{name[:256]!r} is not the name of a block file")
    path = ObjectPath(*match.groups())
    if path.root not in roots:
        raise StorageError(f"{name[:1024]!r} lies outside the storage's root {roots[0]!r}")
    return path


def is_block_file(name: str) -> bool:
    """Whether a file name has the shape that ``file_objects`` makes."""
    return _FILE.fullmatch(name) is not None
