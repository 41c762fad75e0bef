"""TinyLFU admission: under pressure a write must be worth what it displaces.

Lookups and writes are counted per group in a frequency sketch, off their own path: they only queue
their keys. A group that did not ask for admission has no sketch, and its calls no cost.

When a write would take usage above a high mark, its missing blocks are compared with the extents
that eviction would take for them, the coldest first. A victim stands its ground when it was used
more often than the block that would displace it; then the write gets the blocks before that one
(docs/decisions/0015).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvcm.cache.api import AdmissionUsage
from kvcm.cache.room import Limit
from kvcm.core import quota
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.keys import KeyBatch
from kvcm.core.limits import ADMISSION_QUEUE_BYTES_MAX, SKETCH_CELLS_MAX, SKETCH_CELLS_MIN
from kvcm.core.mixing import Hashes, hashes, seed_of
from kvcm.core.types import AdmissionPolicy, InstanceGroup, StorageConfig
from kvcm.metaindex.entry import Entry, with_ancestors
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.pressure import Scope
from kvcm.metaindex.sketch import Counts, FrequencySketch

if TYPE_CHECKING:
    from kvcm.cache.plan import Plan

PERIOD_CAPACITIES = 8
"""Uses of blocks, in capacities of the group, within which counts are halved."""
CELLS_PER_BLOCK = 4
"""Counters in a row of the sketch for each block of the capacity."""
VICTIMS_FIRST, VICTIMS_MAX = 8, 64
"""Extents that one write is compared with: at first, and at most."""
STAYS_PER_USE = 2
"""How often a victim may stay for each of its uses."""
_SLICE_KEYS = 1024
_SLICES_INLINE = 4
_RUNS_MAX = 4
_DEFENCES_MAX = 4096


@dataclass(slots=True)
class _Defence:
    """A victim that was compared: its leading blocks, and how often it stayed."""

    stamp_ms: int
    keys: Hashes
    stays: int = 0


@dataclass(slots=True)
class _Waiting:
    seed: int
    batch: KeyBatch
    write: bool
    at: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the missing blocks ``unpressed`` leading ones fit below every mark, and ``admitted`` (at
    least those) are worth what they displace."""

    unpressed: int
    admitted: int


