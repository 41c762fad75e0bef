"""What a StartWrite finds and decides before anything is committed."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.cache import placement, room
from kvcm.cache.admission import Verdict
from kvcm.cache.base import Context
from kvcm.cache.placement import Candidate
from kvcm.cache.scan import Scan, Segment, Usable
from kvcm.core.errors import (
    CapacityReached,
    InstanceNotExist,
    InvalidArgument,
    NoStorage,
    NotReady,
    Unsupported,
)
from kvcm.core.mask import BlockMask
from kvcm.core.types import CachePreferStrategy, InstanceGroup
from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.pressure import Want
from kvcm.metaindex.readcache import View
from kvcm.metaindex.records import Phase, Run

ADMISSION = "ADMISSION"
"""The reason of what admission refused (wire.md §5)."""
_SCAN_TRIES = 8
"""What a scan found may be evicted while it goes on; after so many tries a hole may stay."""


@dataclass(slots=True)
class Plan:
    """What a StartWrite found and decided before it commits.

    ``refusal``: a limit lets nothing through. ``wants``: room that eviction could make for what was
    cut or refused; ``fits`` tells whether it is there. ``crosses``: the grant takes usage over a
    mark. ``verdict``: what admission found of the blocks at ``missing``, if it was asked.
    ``turn``: picks among storages that are equally good.
    """

    keys: array[int]
    needed: list[int]
    scan: Scan
    granted: list[int]
    reason: str
    storage: str
    refusal: CapacityReached | None = None
    wants: Sequence[Want] = ()
    fits: Callable[[], bool] = lambda: True
    crosses: bool = False
    verdict: Verdict | None = None
    missing: Sequence[int] = ()
    turn: float = 0.0
    together: bool = False
    """The client can read one storage an answer: a chain stays where it began."""

    @property
    def near(self) -> str:
        """The storage to keep to if it has room: that of the block before; "" = any."""
        first, segments = self.granted[0], self.scan.segments
        at = bisect_right(segments, first - 1, key=lambda s: s.start) - 1
        if not self.together or at < 0 or segments[at].start + segments[at].length < first:
            return ""
        return segments[at].view.extent.storage

    @property
    def entries(self) -> list[Entry]:
        """The extents among the keys, in request order."""
        found = (s.view.entry for s in self.scan.segments)
        return list(dict.fromkeys(e for e in found if e is not None))

    @property
    def mask(self) -> BlockMask:
        """What need not be written: an offset when it is a pure prefix (wire.md §5)."""
        count, granted = len(self.keys), self.granted
        if granted[0] == count - len(granted):
            return BlockMask(offset=granted[0])
        flags = [True] * count
        for i in granted:
            flags[i] = False
        return BlockMask(values=flags)


class Planner:
    """Finds what is missing, chooses the storage and keeps the limits."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turn = 0.0

    async def plan(
        self,
        index: InstanceIndex,
        keys: array[int],
        raw: bytes,
        needed: list[int],
        verdict: Verdict | None = None,
        *,
        together: bool = False,
    ) -> Plan:
        """What of ``keys`` is missing, and how much of it may be granted, on which storage.

        Args:
            needed: specs to allocate, as ``needed_specs`` gives them.
            verdict: what admission said already; a write is judged once.
            together: keep to the storage of the block before what is granted, if it has room.

        Raises:
            InstanceNotExist: it was removed meanwhile.
            Unavailable, OutcomeUnknown, StaleFence: the index store.
        """
        turn = self._turn = placement.next_turn(self._turn)
        for _ in range(_SCAN_TRIES):
            scan = Scan(index, keys, raw)
            for start, end in _stretches(needed, len(keys)):
                usable = self._holds(index, needed[start if len(needed) > 1 else 0])
                await scan.run(start, end, usable)
            if index.closed:
                name = index.instance.instance_id[:200]
                raise InstanceNotExist(f"instance {name!r} does not exist")
            plan = _first_plan(scan, keys, needed, turn)
            plan.together = together
            if verdict is None and plan.granted and self._context.admission.judges(index):
                verdict = await self._judge(index, plan)
            if scan.intact():
                break
        plan.verdict = verdict
        if plan.granted:
            self._limit(index, plan)
        return plan

    async def _judge(self, index: InstanceIndex, plan: Plan) -> Verdict | None:
        group = self._group(index)
        sizes = _sizes(index, plan)
        chosen = self._choose(index, group, sum(sizes), plan)
        if chosen is None:
            return None
        limits = room.limits_of(index, group, chosen.name, self._context.storage_of(chosen.name))
        return await self._context.admission.judge(index, plan, sizes, limits)

    def _holds(self, index: InstanceIndex, needed: int) -> Usable:
        """Positions that need not be written: serving on an available storage, or being written by
        a live session, with every spec asked for."""
        available = index.shared.storages.available
        now = self._context.clock.monotonic()

        def usable(view: View) -> int:
            entry = view.entry
            if entry is None or entry.leaving:
                return 0
            if entry.phase is Phase.OPEN:
                return view.covering(needed) if entry.deadline > now else 0
            return view.covering(needed) if available(view.extent.storage) else 0

        return usable

    def _limit(self, index: InstanceIndex, plan: Plan) -> None:
        """Choose the storage and cut the grant to a leading part that fits all limits."""
        group = self._group(index)
        if plan.verdict is not None and plan.verdict.admitted < len(plan.granted):
            plan.granted, plan.reason = plan.granted[: plan.verdict.admitted], ADMISSION
            if not plan.granted:
                return
        sizes = _sizes(index, plan)
        chosen = self._choose(index, group, sum(sizes), plan)
        if chosen is None:
            plan.refusal = NoStorage(
                f"no storage of group {group.name!r} can take the write", reason="NO_STORAGE"
            )
            plan.granted, plan.reason = [], "NO_STORAGE"
            return
        config = self._context.storage_of(chosen.name)
        limits = room.limits_of(index, group, chosen.name, config)
        grant = placement.grant(sizes, room.rooms(limits))
        plan.granted = plan.granted[: grant.count]
        plan.reason = grant.reason or plan.reason
        plan.storage = chosen.name
        plan.crosses = room.crosses(limits, sum(sizes[: grant.count]), grant.count)
        if grant.short:
            plan.wants = room.wants(limits, grant, sizes)
            plan.fits = lambda: (
                not set(grant.short)
                & set(
                    placement.grant(
                        sizes, room.rooms(room.limits_of(index, group, chosen.name, config))
                    ).short
                )
            )
        if not grant.count:
            plan.refusal = CapacityReached(
                f"{_LIMIT_TEXT[grant.reason].format(storage=chosen.name)} of group "
                f"{group.name!r} is reached: instance {index.instance.instance_id[:200]!r}",
                reason=grant.reason,
            )

    def _group(self, index: InstanceIndex) -> InstanceGroup:
        group = self._context.group_of(index.group)
        if group is None:
            raise NotReady(f"instance group {index.group!r} is not there")
        return group

    def _choose(
        self, index: InstanceIndex, group: InstanceGroup, size: int, plan: Plan
    ) -> Candidate | None:
        candidates = [
            room.candidate(index, group, name, self._context.storage_of(name))
            for name in group.storage_candidates
            if index.shared.storages.writable(name)
        ]
        return placement.choose(candidates, _strategy(group), size, plan.turn, plan.near)


