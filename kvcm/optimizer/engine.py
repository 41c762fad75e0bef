"""One simulated engine: looks up a prompt's blocks, reads the hits, writes the rest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvcm.client.errors import is_reportable, report_kind
from kvcm.core.clock import Clock
from kvcm.core.errors import CapacityReached, KvcmError, NotLeader, NotReady, Unsupported
from kvcm.core.types import ReportKind
from kvcm.optimizer.content import BlockContent
from kvcm.optimizer.counters import Counters, StorageCounters, count
from kvcm.optimizer.latency import LatencyHistogram

T = TypeVar("T")

_BATCH_BYTES = 64 * 1024 * 1024
"""Block bytes held in memory at once."""
_BACKOFF_S = (0.05, 1.0)
"""First and longest pause between two tries."""

Location = Mapping[str, str]
"""Spec name → URI."""


class GaveUp(KvcmError):
    """The manager did not answer for the whole time allowed, or the replay is being stopped."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What StartWriteCache answered. ``granted[j]`` is the index of the key of ``locations[j]``."""

    session_id: str
    granted: Sequence[int]
    locations: Sequence[Location]
    reason: str = ""
    """The limit that refused the rest; "" when none did."""


class Manager(Protocol):
    """The calls an engine makes; each raises KvcmError."""

    async def lookup(self, keys: Sequence[int]) -> Sequence[Location]:
        """Locations of the longest known prefix of ``keys``."""

    async def start(self, keys: Sequence[int]) -> Grant:
        """Begin to write what is missing of ``keys``."""

    async def finish(self, session_id: str, success: Sequence[bool]) -> None:
        """Tell which granted blocks were written."""

    async def report(
        self, keys: Sequence[int], locations: Sequence[Location], kinds: Sequence[ReportKind]
    ) -> int:
        """Tell which hits could not be read; how many reports had their effect."""


class BlockStore(Protocol):
    """The transfer SDK: answers position by position, errors as values."""

    def put_many(
        self, items: Sequence[tuple[str, bytes]], *, deadline_s: float | None = None
    ) -> Sequence[KvcmError | None]:
        """Write blocks; None = written."""

    def get_many(
        self, items: Sequence[tuple[str, None]], *, deadline_s: float | None = None
    ) -> Sequence[bytes | KvcmError | None]:
        """Read blocks."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``spec_names`` of every block, each of ``block_bytes``. ``transfer_s``: the longest a call of
    the store may take."""

    spec_names: tuple[str, ...]
    block_bytes: int
    verify: bool = True
    outage_s: float = 30.0
    transfer_s: float = 30.0