class GroupFrequencies:
    """What one group's requests ask for, and how its victims stand."""

    def __init__(self) -> None:
        self.admitted = self.refused = self.uncounted = 0
        self.sketch: FrequencySketch | None = None
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._defences: OrderedDict[bytes, _Defence] = OrderedDict()

    @property
    def ready(self) -> bool:
        """Counts mean something: one period is over."""
        return self.sketch is not None and self.sketch.periods > 0

    def size(self, blocks: int) -> None:
        """Fit the sketch to a capacity; one of another size begins anew."""
        cells = min(max(CELLS_PER_BLOCK * blocks, SKETCH_CELLS_MIN), SKETCH_CELLS_MAX)
        # More uses a period than that would fill the counters with strangers' uses.
        period = min(PERIOD_CAPACITIES * blocks, PERIOD_CAPACITIES // CELLS_PER_BLOCK * cells)
        if self.sketch is None or not cells <= self.sketch.cells < 4 * cells:
            self.sketch = FrequencySketch(cells, period)
        self.sketch.period = max(1, period)

    def note(self, seed: int, batch: KeyBatch, *, write: bool) -> bool:
        """Queue a request; False when the queue is full and it will not be counted."""
        if self._queued_bytes + len(batch.data) > ADMISSION_QUEUE_BYTES_MAX:
            self.uncounted += 1
            return False
        self._queued_bytes += len(batch.data)
        self._queue.append(_Waiting(seed, batch, write))
        return True

    def step(self) -> bool:
        """Count up to ``_SLICE_KEYS`` keys; False when nothing waits."""
        if not self._queue or self.sketch is None:
            return False
        if self.sketch.prepare():
            return True
        waiting = self._queue[0]
        try:
            raw, waiting.at = waiting.batch.piece(waiting.at, _SLICE_KEYS)
        except InvalidArgument:
            # Its caller got that answer.
            raw = b""
        if raw:
            keys = hashes(raw, waiting.seed)
            (self.sketch.write if waiting.write else self.sketch.announce)(keys)
        if not raw or waiting.at >= len(waiting.batch.data):
            self._queue.popleft()
            self._queued_bytes -= len(waiting.batch.data)
        return True

    def usage(self) -> AdmissionUsage:
        """As operators see it."""
        return AdmissionUsage(self.ready, self.admitted, self.refused, self.uncounted)

    def defence(self, entry: Entry) -> _Defence | None:
        """What is remembered of a victim; nothing once it was used again."""
        found = self._defences.get(entry.extent_id)
        if found is not None and found.stamp_ms < entry.stamp_ms:
            found.stamp_ms, found.stays = entry.stamp_ms, 0
        return found

    def remember(self, entry: Entry, keys: Hashes) -> _Defence:
        """The leading blocks of a victim."""
        made = self._defences[entry.extent_id] = _Defence(entry.stamp_ms, keys)
        while len(self._defences) > _DEFENCES_MAX:
            self._defences.popitem(last=False)
        return made

    def estimate(self, keys: Hashes) -> Counts:
        """Uses of blocks, as the sketch has them."""
        assert self.sketch is not None
        return self.sketch.estimate(keys)


class Admission:
    """Admission of all groups, and the background loop that counts what was queued."""

    name = "admission"
    period_s = 1.0

    def __init__(self, index: MetaIndex, storage_of: Callable[[str], StorageConfig | None]) -> None:
        self._index = index
        self._storage_of = storage_of
        self.wakeup = asyncio.Event()
        self.groups: dict[str, GroupFrequencies] = {}
        """Groups that asked for it."""

    def follow(self, groups: Iterable[InstanceGroup]) -> None:
        """Count for those groups that ask for it, and forget what was counted for others."""
        before, self.groups = self.groups, {}
        for group in groups:
            if quota.reclaim_of(group).admission is AdmissionPolicy.TINYLFU:
                counted = before.get(group.name) or GroupFrequencies()
                self.groups[group.name] = counted
                if blocks := self._capacity(group):
                    counted.size(blocks)

    # ---- counting ----------------------------------------------------------------------------

    def note(self, index: InstanceIndex, batch: KeyBatch, *, write: bool = False) -> None:
        """A request uses these keys; of a lookup and the write that follows, one counts."""
        group = self.groups.get(index.group) if self.groups else None
        if group is not None and group.note(seed_of(index.uid), batch, write=write):
            self.wakeup.set()

    async def run_once(self, now: float) -> None:
        """Count what waits, in slices."""
        self.wakeup.clear()
        for group in list(self.groups.values()):
            while True:
                if not group.step():
                    break
                await asyncio.sleep(0)

    def _capacity(self, group: InstanceGroup) -> int:
        """Blocks that the group may hold, as far as anything says so; 0 without instances."""
        sizes = [
            sum(s.size for s in index.instance.location_spec_infos)
            for index in self._index.by_uid.values()
            if index.group == group.name
        ]
        if not sizes:
            return 0
        storages = map(self._storage_of, group.storage_candidates)
        size = min(quota.group_capacity(group), sum(map(quota.storage_capacity, storages)))
        high = quota.group_marks(group).high
        size = size if high is None else min(size, high)
        return min(size // min(sizes), quota.key_limit(group) * len(sizes))

    # ---- deciding ----------------------------------------------------------------------------

    def judges(self, index: InstanceIndex) -> bool:
        """Whether writes of an instance are compared with victims now."""
        group = self.groups.get(index.group) if self.groups else None
        return group is not None and group.ready

    async def judge(
        self, index: InstanceIndex, plan: Plan, sizes: Sequence[int], limits: Sequence[Limit]
    ) -> Verdict:
        """How many leading blocks of ``plan.granted`` are worth what they displace.

        Args:
            sizes: bytes of each block.
            limits: of the storage they would go to.
        """
        pressed = _pressed(limits, sizes)
        if pressed is None:
            return Verdict(len(sizes), len(sizes))
        group = self.groups[index.group]
        for _ in range(_SLICES_INLINE):
            # Its own lookup among them.
            if not group.step():
                break
            await asyncio.sleep(0)
        raw = b"".join([plan.scan.raw[8 * i : 8 * i + 8] for i in plan.granted])
        uses = group.estimate(hashes(raw, seed_of(index.uid)))
        free = _Free(pressed, sizes)
        unpressed = free.count
        mine = set(with_ancestors(plan.entries))
        for victim in self._victims(index.group, pressed.scope):
            if free.count >= len(sizes):
                break
            if victim in mine:
                continue
            # What is asked for now is used once, whatever its counter says by now.
            candidate = max(1, int(uses[free.count]))
            if await self._stays(group, victim, candidate):
                return Verdict(unpressed, free.count)
            free.give(victim)
        return Verdict(unpressed, len(sizes))

    def _victims(self, group: str, scope: Scope) -> Iterator[Entry]:
        """The coldest leaves, each once. Mostly the first one decides."""
        order = self._index.shared.order_of(group)
        seen: set[Entry] = set()
        for most in (VICTIMS_FIRST, VICTIMS_MAX):
            found = order.coldest(
                most, uid=scope.uid, storage_type=scope.storage_type, storage=scope.storage
            )
            yield from (victim for victim in found if victim not in seen)
            seen.update(found)

    def count(self, group: str, verdict: Verdict, asked: int) -> None:
        """A verdict was followed; ``asked`` blocks were missing."""
        counted = self.groups.get(group)
        if counted is not None:
            counted.admitted += verdict.admitted - verdict.unpressed
            counted.refused += asked - verdict.admitted

    async def _stays(self, group: GroupFrequencies, victim: Entry, candidate: int) -> bool:
        """Whether a victim was used more often than a block that would displace it.

        Staying costs it one of its uses every few times, until it is used again: what was popular
        once cannot hold out for ever.
        """
        defence = group.defence(victim)
        if defence is None:
            keys = await self._leading(victim)
            if keys is None:
                return False
            defence = group.remember(victim, keys)
        spent = defence.stays // STAYS_PER_USE
        if int(group.estimate(defence.keys).max()) - spent <= candidate:
            return False
        defence.stays += 1
        return True

    async def _leading(self, victim: Entry) -> Hashes | None:
        """The first block of each of its runs: nothing in an extent is used more often."""
        index = self._index.by_uid.get(victim.uid)
        if index is None:
            return None
        try:
            views = await index.views_of([victim.extent_id], partial=True)
        except KvcmError:
            # Without the store nothing is evicted either.
            return None
        view = views.get(victim.extent_id)
        if view is None:
            return None
        heads = [view.key_at(run.start) for run in view.extent.runs[:_RUNS_MAX]]
        return hashes(b"".join(heads), seed_of(victim.uid))


class _Free:
    """What a limit leaves below its high mark, and what victims add."""

    def __init__(self, limit: Limit, sizes: Sequence[int]) -> None:
        self._in_blocks = limit.in_blocks
        self._needs = list(accumulate([1] * len(sizes) if limit.in_blocks else sizes))
        assert limit.marks.high is not None
        self._left = limit.marks.high - limit.used
        self.count = 0
        """Leading blocks that fit."""
        self._fit()

    def give(self, victim: Entry) -> None:
        """A victim would go."""
        self._left += victim.held.blocks if self._in_blocks else victim.held.counted
        self._fit()

    def _fit(self) -> None:
        while self.count < len(self._needs) and self._needs[self.count] <= self._left:
            self.count += 1


def _pressed(limits: Sequence[Limit], sizes: Sequence[int]) -> Limit | None:
    """The limit whose high mark cuts deepest into a write; None when it stays below them all."""
    found: tuple[int, Limit] | None = None
    for limit in limits:
        if limit.marks.high is not None:
            count = _Free(limit, sizes).count
            if count < len(sizes) and (found is None or count < found[0]):
                found = (count, limit)
    return found[1] if found is not None else None
