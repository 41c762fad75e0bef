"""One daemon thread that runs all SQL, one job after the other, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_Job = Callable[[], None]


class SqlWorker:
    """Runs jobs in order of submission. The thread starts with the first ``start``."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread: a daemon, so a database that hangs does not keep us from exiting."""
        self._thread = threading.Thread(target=self._loop, name="kvcm-registry", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], T], on_done: Callable[[T], None] | None = None
    ) -> asyncio.Future[T]:
        """Queues ``work``; the result arrives on the calling loop.

        ``on_done`` gets a successful result on the loop, before the waiter wakes and even when the
        waiter was cancelled meanwhile: by then the work has taken effect.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: T | None, error: BaseException | None) -> None:
            if error is None and on_done is not None:
                # Without an error `result` is a T, and None only where T is.
                on_done(result)  # type: ignore[arg-type]
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                # As above.
                future.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = (work(), None)
            except BaseException as error:
                # Handed to whoever waits for the work; the thread goes on with the next one.
                outcome = (None, error)
            try:
                loop.call_soon_threadsafe(deliver, *outcome)
            except RuntimeError:
                pass  # The loop is gone, and with it whoever waited.

        self._jobs.put(job)
        return future

    @property
    def running(self) -> bool:
        """Whether jobs are still taken."""
        return self._thread is not None

    def stop(self) -> None:
        """Lets the thread end after the jobs queued so far."""
        self._jobs.put(None)
        self._thread = None

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
