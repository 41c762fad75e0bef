"""What the index needs of the storages: names of addresses, and whether they can be read now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcm.core.storage import ExtentName, ObjectRef, SpecSlots
from kvcm.core.types import StorageType


class Addresses(Protocol):
    """The pure half of a data storage backend."""

    @property
    def type(self) -> StorageType: ...

    @property
    def touched(self) -> bool:
        """Whether objects are to be made ahead of their writer, in the background."""

    def place(self, extent: ExtentName, specs: Sequence[SpecSlots]) -> bytes: ...

    def uris(
        self, descriptor: bytes, extent: ExtentName, spec: SpecSlots, first: int, count: int
    ) -> list[str]: ...

    def objects(
        self, descriptor: bytes, extent: ExtentName, specs: Sequence[SpecSlots]
    ) -> list[ObjectRef]: ...


class StorageSet(Protocol):
    """The opened storages by name."""

    def get(self, name: str) -> Addresses | None:
        """The storage, or None when it is gone or never opened."""

    def available(self, name: str) -> bool:
        """Enabled, opened and healthy."""

    def writable(self, name: str) -> bool:
        """Available, and it takes writes: not full, not read-only."""

    def free_bytes(self, name: str) -> int | None:
        """Free on the storage itself, lately; None when it does not tell."""

    def available_for_s(self, name: str) -> float:
        """Seconds since the storage came back; infinite when it was never away."""
