"""The contract of a data storage: a place for bytes that kvcm itself never reads.

A backend names addresses (pure, no I/O: ``place``, ``uris``, ``objects``) and frees them
(``delete``). An *object* is the unit that is freed: a file holding up to N blocks of one spec, or a
key. Names and addresses are never used twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import NamedTuple, Protocol

from kvcm.core.storage import ExtentName, ObjectRef, SpecSlots
from kvcm.core.types import StorageConfig, StorageType

__all__ = [
    "Capability",
    "DataStorageBackend",
    "ExtentName",
    "FoundObject",
    "ObjectRef",
    "ProbeResult",
    "SpecSlots",
]


class Capability(Flag):
    """What a backend can do beyond the base."""

    NONE = 0
    EXISTS = auto()
    """Tells which objects are there."""
    LIST = auto()
    """Lists the objects of an instance (repair)."""
    TOUCH = auto()
    """Creates objects ahead of the writer. Declared only when the config asks for it
    (``touch_file_when_create``), so whoever sees it calls ``touch`` after a grant."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Health of a storage. ``free_bytes``: left on it; None when it does not tell. ``unwritable``:
    why it takes no writes now though it can be read, such as that it is full; empty when it does.
    """

    available: bool
    detail: str = ""
    free_bytes: int | None = None
    unwritable: str = ""


class FoundObject(NamedTuple):
    """An object as it lies on a storage: its name, its bytes, and the seconds since it was last
    written or changed, by the storage's own clock."""

    name: str
    size: int
    age_s: float


class DataStorageBackend(Protocol):
    """One storage. Pure methods work without ``open``; all others raise StorageError before it.

    No method blocks the event loop, and none has a time-out of its own: callers give deadlines
    by cancelling. A call that hangs in the kernel delays neither ``close`` nor other storages.
    """

    config: StorageConfig
    type: StorageType
    capabilities: Capability
    touched: bool
    """Capability TOUCH is declared: objects are to be made ahead of their writer."""

    async def create(self) -> None:
        """Make the storage's place, before ``open``, when it is registered for the first time or
        moves: nothing else makes it. Idempotent; nothing where there is nothing to make.

        Raises:
            StorageError: it cannot be made; the message names the path or endpoint.
        """

    async def open(self) -> None:
        """Make the storage usable, and check it when the config says so. It creates nothing: what
        is missing may come back, as a mount does, with all that lies there.

        Raises:
            StorageError: it cannot be used; the message names the path or endpoint.
            InvalidArgument: the config is wrong; the message names the field.
        """

    async def close(self) -> None:
        """Release what ``open`` took. Idempotent."""

    async def probe(self) -> ProbeResult:
        """A real write, read, compare and delete of something tiny. Never raises StorageError.

        It creates nothing that is missing: a storage whose root vanished is not available.
        """

    def place(self, extent: ExtentName, specs: Sequence[SpecSlots]) -> bytes:
        """Name addresses for an extent. Pure: no I/O, no state.

        Returns:
            An opaque descriptor (< 1 KiB) that holds all that ``uris`` and ``objects`` need,
            whatever the config says later.

        Raises:
            InvalidArgument: a part of ``extent`` is not a token.
        """

    def uris(
        self, descriptor: bytes, extent: ExtentName, spec: SpecSlots, first: int, count: int
    ) -> list[str]:
        """Location URIs of slots [first, first + count) of one spec (wire.md §6), in order. Pure.

        Raises:
            CorruptRecord: the descriptor does not parse.
        """

    def objects(
        self, descriptor: bytes, extent: ExtentName, specs: Sequence[SpecSlots]
    ) -> list[ObjectRef]:
        """All objects of an allocation: every slot of every spec lies in exactly one. Pure.

        Names depend on ``extent``; which slots an object holds, and its size, do not.

        Raises:
            CorruptRecord: the descriptor does not parse.
        """

    async def prepare(self, cluster_uid: str, instance_uid: str) -> None:
        """Make the instance's folders ahead of its first write. Idempotent.

        Raises:
            StorageError: naming what cannot be made.
        """

    async def touch(self, names: Sequence[str]) -> None:
        """Create empty objects (capability TOUCH); those that exist keep their bytes.

        Raises:
            Unsupported: without the capability.
            StorageError: the first that failed, after all were tried.
        """

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        """Free objects; one answer a name: None = gone (also when it never was there).

        A name that ``objects`` of this storage cannot have made is refused: StorageError in its
        position. While the storage's place is missing, or cannot be told from an empty mount
        point, nothing counts as gone.
        """

    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Whether each object is there with at least so many bytes (capability EXISTS).

        Raises:
            Unsupported: without the capability.
            StorageError: it could not be found out.
        """

    async def list_objects(self, cluster_uid: str, instance_uid: str) -> list[str]:
        """Names of all objects of an instance (capability LIST).

        Raises:
            Unsupported: without the capability.
        """

    def survey(self, cluster_uid: str, instance_uid: str) -> AsyncIterator[Sequence[FoundObject]]:
        """All objects of an instance, in pages of one blocking job each (capability LIST).

        Raises:
            Unsupported: without the capability.
            StorageError: it cannot be read to its end.
        """

    async def instances(self, cluster_uid: str) -> list[str]:
        """Uids below which anything of a cluster lies (capability LIST).

        Raises:
            Unsupported, StorageError.
        """

    async def leftovers(self) -> list[FoundObject]:
        """What probes that were cut short left behind, of any cluster (capability LIST).

        Raises:
            Unsupported, StorageError.
        """

    async def delete_leftovers(self, names: Sequence[str]) -> list[Exception | None]:
        """Delete what ``leftovers`` named; answers as ``delete``'s."""

    async def remove_instance(self, cluster_uid: str, instance_uid: str) -> None:
        """Remove the empty folders of an instance that is gone. Idempotent.

        Folders that still hold anything stay, without an error.
        """
