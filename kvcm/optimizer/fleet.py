"""A fleet of engines, each a process with its own client, that share the rows of one trace.

Whoever is free takes the next row. With recorded speed it waits for the row's time first; when all
engines are busy then, the row begins late and the delay is counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import cast

import msgspec

from kvcm.client import AsyncClient
from kvcm.client.router import Moved, Transfers
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import KvcmError
from kvcm.optimizer.acks import AckWriter
from kvcm.optimizer.content import BlockContent
from kvcm.optimizer.counters import Counters
from kvcm.optimizer.engine import BlockStore, Engine, EngineSettings, GaveUp
from kvcm.optimizer.remote import RemoteManager
from kvcm.optimizer.trace import TraceRow, read_trace

_REPORT_S = 0.2
"""Between two reports of an engine, and the longest nap of a waiting one."""
_STOP_S = 10.0
"""After a stop is asked for, until an engine is killed."""


class ReplayPlan(msgspec.Struct, frozen=True):
    """What every engine needs to know; passed to it as JSON.

    ``speed`` is a factor on the recorded times; None = flat out. ``block_bytes`` is the size of
    each spec of a block, ``block_tokens`` the trace's block size. ``storage_configs`` is what
    RegisterInstance answered: JSON of the storages, for the SDKs.
    """

    trace: str
    targets: list[str]
    instance: str
    fingerprint: str
    spec_names: list[str]
    block_bytes: int
    block_tokens: int
    lenient: bool = False
    skip: int = 0
    limit: int | None = None
    speed: float | None = None
    verify: bool = True
    outage_s: float = 30.0
    write_timeout_s: int = 0
    call_timeout_s: float = 10.0
    transfer_timeout_s: float = 30.0
    acks: str | None = None
    storage_configs: str = ""


class _Report(msgspec.Struct):
    """A message of an engine: what it counted since the last, and at the end what stopped it."""

    ready: bool = False
    counters: Counters | None = None
    done: bool = False
    error: str = ""


class Outcome(msgspec.Struct):
    """``errors`` names the engines that ended before their work; ``stopped``: on request."""

    counters: Counters
    wall_s: float
    stopped: bool
    errors: list[str]


_Counter = Synchronized  # of int: the next row to take


class Fleet:
    """Starts engines, gathers their reports, stops them."""

    def __init__(self, plan: ReplayPlan, workers: int, clock: Clock | None = None) -> None:
        self._plan = plan
        self._clock = clock or SystemClock()
        self._context = multiprocessing.get_context("spawn")
        self._next = self._context.Value("q", 0)
        self._stop = self._context.Event()
        self._workers = workers
        self._open: dict[Connection, SpawnProcess] = {}
        self._processes: list[SpawnProcess] = []
        self._outcome = Outcome(Counters(), 0.0, False, [])

    def run(self, on_progress: Callable[[Counters], None] = lambda counters: None) -> Outcome:
        """Run to the end. KeyboardInterrupt stops the engines; what was done is returned.

        Args:
            on_progress: called a few times a second with the counts so far.
        """
        begun: float | None = None
        try:
            self._spawn()
            if self._gather_ready():
                begun = self._clock.monotonic()
                for pipe in self._open:
                    pipe.send_bytes(msgspec.json.encode(begun))
                while self._open:
                    self._gather(_REPORT_S)
                    on_progress(self._outcome.counters)
        except KeyboardInterrupt:
            self._outcome.stopped = True
        finally:
            self._end(begun is not None)
        if begun is not None:
            self._outcome.wall_s = self._clock.monotonic() - begun
        return self._outcome

    def _spawn(self) -> None:
        plan = msgspec.json.encode(self._plan)
        # Engines inherit it: a Ctrl-C reaches the whole terminal group, and only we react.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(self._workers):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(
                    target=engine_process, args=(plan, theirs, self._next, self._stop), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._open[ours] = process
        finally:
            signal.signal(signal.SIGINT, before)

    def _gather_ready(self) -> bool:
        """Wait until each engine is ready or gone; False when one is gone."""
        waiting = set(self._open)
        while waiting:
            for pipe in cast("list[Connection]", wait(list(waiting))):
                waiting.discard(pipe)
                self._receive(pipe)
        return not self._outcome.errors

    def _gather(self, timeout_s: float) -> None:
        for pipe in cast("list[Connection]", wait(list(self._open), timeout_s)):
            self._receive(pipe)
        if self._outcome.errors:
            # What is left would wait as long for the same manager.
            self._stop.set()

    def _receive(self, pipe: Connection) -> None:
        try:
            report = msgspec.json.decode(pipe.recv_bytes(), type=_Report)
        except (EOFError, OSError):
            process = self._open.pop(pipe)
            process.join(_STOP_S)
            self._outcome.errors.append(f"an engine died, exit code {process.exitcode}")
            return
        if report.counters is not None:
            self._outcome.counters.merge(report.counters)
        if report.error:
            self._outcome.errors.append(report.error)
        if report.done:
            del self._open[pipe]

    def _end(self, begun: bool) -> None:
        """Ask the engines to stop, gather what they still report, kill those that do not obey."""
        self._stop.set()
        try:
            give_up_at = self._clock.monotonic() + (_STOP_S if begun else 0.0)
            while self._open and self._clock.monotonic() < give_up_at:
                self._gather(_REPORT_S)
        except KeyboardInterrupt:
            pass
        for process in self._processes:
            process.join(0 if process in self._open.values() else _STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


def engine_process(plan_json: bytes, pipe: Connection, row: _Counter[int], stop: Event) -> None:
    """Entry of an engine's process."""
    plan = msgspec.json.decode(plan_json, type=ReplayPlan)
    error = ""
    counters = None
    try:
        runner = _EngineRunner(plan, pipe, row, stop)
        try:
            asyncio.run(runner.run())
        finally:
            counters = runner.unreported()
    except BrokenPipeError:
        return
    except KvcmError as failure:
        error = str(failure)
    _send(pipe, _Report(counters=counters, done=True, error=error))


