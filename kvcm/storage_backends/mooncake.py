"""Blocks in a Mooncake store: ``mooncake`` (ST_MOONCAKE).

Its bytes lie in memory that clients lend to the store; the manager lends none. Writers pin what
they put, so that our quota and eviction own the space; what others put unpinned may vanish.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence

from kvcm.core import mooncake
from kvcm.core.clock import Clock
from kvcm.core.errors import StorageError, Unsupported
from kvcm.core.limits import NAMES_PER_JOB_MAX
from kvcm.core.types import StorageConfig
from kvcm.storage_backends.base import ProbeResult
from kvcm.storage_backends.keyed import KeyedBackend, refusals
from kvcm.storage_backends.mooncake_process import WorkerProcess
from kvcm.storage_backends.mooncake_worker import PROBE_BYTES

PROBE_PREFIX = "kvcm.probe."
"""Of keys that a probe puts and removes; no block's key begins so."""
LEASED = "LEASED"
"""``reason`` of a delete that the master refused because a reader holds a lease."""


class MooncakeBackend(KeyedBackend):
    """One Mooncake store. Pure methods work without ``open``; the SDK runs in its own process.

    It has no call that lists keys; blocks lost with their memory are found by readers' reports.
    """

    product = "Mooncake"

    def __init__(self, config: StorageConfig, clock: Clock) -> None:
        """Check the config; starts and touches nothing.

        Raises:
            InvalidArgument: the config is wrong; the message names the field.
        """
        super().__init__(config, clock)
        self._spec = mooncake.check_spec(config.spec)
        self._label = f"storage {config.global_unique_name} (Mooncake master {self._spec.master})"
        self._worker: WorkerProcess | None = None
        self._probing: asyncio.Task[ProbeResult] | None = None

    async def open(self) -> None:
        """Raises Unsupported when the extra is not installed."""
        if importlib.util.find_spec("mooncake") is None:
            raise Unsupported(f"{self._label}: {mooncake.INSTALL_HINT}")
        if self._worker is None:
            self._worker = WorkerProcess(self._label, self._spec)
        # The first call connects; that it can be answered is all that is asked for here.
        await self._worker.call("exists", [PROBE_PREFIX], [0])
        if self.config.check_storage_available_when_open:
            result = await self.probe()
            if not result.available:
                raise StorageError(result.detail)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
        if self._probing is not None:
            await asyncio.wait([self._probing])

    async def probe(self) -> ProbeResult:
        """One probe runs at a time: callers that come meanwhile wait for the same."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> ProbeResult:
        key = PROBE_PREFIX + self.clock.random_bytes(12).hex()
        try:
            content = self.clock.random_bytes(PROBE_BYTES)
            unwritable = await self._running().call("probe", key, content)
        except StorageError as error:
            return ProbeResult(False, str(error))
        return ProbeResult(True, unwritable=unwritable)

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        """A key that readers hold a lease on is refused (reason LEASED): to be tried again."""
        answers = refusals(names)
        good = [i for i, refusal in enumerate(answers) if refusal is None]

        async def job(part: Sequence[int]) -> None:
            try:
                codes = await self._running().call("delete", [names[i] for i in part])
            except StorageError as error:
                for i in part:
                    answers[i] = error
                return
            for i, code in zip(part, codes, strict=True):
                if code not in (mooncake.OK, mooncake.NOT_FOUND):
                    answers[i] = self._refused(names[i], code)

        await asyncio.gather(*(job(part) for part in _jobs(good)))
        return answers

    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        parts = _jobs(range(len(names)))
        calls = [
            self._running().call("exists", [names[i] for i in part], [sizes[i] for i in part])
            for part in parts
        ]
        return [there for part in await asyncio.gather(*calls) for there in part]

    def _running(self) -> WorkerProcess:
        if self._worker is None:
            raise StorageError(f"{self._label} is not open")
        return self._worker

    def _refused(self, name: str, code: int) -> StorageError:
        reason = LEASED if code == mooncake.LEASED else ""
        return StorageError(f"{self._label}: {name}: {mooncake.meaning(code)}", reason=reason)


def _jobs(positions: Sequence[int]) -> list[Sequence[int]]:
    return [
        positions[at : at + NAMES_PER_JOB_MAX] for at in range(0, len(positions), NAMES_PER_JOB_MAX)
    ]
