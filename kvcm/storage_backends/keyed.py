"""What adapters of stores of keys and values have in common: each block is one key."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from kvcm.core.clock import Clock
from kvcm.core.errors import StorageError, Unsupported
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends import keyed_names as names_of
from kvcm.storage_backends.base import (
    Capability,
    ExtentName,
    FoundObject,
    ObjectRef,
    ProbeResult,
    SpecSlots,
)
from kvcm.storage_backends.posix_names import check_storage_name, check_tokens


class KeyedBackend(abc.ABC):
    """A `DataStorageBackend` but for ``open``, ``close``, ``probe``, ``delete`` and ``exists``.

    URIs are ``<type>://<storage>/?key=<key>&size=<bytes>``. It neither lists keys nor makes them
    ahead of their writers; an adapter whose store can do so declares it and says how.
    """

    capabilities: Capability = Capability.EXISTS
    touched = False
    product: ClassVar[str] = "it"
    """The store's name, in messages."""

    def __init__(self, config: StorageConfig, clock: Clock) -> None:
        """Check the storage's name; starts and touches nothing.

        Raises:
            InvalidArgument: it cannot be the host of a URI.
        """
        check_storage_name(config.global_unique_name)
        self.config = config
        self.type: StorageType = config.type
        self.clock = clock
        self._descriptor = names_of.encode(config.global_unique_name)

    async def create(self) -> None:  # noqa: B027 - most stores need nothing
        """Nothing is to be made: the store is there before the manager."""

    @abc.abstractmethod
    async def open(self) -> None: ...

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def probe(self) -> ProbeResult: ...

    def place(self, extent: ExtentName, specs: Sequence[SpecSlots]) -> bytes:
        """Raises InvalidArgument for names that are not tokens."""
        check_tokens(extent.cluster_uid, extent.instance_uid, extent.extent)
        return self._descriptor

    def uris(
        self, descriptor: bytes, extent: ExtentName, spec: SpecSlots, first: int, count: int
    ) -> list[str]:
        prefix = f"{self.config.type_name}://{names_of.decode(descriptor)}"
        return names_of.slot_uris(prefix, extent, spec, first, count)

    def objects(
        self, descriptor: bytes, extent: ExtentName, specs: Sequence[SpecSlots]
    ) -> list[ObjectRef]:
        names_of.decode(descriptor)
        return names_of.slot_objects(extent, specs)

    async def prepare(self, cluster_uid: str, instance_uid: str) -> None:
        """Keys need no folders."""
        check_tokens(cluster_uid, instance_uid)

    async def touch(self, names: Sequence[str]) -> None:
        raise self._cannot("create objects ahead of writers")

    @abc.abstractmethod
    async def delete(self, names: Sequence[str]) -> list[Exception | None]: ...

    @abc.abstractmethod
    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]: ...

    async def list_objects(self, cluster_uid: str, instance_uid: str) -> list[str]:
        raise self._cannot("list objects")

    def survey(self, cluster_uid: str, instance_uid: str) -> AsyncIterator[Sequence[FoundObject]]:
        raise self._cannot("list objects")

    async def instances(self, cluster_uid: str) -> list[str]:
        raise self._cannot("list objects")

    async def leftovers(self) -> list[FoundObject]:
        raise self._cannot("list objects")

    async def delete_leftovers(self, names: Sequence[str]) -> list[Exception | None]:
        raise self._cannot("list objects")

    async def remove_instance(self, cluster_uid: str, instance_uid: str) -> None:
        """Keys leave no folders."""
        check_tokens(cluster_uid, instance_uid)

    def _cannot(self, what: str) -> Unsupported:
        return Unsupported(
            f"storage {self.config.global_unique_name}: {self.product} cannot {what}"
        )


def refusals(names: Sequence[str]) -> list[Exception | None]:
    """What ``delete`` answers for names that are no keys of blocks; None for the others."""
    answers: list[Exception | None] = []
    for name in names:
        try:
            names_of.check_key(name)
        except StorageError as error:
            answers.append(error)
        else:
            answers.append(None)
    return answers
