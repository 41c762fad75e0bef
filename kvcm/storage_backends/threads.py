"""Threads for calls that may hang in the kernel, as those on a dead network mount do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from kvcm.core.errors import StorageError

T = TypeVar("T")


class _Job:
    """One call and the future that waits for it. Settled on the loop only."""

    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()


class DaemonPool:
    """A few daemon threads, started at the first job.

    ``concurrent.futures`` joins its threads when the interpreter exits; one that hangs in the
    kernel would hold the exit for ever. These are abandoned instead.
    """

    def __init__(self, name: str, *, threads_max: int, jobs_max: int) -> None:
        self._name = name
        self._threads_max = threads_max
        self._jobs_max = jobs_max
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = 0
        self._jobs: set[_Job] = set()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. Cancelling the wait does not stop a call that has begun.

        Raises:
            StorageError: the pool is closed, or too many jobs wait already.
            Exception: whatever ``work`` raised.
        """
        if self._closed:
            raise StorageError(f"{self._name} is closed")
        if len(self._jobs) >= self._jobs_max:
            raise StorageError(
                f"{self._name} does not answer: {len(self._jobs)} calls wait "
                f"(limit {self._jobs_max})"
            )
        job = _Job(work, asyncio.get_running_loop())
        self._jobs.add(job)
        if self._threads < min(self._threads_max, len(self._jobs)):
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._queue.put(job)
        result: T = await job.future
        return result

    def close(self) -> None:
        """Fail what still waits and let the threads end; waits for none of them. Idempotent."""
        self._closed = True
        for job in self._jobs:
            if not job.future.done():
                job.future.set_exception(StorageError(f"{self._name} was closed"))
        self._jobs.clear()
        for _ in range(self._threads):
            self._queue.put(None)
        self._threads = 0

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            if not job.future.done():
                try:
                    result = job.work()
                except BaseException as caught:
                    # Handed to whoever waits for the job; the thread goes on with the next one.
                    error = caught
            try:
                job.loop.call_soon_threadsafe(self._settle, job, result, error)
            except RuntimeError:
                return  # the loop is gone, and with it whoever waited

    def _settle(self, job: _Job, result: Any, error: BaseException | None) -> None:
        self._jobs.discard(job)
        if job.future.done():
            return
        if error is None:
            job.future.set_result(result)
        else:
            job.future.set_exception(error)
