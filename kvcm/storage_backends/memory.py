"""Blocks in the memory of this process: ``memory``, for tests and demos.

Only clients in the manager's own process reach them, and they are gone with it. It is also the
example of an adapter: served like any third party's, by its entry point in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, StorageError
from kvcm.core.memory import pool_of
from kvcm.core.types import PLUGIN_NAME, StorageConfig
from kvcm.storage_backends.base import ProbeResult
from kvcm.storage_backends.keyed import KeyedBackend, refusals


class MemoryBackend(KeyedBackend):
    """The pool that all storages of this name in the process share. It has no options."""

    def __init__(self, config: StorageConfig, clock: Clock) -> None:
        """Raises InvalidArgument for an option; the message names it."""
        super().__init__(config, clock)
        if unknown := sorted(config.spec.keys() - {PLUGIN_NAME}):
            raise InvalidArgument(f"storage of type memory: there is no option {unknown[0]!r}")
        self._pool: dict[str, bytes] | None = None

    async def open(self) -> None:
        self._pool = pool_of(self.config.global_unique_name)

    async def close(self) -> None:
        """The blocks stay: whoever opens the storage again finds them."""
        self._pool = None

    async def probe(self) -> ProbeResult:
        if self._pool is None:
            return ProbeResult(False, "not open")
        key, content = f"probe {self.clock.random_bytes(12).hex()}", self.clock.random_bytes(64)
        self._pool[key] = content
        return ProbeResult(self._pool.pop(key) == content)

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        pool, answers = self._opened(), refusals(names)
        for name, refusal in zip(names, answers, strict=True):
            if refusal is None:
                pool.pop(name, None)
        return answers

    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        pool = self._opened()
        found = [pool.get(name) for name in names]
        return [
            data is not None and len(data) >= size for data, size in zip(found, sizes, strict=True)
        ]

    def _opened(self) -> dict[str, bytes]:
        if self._pool is None:
            raise StorageError(f"storage {self.config.global_unique_name} is not open")
        return self._pool
