"""The manager's end of a Mooncake worker process."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from kvcm.core.errors import StorageError
from kvcm.core.limits import MOONCAKE_CALL_S_MAX, STORAGE_JOBS_MAX
from kvcm.core.mooncake import MooncakeSpec
from kvcm.storage_backends.mooncake_worker import frame

_END_S = 5.0
_SDK_DEFAULTS = {
    # Errors only, twenty tries less: the manager tries again itself, and says so.
    "GLOG_minloglevel": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


class WorkerProcess:
    """Starts the process at the first call, and again after it ended or had to be ended.

    A call that is not answered within MOONCAKE_CALL_S_MAX ends the process: calls are answered in
    order, so whatever holds up one holds up all.
    """

    def __init__(self, label: str, spec: MooncakeSpec) -> None:
        self._label = label
        self._spec = spec
        self._start = asyncio.Lock()
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._number = 0
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The process id, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def call(self, operation: str, *arguments: Any) -> Any:
        """One operation of the worker. Cancelling the wait does not stop it.

        Raises:
            StorageError: it failed, the process ended, or too many calls wait already.
        """
        if len(self._waiting) >= STORAGE_JOBS_MAX:
            raise StorageError(
                f"{self._label} does not answer: {len(self._waiting)} calls wait "
                f"(limit {STORAGE_JOBS_MAX})"
            )
        async with self._start:
            process = await self._running()
        loop = asyncio.get_running_loop()
        self._number += 1
        future: asyncio.Future[Any] = loop.create_future()
        timer = loop.call_later(MOONCAKE_CALL_S_MAX, self._overdue, process)
        self._waiting[self._number] = future, timer
        assert process.stdin is not None  # asked for as a pipe
        process.stdin.write(frame([self._number, operation, *arguments]))
        return await future

    async def close(self) -> None:
        """End the process; what waits fails. Idempotent."""
        self._is_closed = True
        reading = self._reading
        if self._process is not None:
            self._kill(self._process)
        if reading is not None:
            await asyncio.wait([reading], timeout=_END_S)

    async def _running(self) -> Process:
        if self._is_closed:
            raise StorageError(f"{self._label} is not open")
        if self._process is None:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "kvcm.storage_backends.mooncake_worker"),
                    stdin=PIPE,
                    stdout=PIPE,
                    # Its errors come back as answers.
                    stderr=DEVNULL,
                    env=_SDK_DEFAULTS | os.environ,
                )
            except OSError as error:
                raise StorageError(f"{self._label}: no process for the SDK: {error}") from error
            assert process.stdin is not None  # asked for as a pipe
            process.stdin.write(frame(asdict(self._spec)))
            self._process = process
            self._reading = asyncio.create_task(self._read(process))
        return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None  # asked for as a pipe
        try:
            while True:
                head = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(int.from_bytes(head, "big"))
                number, failure, result = msgspec.msgpack.decode(body)
                future, timer = self._waiting.pop(number)
                timer.cancel()
                if future.done():
                    continue
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(StorageError(f"{self._label}: {failure}"))
        except asyncio.IncompleteReadError:
            pass
        finally:
            self._ended(process)
        await process.wait()

    def _overdue(self, process: Process) -> None:
        if self._process is process:
            self._kill(process)

    def _kill(self, process: Process) -> None:
        with suppress(ProcessLookupError):
            process.kill()
        self._ended(process)

    def _ended(self, process: Process) -> None:
        """Fail what waits; the next call starts another process."""
        if self._process is not process:
            return
        self._process = None
        assert process.stdin is not None  # asked for as a pipe
        process.stdin.close()
        waiting, self._waiting = self._waiting, {}
        for future, timer in waiting.values():
            timer.cancel()
            if not future.done():
                future.set_exception(
                    StorageError(f"{self._label}: the SDK's process does not answer, or ended")
                )