class Engine:
    """Serves requests one after the other and counts what came of them."""

    def __init__(
        self,
        manager: Manager,
        store: BlockStore,
        content: BlockContent,
        settings: EngineSettings,
        clock: Clock,
        *,
        stopping: Callable[[], bool] = lambda: False,
        acknowledged: Callable[[Sequence[int]], None] = lambda keys: None,
    ) -> None:
        """``acknowledged`` gets the keys that a successful finish published."""
        self.counters = Counters()
        self._manager = manager
        self._store = store
        self._content = content
        self._settings = settings
        self._clock = clock
        self._stopping = stopping
        self._acknowledged = acknowledged
        self._reports = True

    async def serve(self, keys: Sequence[int]) -> None:
        """One request: lookup, read and verify, write the rest, finish.

        Raises:
            GaveUp: the manager stayed away; everything else is counted.
        """
        counters = self.counters
        counters.requests += 1
        if not keys:
            return
        counters.requests_with_blocks += 1
        counters.blocks_asked += len(keys)
        try:
            found = await self._timed(counters.lookup, lambda: self._manager.lookup(keys))
            faulty = self._read(keys, found) if self._settings.verify else {}
            usable = len(found) - len(faulty)
            counters.blocks_hit += usable
            counters.hit_shares += usable / len(keys)
            taken_out = await self._report(keys, found, faulty)
            if len(found) < len(keys) or taken_out:
                await self._write(keys, len(found))
        except GaveUp:
            counters.requests_failed += 1
            raise
        except KvcmError as error:
            counters.requests_failed += 1
            count(counters.errors, type(error).__name__)
            counters.note(f"request given up: {error}")

    def _read(self, keys: Sequence[int], found: Sequence[Location]) -> dict[int, ReportKind]:
        """Read all specs of the hits and compare; what is the matter with those that fail:
        UNSPECIFIED when it is this engine that cannot read them."""
        faulty: dict[int, ReportKind] = {}
        begun = self._clock.monotonic()
        for batch in self._batches(len(found)):
            names = [(i, spec) for i in batch for spec in self._settings.spec_names]
            answers = self._store.get_many(
                [(found[i].get(spec, ""), None) for i, spec in names],
                deadline_s=self._settings.transfer_s,
            )
            for (i, spec), data in zip(names, answers, strict=True):
                fault = self._fault(keys[i], spec, found[i], data) if i not in faulty else None
                if fault is not None:
                    faulty[i] = fault
            for i in batch:
                counters = self._storage_of(found[i])
                counters.reads_failed += i in faulty
                counters.blocks_read += i not in faulty
        if found:
            self.counters.read.add(self._clock.monotonic() - begun)
        return faulty

    def _fault(
        self, key: int, spec: str, location: Location, data: bytes | KvcmError | None
    ) -> ReportKind | None:
        """Counts what is wrong; called for a block's specs up to the first bad one."""
        counters = self.counters
        uri = location.get(spec, "(no such spec)")
        if not isinstance(data, bytes):
            counters.blocks_lost += 1
            counters.note(f"lost: block {key} {spec} at {uri}: {data}")
            if data is None:
                return ReportKind.MISSING
            return report_kind(data) if is_reportable(data) else ReportKind.UNSPECIFIED
        counters.bytes_read += len(data)
        self._storage_of(location).bytes_read += len(data)
        fault = self._content.fault(key, spec, self._settings.block_bytes, data)
        if fault is not None:
            counters.blocks_wrong += 1
            counters.note(f"WRONG BYTES: block {key} {spec} at {uri}: {fault}")
            return ReportKind.CORRUPT
        return None

    async def _report(
        self, keys: Sequence[int], found: Sequence[Location], faulty: Mapping[int, ReportKind]
    ) -> bool:
        """So that the next one does not meet the same; whether any report had its effect."""
        told = {i: kind for i, kind in faulty.items() if kind is not ReportKind.UNSPECIFIED}
        if not told or not self._reports:
            return False
        accepted = 0
        try:
            accepted = await self._manager.report(
                [keys[i] for i in told], [found[i] for i in told], list(told.values())
            )
        except Unsupported:
            # A manager of another make: the call is an addition of ours.
            self._reports = False
        except KvcmError as error:
            count(self.counters.errors, type(error).__name__)
            self.counters.note(f"report failed: {error}")
        self.counters.blocks_reported += accepted
        return accepted > 0

    async def _write(self, keys: Sequence[int], hits: int) -> None:
        counters = self.counters
        try:
            grant = await self._timed(counters.start, lambda: self._manager.start(keys))
        except CapacityReached as error:
            count(counters.blocks_refused, error.reason or type(error).__name__, len(keys) - hits)
            return
        self._count_masked(keys, hits, grant)
        success = self._put(keys, grant)
        try:
            await self._timed(
                counters.finish, lambda: self._manager.finish(grant.session_id, success)
            )
        except KvcmError as error:
            counters.blocks_failed += len(success)
            if isinstance(error, GaveUp):
                raise
            count(counters.errors, type(error).__name__)
            counters.note(f"finish failed: {error}")
            return
        written = [keys[i] for i, ok in zip(grant.granted, success, strict=True) if ok]
        counters.blocks_written += len(written)
        counters.blocks_failed += len(success) - len(written)
        self._acknowledged(written)

    def _count_masked(self, keys: Sequence[int], hits: int, grant: Grant) -> None:
        """A limit grants a leading part (wire.md §5): what is masked behind it was refused."""
        granted = set(grant.granted)
        masked = [i for i in range(hits, len(keys)) if i not in granted]
        behind = max(granted, default=hits - 1)
        refused = sum(i > behind for i in masked) if grant.reason else 0
        if refused:
            count(self.counters.blocks_refused, grant.reason, refused)
        self.counters.blocks_present += len(masked) - refused

    def _put(self, keys: Sequence[int], grant: Grant) -> list[bool]:
        counters, settings = self.counters, self._settings
        success = [True] * len(grant.granted)
        begun = self._clock.monotonic()
        for batch in self._batches(len(grant.granted)):
            names = [(j, spec) for j in batch for spec in settings.spec_names]
            answers = self._store.put_many(
                [
                    (
                        grant.locations[j].get(spec, ""),
                        self._content.make(keys[grant.granted[j]], spec, settings.block_bytes),
                    )
                    for j, spec in names
                ],
                deadline_s=settings.transfer_s,
            )
            for (j, spec), error in zip(names, answers, strict=True):
                if error is None:
                    counters.bytes_written += settings.block_bytes
                    self._storage_of(grant.locations[j]).bytes_written += settings.block_bytes
                    continue
                success[j] = False
                counters.note(f"not written: block {keys[grant.granted[j]]} {spec}: {error}")
            for j in batch:
                at = self._storage_of(grant.locations[j])
                at.writes_failed += not success[j]
                at.blocks_written += success[j]
        if grant.granted:
            counters.write.add(self._clock.monotonic() - begun)
        return success

    def _storage_of(self, location: Location) -> StorageCounters:
        """All specs of a block lie on one storage."""
        parts = next(iter(location.values()), "").split("/", 3)
        return self.counters.storage("/".join(parts[:3]))

    def _batches(self, blocks: int) -> Iterator[range]:
        block = self._settings.block_bytes * len(self._settings.spec_names)
        step = max(1, _BATCH_BYTES // block)
        return (range(first, min(first + step, blocks)) for first in range(0, blocks, step))

    async def _timed(self, histogram: LatencyHistogram, call: Callable[[], Awaitable[T]]) -> T:
        """Call until the manager answers; the successful try is what is timed.

        Raises:
            GaveUp: no answer for ``outage_s``.
            KvcmError: an answer that another try does not change.
        """
        pause = _BACKOFF_S[0]
        give_up_at: float | None = None
        while True:
            begun = self._clock.monotonic()
            try:
                answer = await call()
            except (NotReady, NotLeader) as error:
                now = self._clock.monotonic()
                give_up_at = now + self._settings.outage_s if give_up_at is None else give_up_at
                if now + pause > give_up_at or self._stopping():
                    raise GaveUp(f"no answer for {self._settings.outage_s:g} s: {error}") from error
                count(self.counters.retries, type(error).__name__)
                await self._clock.sleep(pause)
                pause = min(2 * pause, _BACKOFF_S[1])
            else:
                histogram.add(self._clock.monotonic() - begun)
                return answer