class _EngineRunner:
    def __init__(self, plan: ReplayPlan, pipe: Connection, row: _Counter[int], stop: Event) -> None:
        self._plan = plan
        self._pipe = pipe
        self._row = row
        self._stop = stop
        self._clock = SystemClock()
        self._engine: Engine | None = None
        self._rows: Sequence[TraceRow] = read_trace(
            plan.trace,
            block_size=plan.block_tokens,
            lenient=plan.lenient,
            skip=plan.skip,
            limit=plan.limit,
        ).rows

    async def run(self) -> None:
        plan = self._plan
        acks = AckWriter(plan.acks) if plan.acks is not None else None
        async with AsyncClient(plan.targets, timeout=plan.call_timeout_s) as client:
            store = Transfers(plan.storage_configs, clock=self._clock, observe=self._moved)
            self._engine = Engine(
                RemoteManager(client, plan.instance, plan.write_timeout_s),
                cast(BlockStore, store),
                BlockContent(plan.fingerprint),
                EngineSettings(
                    tuple(plan.spec_names),
                    plan.block_bytes,
                    plan.verify,
                    plan.outage_s,
                    plan.transfer_timeout_s,
                ),
                self._clock,
                stopping=self._stop.is_set,
                acknowledged=acks.add if acks else lambda keys: None,
            )
            _send(self._pipe, _Report(ready=True))
            begin = msgspec.json.decode(self._pipe.recv_bytes(), type=float)
            with store:
                await self._serve(self._engine, begin)
        if acks:
            acks.close()

    async def _serve(self, engine: Engine, begin: float) -> None:
        reported = self._clock.monotonic()
        while not self._stop.is_set():
            with self._row.get_lock():
                index = self._row.value
                self._row.value = index + 1
            if index >= len(self._rows):
                return
            if self._plan.speed is not None and not await self._wait_for(index, begin):
                return
            try:
                await engine.serve(self._rows[index].hash_ids)
            except GaveUp:
                if self._stop.is_set():
                    return
                raise
            now = self._clock.monotonic()
            if now - reported >= _REPORT_S:
                reported = now
                _send(self._pipe, _Report(counters=self.unreported()))

    async def _wait_for(self, index: int, begin: float) -> bool:
        """Sleep until the row is due; False when the replay was stopped meanwhile."""
        speed = self._plan.speed
        assert speed is not None
        assert self._engine is not None
        offset_ms = self._rows[index].timestamp_ms - self._rows[0].timestamp_ms
        due = begin + offset_ms / 1e3 / speed
        while (left := due - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, _REPORT_S))
            if self._stop.is_set():
                return False
        counters = self._engine.counters
        counters.late_max_s = max(counters.late_max_s, -left)
        return True

    def _moved(self, moved: Moved) -> None:
        assert self._engine is not None
        at = self._engine.counters.storage(f"{moved.place.scheme}://{moved.place.storage}")
        if moved.is_put:
            at.write_s += moved.seconds
        else:
            at.read_s += moved.seconds

    def unreported(self) -> Counters | None:
        """What was counted since the last call."""
        if self._engine is None:
            return None
        counters = self._engine.counters
        self._engine.counters = Counters()
        return counters


def _send(pipe: Connection, report: _Report) -> None:
    pipe.send_bytes(msgspec.json.encode(report))
