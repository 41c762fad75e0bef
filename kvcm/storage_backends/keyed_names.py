"""Keys and URIs of blocks in stores of keys and values. Pure: no I/O.

``kvcm-<cluster uid>-<instance uid>-<extent>-<spec>-<slot>``: one key a slot. A store may neither
refuse nor overwrite a key that exists, so keys name their extent, which is never used twice. No
character of a key needs escaping in a URI, so all are alike wherever they are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from kvcm.core.errors import CorruptRecord, StorageError
from kvcm.storage_backends.base import ExtentName, ObjectRef, SpecSlots
from kvcm.storage_backends.posix_names import spec_component

_FORMAT = b"\x01"
_KEY = re.compile(r"kvcm(?:-[a-z0-9]{1,32}){3}-[A-Za-z0-9_.-]{1,60}-[0-9]{1,6}")


def encode(storage: str) -> bytes:
    """The descriptor of an allocation: the storage's name, of which its URIs are made."""
    return _FORMAT + storage.encode()


@lru_cache(maxsize=1024)
def decode(descriptor: bytes) -> str:
    """Inverse of ``encode``.

    Raises:
        CorruptRecord: another format, or bytes that are no text.
    """
    if descriptor[:1] != _FORMAT:
        raise CorruptRecord(f"descriptor of keys of unknown format {descriptor[:1]!r}")
    try:
        return descriptor[1:].decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"descriptor of keys does not parse: {error}") from error


def slot_uris(
    prefix: str, extent: ExtentName, spec: SpecSlots, first: int, count: int
) -> list[str]:
    """URIs of slots [first, first + count) of a spec; ``prefix`` is ``scheme://storage``.

    Hot: nothing is called per URI.
    """
    stem, tail = f"{prefix}/?key={_stem(extent, spec.name)}", f"&size={spec.size}"
    return [f"{stem}{slot}{tail}" for slot in range(first, first + count)]


def slot_objects(extent: ExtentName, specs: Sequence[SpecSlots]) -> list[ObjectRef]:
    """All keys of an extent."""
    return [
        ObjectRef(f"{stem}{slot}", index, slot, 1, spec.size)
        for index, spec in enumerate(specs)
        for stem in (_stem(extent, spec.name),)
        for slot in range(spec.slots)
    ]


def check_key(name: str) -> None:
    """Refuse what ``slot_objects`` cannot have made.

    Raises:
        StorageError: naming it.
    """
    if _KEY.fullmatch(name) is None:
        raise StorageError(f"{name[:256]!r} is not the key of a block")


def _stem(extent: ExtentName, spec: str) -> str:
    owner = f"{extent.cluster_uid}-{extent.instance_uid}-{extent.extent}"
    return f"kvcm-{owner}-{spec_component(spec)}-"
