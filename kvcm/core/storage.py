"""Values that the index and the data storages exchange."""

from __future__ import annotations

from dataclasses import dataclass

MARKER = ".kvcm-storage"
"""The file at the root of a file storage: where it is missing, its file system is not mounted
(docs/decisions/0018-storage-marker.md)."""


@dataclass(frozen=True, slots=True)
class ExtentName:
    """Who owns an allocation. All three are tokens of 1 to 32 of [a-z0-9], unique for ever."""

    cluster_uid: str
    instance_uid: str
    extent: str


@dataclass(frozen=True, slots=True)
class SpecSlots:
    """One spec of an extent: name, bytes a slot, and how many of the extent's blocks carry it."""

    name: str
    size: int
    slots: int


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One deletable object of an allocation and the slots it holds ([first, first + count))."""

    name: str
    """What ``delete`` takes; files: the absolute path, so that it outlives a changed root."""
    spec: int
    """Index into the ``specs`` that ``objects`` was given."""
    first: int
    count: int
    size: int
    """Bytes that freeing it frees (count × slot size)."""
