"""Repair: records, rows, counters and files are held against each other (design.md §5).

``Repair`` runs at most one thing at a time: a run that somebody asked for, or the background
scrubber's pass, which gives way to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from kvcm.core.errors import DuplicateEntity, EntityNotExist, InstanceNotExist, KvcmError
from kvcm.metaindex.instance import InstanceIndex
from kvcm.reclaimer.base import Report
from kvcm.reclaimer.repair_extents import ExtentCheck
from kvcm.reclaimer.repair_files import FileCheck
from kvcm.reclaimer.repair_records import RecordCheck
from kvcm.reclaimer.repair_report import RepairOptions, RepairReport, RepairTotals
from kvcm.reclaimer.repair_rows import RowCheck
from kvcm.reclaimer.repair_scope import RepairPorts, Scope

_log = logging.getLogger(__name__)
_WAIT_S = 0.2
_REST_S_MAX = 3600.0


class Check(Protocol):
    """One kind of look at an instance, and mending what it found."""

    def check(self, index: InstanceIndex) -> AsyncGenerator[int, None]: ...

    def fix(self) -> AsyncGenerator[int, None]: ...


class RepairRun:
    """One run: look at everything, then mend what is to be mended."""

    def __init__(self, ports: RepairPorts, options: RepairOptions) -> None:
        self.report = RepairReport(options)
        self._scope = Scope(ports, options, self.report)
        self._began = ports.around.clock.monotonic()

    async def steps(self) -> AsyncGenerator[int, None]:
        """The whole run in bounded steps; yields what each looked at, 0 while it waits."""
        scope, report = self._scope, self.report
        by_phase: dict[str, Check] = {
            "records": RecordCheck(scope),
            "blocks": ExtentCheck(scope),
            "rows": RowCheck(scope),
        }
        files = FileCheck(scope)
        self._estimate()
        for name in scope.unloaded():
            report.error(f"instance {name!r} is still being loaded")
        for index in scope.indexes():
            report.instances += 1
            try:
                for phase, check in by_phase.items():
                    report.phase = phase
                    async for count in check.check(index):
                        yield self._count(count)
            except KvcmError as error:
                report.error(f"instance {index.uid}: {error}")
        for storage in scope.storages():
            report.phase = "files"
            try:
                async for count in files.check(storage):
                    yield self._count(count)
            except KvcmError as error:
                report.error(f"storage {storage!r}: {error}")
        if report.options.fix:
            report.phase = "mending"
            # A row that is no use must have gone before a block can be named in its place.
            for phase in ("records", "rows", "blocks"):
                async for count in by_phase[phase].fix():
                    yield count
            async for count in files.fix():
                yield count
        report.phase = "done"
        self._count(0)

    def _estimate(self) -> None:
        """Records to read; how many files there are is not known before."""
        for index in self._scope.indexes():
            blocks = self._scope.around.index.shared.ledger.instance(index.uid).blocks
            self.report.total += 2 * len(index.book.entries) + blocks

    def _count(self, count: int) -> int:
        self.report.done += count
        self.report.seconds = self._scope.clock.monotonic() - self._began
        return count


class Repair:
    """Runs on demand, and the scrubber's passes.

    Attributes:
        totals: everything that runs found and mended since the process began.
        last: the report of the run under way, else of the latest one; None before the first.
    """

    def __init__(self, ports: RepairPorts) -> None:
        self._ports = ports
        self._task: asyncio.Task[None] | None = None
        self.totals = RepairTotals()
        self.last: RepairReport | None = None
        self.last_scrub: RepairReport | None = None

    @property
    def is_running(self) -> bool:
        """Whether somebody's run is under way."""
        return self._task is not None and not self._task.done()

    def start(self, options: RepairOptions) -> RepairReport:
        """Begin a run; its report grows while it goes on.

        Raises:
            DuplicateEntity: one is under way.
            InstanceNotExist, EntityNotExist: it is to look at something that is not there.
        """
        if self.is_running:
            raise DuplicateEntity("a repair run is under way")
        self._check_names(options)
        run = RepairRun(self._ports, options)
        self.last = run.report
        self._task = asyncio.ensure_future(self._run(run))
        # Also when it is stopped before its first step.
        self._task.add_done_callback(lambda task: self._over(task, run.report))
        return run.report

    def _check_names(self, options: RepairOptions) -> None:
        view, instance = self._ports.view(), options.instance
        if options.storage and options.storage not in view.storages:
            raise EntityNotExist(f"storage {options.storage[:200]!r} does not exist")
        uids = self._ports.around.index.by_uid
        if instance and instance not in view.instances and instance not in uids:
            raise InstanceNotExist(f"instance {instance[:200]!r} does not exist")

    async def stop(self) -> None:
        """End a run where it stands; what it mended stays mended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))

    def new_pass(self) -> RepairRun:
        """A pass of the scrubber: it mends, but records that do not parse it leaves to a human."""
        run = RepairRun(self._ports, RepairOptions(fix=True, unreadable=False))
        self.last_scrub = run.report
        return run

    def ended(self, report: RepairReport) -> None:
        """Count a run that came to its end."""
        self.totals.add(report, self._ports.around.clock.now())
        for kind, count in report.kinds.items():
            if count.found:
                _log.warning("repair: %s: %d found, %d mended", kind, count.found, count.fixed)
        for name, storage in report.storages.items():
            for why in storage.stopped:
                _log.error("repair of storage %r stopped for a human: %s", name, why)

    async def _run(self, run: RepairRun) -> None:
        report = run.report
        try:
            async with aclosing(run.steps()) as steps:
                async for count in steps:
                    await self._ports.around.clock.sleep(0 if count else _WAIT_S)
        except Exception as error:
            # Whatever it was, whoever asked must learn of it: the run has no other caller.
            _log.exception("repair failed")
            report.error(f"{type(error).__name__}: {error}")
            report.phase = "failed"

    def _over(self, task: asyncio.Task[None], report: RepairReport) -> None:
        if task.cancelled():
            report.error("stopped")
            report.phase = "stopped"
        self.ended(report)


class ScrubLoop:
    """Repair in the background, at a set pace; one pass after the other, an hour apart at most.

    Args:
        per_second: records and files that it looks at; 0 = off.
    """

    name = "scrub"
    period_s = 1.0

    def __init__(self, repair: Repair, per_second: int) -> None:
        self._repair = repair
        self._per_second = per_second
        self._run: RepairRun | None = None
        self._steps: AsyncGenerator[int, None] | None = None
        self._not_before = 0.0
        self._owed = 0

    async def run_once(self, now: float) -> Report:
        report = Report()
        if not self._per_second:
            return report
        if self._repair.is_running:
            await self._drop()
            return report
        if self._steps is None:
            if now < self._not_before:
                return report
            self._run = self._repair.new_pass()
            self._steps = self._run.steps()
        # A step may look at more than is left of this second: the next ones pay for it.
        self._owed = max(0, self._owed - self._per_second)
        while self._owed < self._per_second and self._steps is not None:
            try:
                count = await anext(self._steps)
            except StopAsyncIteration:
                self._end(now)
                break
            except BaseException:
                # Cancelled, too: a pass that stopped half-way is begun anew, not gone on with.
                await self._drop()
                raise
            if not count:
                break
            self._owed += count
            report.done += count
            await asyncio.sleep(0)
        return report

    def _end(self, now: float) -> None:
        run, self._run, self._steps = self._run, None, None
        self._not_before = now + _REST_S_MAX
        if run is not None:
            self._repair.ended(run.report)

    async def _drop(self) -> None:
        """Give up the pass; the next one begins from the start."""
        steps, self._run, self._steps = self._steps, None, None
        if steps is not None:
            await steps.aclose()
