"""Folders and files that storages make ahead of their writers, in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvcm.core.errors import KvcmError
from kvcm.storage_backends.base import DataStorageBackend

_log = logging.getLogger(__name__)
_WAIT_S = 1.0
"""A first write waits this long for its folders; a slow storage goes on in the background."""


class Files:
    """Work on storages that no answer waits for, but a first write for its folders.

    Args:
        backend: the opened storage of a name.
        cluster_uid: the first folder of every path.
    """

    def __init__(
        self, backend: Callable[[str], DataStorageBackend | None], cluster_uid: str
    ) -> None:
        self._backend = backend
        self._cluster_uid = cluster_uid
        self._made: dict[tuple[str, str], DataStorageBackend] = {}
        self._making: dict[tuple[str, str], asyncio.Task[bool]] = {}
        self._touching: set[asyncio.Task[bool]] = set()

    def prepare(self, instance_uid: str, storage: str) -> asyncio.Task[bool] | None:
        """Begin to make an instance's folders on a storage; None when they are there."""
        key, backend = (instance_uid, storage), self._backend(storage)
        if backend is None or self._made.get(key) is backend:
            return None
        task = self._making.get(key)
        if task is None:
            work = backend.prepare(self._cluster_uid, instance_uid)
            task = self._making[key] = asyncio.ensure_future(_logged(work, "making folders"))

            def done(finished: asyncio.Task[bool]) -> None:
                self._making.pop(key, None)
                if not finished.cancelled() and finished.result():
                    self._made[key] = backend

            task.add_done_callback(done)
        return task

    async def prepared(self, instance_uid: str, storage: str) -> bool:
        """Wait a little for an instance's folders; whether there was anything to wait for."""
        task = self.prepare(instance_uid, storage)
        if task is None:
            return False
        await asyncio.wait((task,), timeout=_WAIT_S)
        return True

    def touch(self, storage: str, names: Sequence[str]) -> None:
        """Make empty objects ahead of their writer."""
        backend = self._backend(storage)
        if backend is not None:
            task = asyncio.ensure_future(_logged(backend.touch(names), "making files"))
            self._touching.add(task)
            task.add_done_callback(self._touching.discard)

    async def close(self) -> None:
        """Stop what is under way; a storage that hangs is not waited for."""
        tasks = [*self._making.values(), *self._touching]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _logged(work: Coroutine[Any, Any, None], what: str) -> bool:
    try:
        await work
    except KvcmError as error:
        _log.warning("%s: %s", what, error)
        return False
    return True