def _first_plan(scan: Scan, keys: array[int], needed: list[int], turn: float) -> Plan:
    """Everything that is missing is granted, as far as this goes."""
    missing = scan.missing(0, len(keys))
    if len(set(map(keys.__getitem__, missing))) < len(missing):
        # A key twice in one request is granted once.
        missing = sorted({keys[i]: i for i in reversed(missing)}.values())
    return Plan(keys, needed, scan, missing, "", "", missing=missing, turn=turn)


_LIMIT_TEXT = {
    "QUOTA_GROUP": "the capacity",
    "QUOTA_TYPE": "the capacity for the storage type",
    "STORAGE_FULL": "the capacity of storage {storage!r}, the best candidate",
    "MAX_KEY_COUNT": "max_key_count",
}


def needed_specs(index: InstanceIndex, names: Sequence[str], count: int) -> list[int]:
    """Specs to allocate as bit sets: one element when all keys need the same, else one a key."""
    if not names:
        return [index.full_set()]
    if len(names) != count:
        raise InvalidArgument(
            f"location_spec_group_names has {len(names)} names for {count} block_keys"
        )
    groups = {
        g.name: sum(index.spec_bits[s] for s in set(g.spec_names))
        for g in index.instance.location_spec_groups
    }
    unknown = next((n for n in names if n not in groups), None)
    if unknown is not None:
        raise InvalidArgument(
            f"location_spec_group_names: {unknown[:200]!r} is not a group of the instance"
        )
    if len(set(names)) == 1:
        return [groups[names[0]]]
    return [groups[n] for n in names]


def keys_of(plan: Plan, runs: Sequence[Run]) -> bytes:
    """Raw keys of the granted blocks, cut from the request run by run."""
    ends = [*(r.start for r in runs[1:]), len(plan.granted)]
    return b"".join(
        plan.scan.raw[8 * r.depth : 8 * (r.depth + end - r.start)]
        for r, end in zip(runs, ends, strict=True)
    )


def _stretches(needed: Sequence[int], count: int) -> list[tuple[int, int]]:
    """[start, end) of neighbouring keys that need the same specs."""
    if len(needed) <= 1:
        return [(0, count)]
    cuts = [i for i in range(1, count) if needed[i] != needed[i - 1]]
    return list(zip([0, *cuts], [*cuts, count], strict=True))


def _size_of(index: InstanceIndex, needed: int) -> int:
    specs = index.instance.location_spec_infos
    return sum(s.size for i, s in enumerate(specs) if needed >> i & 1)


def _sizes(index: InstanceIndex, plan: Plan) -> list[int]:
    """Bytes of each granted block."""
    size_of = {n: _size_of(index, n) for n in set(plan.needed)}
    if len(plan.needed) > 1:
        return [size_of[plan.needed[i]] for i in plan.granted]
    return [size_of[plan.needed[0]]] * len(plan.granted)


def _strategy(group: InstanceGroup) -> CachePreferStrategy:
    config = group.cache_config
    return config.data_storage_strategy if config else CachePreferStrategy.UNSPECIFIED


def subsets_of(plan: Plan) -> tuple[tuple[int, ...], bytes]:
    """Distinct spec sets, and for each block the number of its set (empty when all are equal)."""
    needed = plan.needed if len(plan.needed) == 1 else [plan.needed[i] for i in plan.granted]
    sets = list(dict.fromkeys(needed))
    if len(sets) == 1:
        return (sets[0],), b""
    if len(sets) > 256:
        raise Unsupported(f"{len(sets)} different spec groups in one request, the limit is 256")
    number = {s: i for i, s in enumerate(sets)}
    return tuple(sets), bytes(number[s] for s in needed)


def runs_of(plan: Plan) -> tuple[Run, ...]:
    """Contiguous granted positions, each with the block just before it in the request."""
    before: dict[int, tuple[bytes, int]] = {
        s.start + s.length: (s.view.extent.extent_id, s.position + s.length - 1)
        for s in plan.scan.segments
    }
    granted = np.asarray(plan.granted, dtype=np.int64)
    starts = [0, *(np.flatnonzero(np.diff(granted) != 1) + 1).tolist()]
    runs: list[Run] = []
    for position in starts:
        depth = plan.granted[position]
        parent, parent_position = before.get(depth, (None, 0))
        runs.append(Run(position, depth, parent, parent_position))
    return tuple(runs)


def followers_of(plan: Plan) -> tuple[bytes, ...]:
    """Extents that go on behind blocks that are granted now: these fill a gap.

    They are what the request lists right behind a granted run, and what held a granted block
    before. Only where the request names blocks at their depth: others list no chain.
    """
    granted = set(plan.granted)
    behind = [s for s in plan.scan.segments if s.start - 1 in granted]
    before = [s for i, s in plan.scan.former.items() if i in granted]
    found = (s.view.extent for s in (*behind, *before) if _depth_of(s) == s.start)
    return tuple(dict.fromkeys(extent.extent_id for extent in found))


def _depth_of(segment: Segment) -> int:
    """Index in the request of old at which the segment's first block was granted."""
    run = max(
        (r for r in segment.view.extent.runs if r.start <= segment.position),
        key=lambda r: r.start,
    )
    return run.depth + segment.position - run.start
