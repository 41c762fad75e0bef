"""Write sessions: start, finish, abandon (design.md §4, wire.md §5)."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from kvcm.cache import placement
from kvcm.cache.api import (
    FinishWriteRequest,
    StartWriteAnswer,
    StartWriteRequest,
    WireForm,
)
from kvcm.cache.base import Context
from kvcm.cache.locks import KeyLocks
from kvcm.cache.placement import Candidate
from kvcm.cache.scan import Scan, Usable
from kvcm.core.errors import (
    CapacityReached,
    InstanceNotExist,
    InvalidArgument,
    NoStorage,
    NotReady,
    SessionNotExist,
    Unsupported,
)
from kvcm.core.mask import BlockMask
from kvcm.core.types import CachePreferStrategy, InstanceGroup
from kvcm.metaindex import answers, bits
from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import spec_slots
from kvcm.metaindex.readcache import View
from kvcm.metaindex.records import Cause, Extent, Phase, Run, State

_log = logging.getLogger(__name__)
_SCAN_TRIES = 8
"""What a scan found may be evicted while it goes on; after so many tries a hole may stay."""
_LOAD_WAIT_S = 0.5


@dataclass(slots=True)
class _Plan:
    """What a StartWrite found and decided before it commits."""

    keys: array[int]
    needed: list[int]
    scan: Scan
    granted: list[int]
    reason: str
    storage: str


class Writes:
    """Write sessions of all instances.

    Args:
        touch: called after a grant with storage and object names when that storage wants its files
            made ahead of the writer; must not block.
    """

    def __init__(
        self, context: Context, touch: Callable[[InstanceIndex, str, list[str]], None]
    ) -> None:
        self._context = context
        self._touch = touch
        self._locks: WeakKeyDictionary[InstanceIndex, KeyLocks] = WeakKeyDictionary()
        self._cleanups: set[asyncio.Task[None]] = set()

    # ---- start -------------------------------------------------------------------------------

    async def start(self, request: StartWriteRequest) -> StartWriteAnswer:
        """StartWriteCache. A cancelled call frees what it granted.

        Raises:
            InstanceNotExist: unknown instance.
            InvalidArgument: group names or key count.
            CapacityReached: a limit let nothing through; ``reason`` names it.
            NotReady: the instance's index is not loaded yet, or the index store failed.
        """
        index = self._context.instance(request.instance_id)
        await self._loaded(index)
        batch = await self._context.keys(index, request)
        keys = batch.array()
        needed = _needed(index, request.group_names, len(keys))
        # Its own task, so that a cancelled call neither lets go of its keys half-way nor leaves
        # a commit whose end nobody sees.
        task = asyncio.ensure_future(self._locked(index, request, keys, batch.raw(), needed))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._later(self._undo(index, task))
            raise

    async def _loaded(self, index: InstanceIndex) -> None:
        """A new instance is loaded in a moment; a large one after a restart takes longer."""
        if not index.loaded:
            try:
                async with asyncio.timeout(_LOAD_WAIT_S):
                    await asyncio.shield(asyncio.ensure_future(index.load()))
            except TimeoutError as error:
                name = index.instance.instance_id[:200]
                raise NotReady(f"instance {name!r} is still being loaded") from error

    async def _locked(
        self,
        index: InstanceIndex,
        request: StartWriteRequest,
        keys: array[int],
        raw: bytes,
        needed: list[int],
    ) -> StartWriteAnswer:
        locks = self._locks.setdefault(index, KeyLocks())
        async with locks.hold(keys):
            plan = await self._plan(index, keys, raw, needed)
            if not plan.granted:
                return self._nothing(index, plan)
            timeout_s = self._timeout(request.write_timeout_seconds)
            return await self._grant(index, plan, timeout_s, request.form)

    async def _undo(self, index: InstanceIndex, task: asyncio.Future[StartWriteAnswer]) -> None:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            session = index.sessions.read(task.result().session_id)
            if session.extent_id is not None:
                await self._free(index, session.extent_id)

    async def _free(self, index: InstanceIndex, extent_id: bytes) -> None:
        """Abort a grant nobody will use; if the store stays away, its time-out does it."""
        try:
            await index.change(extent_id, lambda _extent, state: self._aborted(index, state))
        except NotReady as error:
            _log.warning("extent %s is left to its time-out: %s", extent_id.hex(), error)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        cleanup = asyncio.ensure_future(work)
        self._cleanups.add(cleanup)
        cleanup.add_done_callback(self._cleanups.discard)

    def _timeout(self, wanted: int) -> int:
        settings = self._context.settings
        timeout_s = wanted if wanted > 0 else settings.write_timeout_s_default
        return min(timeout_s, settings.write_timeout_s_max)

    async def _plan(
        self, index: InstanceIndex, keys: array[int], raw: bytes, needed: list[int]
    ) -> _Plan:
        for _ in range(_SCAN_TRIES):
            scan = Scan(index, keys, raw)
            for start, end in _stretches(needed, len(keys)):
                usable = self._holds(index, needed[start if len(needed) > 1 else 0])
                await scan.run(start, end, usable)
            if scan.intact():
                break
        if index.closed:
            raise InstanceNotExist(f"instance {index.instance.instance_id[:200]!r} does not exist")
        missing = list(scan.missing(0, len(keys)))
        if len({keys[i] for i in missing}) < len(missing):
            # A key twice in one request is granted once.
            missing = sorted({keys[i]: i for i in reversed(missing)}.values())
        plan = _Plan(keys, needed, scan, missing, "", "")
        if missing:
            self._limit(index, plan)
        return plan

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

    def _limit(self, index: InstanceIndex, plan: _Plan) -> None:
        """Choose the storage and cut the grant to a leading part that fits all limits."""
        group = self._group(index)
        size_of = {n: _size_of(index, n) for n in set(plan.needed)}
        if len(plan.needed) > 1:
            sizes = [size_of[plan.needed[i]] for i in plan.granted]
        else:
            sizes = [size_of[plan.needed[0]]] * len(plan.granted)
        chosen = placement.choose(self._candidates(index, group), _strategy(group), sum(sizes))
        if chosen is None:
            raise NoStorage(
                f"no storage of group {group.name!r} can take the write", reason="NO_STORAGE"
            )
        ledger = index.shared.ledger
        grant = placement.grant(
            sizes,
            group_room=placement.group_capacity(group) - ledger.group(group.name).counted,
            type_room=chosen.room,
            key_room=placement.key_limit(group) - ledger.instance(index.uid).blocks,
        )
        if not grant.count:
            raise CapacityReached(
                f"{_LIMIT_TEXT[grant.reason]} of group {group.name!r} is reached: "
                f"instance {index.instance.instance_id[:200]!r}",
                reason=grant.reason,
            )
        plan.granted = plan.granted[: grant.count]
        plan.reason = grant.reason
        plan.storage = chosen.name

    def _group(self, index: InstanceIndex) -> InstanceGroup:
        group = self._context.group_of(index.group)
        if group is None:
            raise NotReady(f"instance group {index.group!r} is not there")
        return group

    def _candidates(self, index: InstanceIndex, group: InstanceGroup) -> list[Candidate]:
        shared = index.shared
        out: list[Candidate] = []
        for name in group.storage_candidates:
            if not shared.storages.available(name):
                continue
            kind = shared.type_of(name)
            room = placement.type_capacity(group, kind)
            if room < placement.UNLIMITED:
                room -= shared.ledger.group_type(group.name, kind).counted
            used = shared.ledger.storage(name)
            out.append(Candidate(name, kind, used.counted + used.trash_bytes, room))
        return out

    def _nothing(self, index: InstanceIndex, plan: _Plan) -> StartWriteAnswer:
        clock = self._context.clock
        expires = self._context.now_ms() + self._context.settings.empty_session_timeout_s * 1000
        session = index.sessions.of_nothing(expires, clock.random_bytes(5))
        entries = _entries(plan.scan)
        index.book.touch(entries, self._context.now_ms())
        return StartWriteAnswer(session, BlockMask(offset=len(plan.keys)), b"", 0)

    async def _grant(
        self, index: InstanceIndex, plan: _Plan, timeout_s: int, form: WireForm
    ) -> StartWriteAnswer:
        extent = self._extent(index, plan, timeout_s)
        state = State(index.new_version(), Phase.OPEN, extent.started_ms)
        entries = _entries(plan.scan)
        index.book.touch(entries, extent.started_ms)
        for entry in entries:
            entry.pins += 1
        others = {
            p: plan.scan.others[i] for p, i in enumerate(plan.granted) if i in plan.scan.others
        }
        try:
            entry = await index.grant(extent, state, others, _parents(index, extent))
            if entry.phase is Phase.OPEN:
                index.book.pin(entry, entries)
            body = await self._body(index, extent, form)
            self._touch_files(index, extent)
        except BaseException:
            # A failed commit may have taken effect all the same.
            self._later(self._free(index, extent.extent_id))
            raise
        finally:
            for other in entries:
                other.pins -= 1
        return StartWriteAnswer(
            index.sessions.of_extent(extent.extent_id),
            _mask(plan),
            body,
            len(plan.granted),
            plan.reason,
        )

    def _extent(self, index: InstanceIndex, plan: _Plan, timeout_s: int) -> Extent:
        shared = index.shared
        storage = shared.storages.get(plan.storage)
        if storage is None:
            raise NoStorage(f"storage {plan.storage!r} is not open", reason="NO_STORAGE")
        needed = plan.needed
        sets, subset_of = _subsets([needed[i] for i in plan.granted] if len(needed) > 1 else needed)
        runs = _runs(plan)
        draft = Extent(
            extent_id=shared.new_extent_id(),
            keys=_keys_of(plan, runs),
            storage=plan.storage,
            storage_type=int(storage.type),
            descriptor=b"",
            specs=tuple((s.name, s.size) for s in index.instance.location_spec_infos),
            spec_sets=sets,
            subset_of=subset_of,
            trim=index.trim,
            runs=runs,
            started_ms=self._context.now_ms(),
            timeout_s=timeout_s,
        )
        owner = answers.owner_of(shared.cluster_uid, index.uid, draft)
        return replace(draft, descriptor=storage.place(owner, spec_slots(draft)))

    def _touch_files(self, index: InstanceIndex, extent: Extent) -> None:
        storage = index.shared.storages.get(extent.storage)
        layout = index.layout(extent) if storage is not None and storage.touched else None
        if layout is not None:
            self._touch(index, extent.storage, [o.name for o in layout.objects])

    async def _body(self, index: InstanceIndex, extent: Extent, form: WireForm) -> bytes:
        shared = index.shared
        storage = shared.storages.get(extent.storage)
        if storage is None:
            raise NoStorage(f"storage {extent.storage!r} was closed", reason="NO_STORAGE")
        as_json = form is WireForm.JSON
        owner = answers.owner_of(shared.cluster_uid, index.uid, extent)
        tag = answers.START_TAG
        pieces: list[bytes] = []
        for step in answers.location_entries(extent, owner, storage, 0, as_json, tag):
            if pieces:
                await asyncio.sleep(0)
            pieces.append(b"".join(step))
        return answers.close_body(pieces, as_json)

    def _aborted(self, index: InstanceIndex, state: State) -> State | None:
        if state.phase is not Phase.OPEN:
            return None
        return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.EXPIRED)

    async def abandon(self, instance_id: str, session_id: str) -> None:
        """Free a session whose client is gone; a session that is over stays as it is."""
        index = self._context.instance(instance_id)
        session = index.sessions.read(session_id)
        if session.extent_id is not None:
            await index.change(
                session.extent_id, lambda _extent, state: self._aborted(index, state)
            )

    async def settled(self) -> None:
        """Wait for the clean-ups of cancelled and failed starts."""
        while self._cleanups:
            await asyncio.wait(set(self._cleanups))

    # ---- finish ------------------------------------------------------------------------------

    async def finish(self, request: FinishWriteRequest) -> None:
        """FinishWriteCache: publish what succeeded, free the rest, as one change of one record.

        Raises:
            InstanceNotExist: unknown instance.
            InvalidArgument: no mask, a wrong length (the session stays open), or another mask than
                the session was finished with.
            SessionNotExist: unknown, expired, or another instance's session.
            NotReady: the index store failed; finish again.
        """
        index = self._context.instance(request.instance_id)
        session = index.sessions.read(request.session_id)
        if request.success is None:
            raise InvalidArgument("success_blocks is missing")
        if session.extent_id is None:
            _success_bits(request.success, 0)
            if session.expires_ms <= self._context.now_ms():
                raise SessionNotExist(f"write session {request.session_id} has expired")
            return
        success = request.success
        found = await index.change(
            session.extent_id, lambda extent, state: self._finished(index, extent, state, success)
        )
        if found is None or (
            found.state.phase is Phase.ABORTED and found.state.cause is Cause.EXPIRED
        ):
            raise SessionNotExist(f"write session {request.session_id} is unknown or has expired")

    def _finished(
        self, index: InstanceIndex, extent: Extent, state: State, success: BlockMask
    ) -> State | None:
        if state.phase is Phase.ABORTED and state.cause is Cause.EXPIRED:
            return None
        mask = _success_bits(success, extent.count)
        if state.phase is Phase.ABORTED:
            return None
        if state.phase is not Phase.OPEN:
            if mask != state.finished:
                raise InvalidArgument(
                    "success_blocks differs from the mask this session was finished with"
                )
            return None
        entry = index.book.entries.get(extent.extent_id)
        if entry is not None and entry.deadline <= self._context.clock.monotonic():
            return self._aborted(index, state)
        publish = mask & ~state.cancelled if extent.trim >= index.trim else 0
        now_ms = self._context.now_ms()
        return state.next(
            index.new_version(),
            phase=Phase.SETTLED if publish else Phase.RETIRED,
            serving=publish,
            finished=mask,
            finished_ms=now_ms,
            stamp_ms=max(state.stamp_ms, now_ms),
        )


_LIMIT_TEXT = {
    "QUOTA_GROUP": "the capacity",
    "QUOTA_TYPE": "the capacity for the storage type",
    "MAX_KEY_COUNT": "max_key_count",
}


def _needed(index: InstanceIndex, names: Sequence[str], count: int) -> list[int]:
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


def _keys_of(plan: _Plan, runs: Sequence[Run]) -> bytes:
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


def _strategy(group: InstanceGroup) -> CachePreferStrategy:
    config = group.cache_config
    return config.data_storage_strategy if config else CachePreferStrategy.UNSPECIFIED


def _entries(scan: Scan) -> list[Entry]:
    """The extents a scan found, in request order."""
    return list(dict.fromkeys(s.view.entry for s in scan.segments if s.view.entry is not None))


def _subsets(needed: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """Distinct spec sets, and for each block the number of its set (empty when all are equal)."""
    sets = list(dict.fromkeys(needed))
    if len(sets) == 1:
        return (sets[0],), b""
    if len(sets) > 256:
        raise Unsupported(f"{len(sets)} different spec groups in one request, the limit is 256")
    number = {s: i for i, s in enumerate(sets)}
    return tuple(sets), bytes(number[s] for s in needed)


def _runs(plan: _Plan) -> tuple[Run, ...]:
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


def _parents(index: InstanceIndex, extent: Extent) -> list[Entry]:
    found = (index.book.entries.get(r.parent) for r in extent.runs if r.parent is not None)
    return [entry for entry in found if entry is not None]


def _mask(plan: _Plan) -> BlockMask:
    count, granted = len(plan.keys), plan.granted
    if granted[0] == count - len(granted):
        return BlockMask(offset=granted[0])
    flags = [True] * count
    for i in granted:
        flags[i] = False
    return BlockMask(values=flags)


def _success_bits(success: BlockMask, count: int) -> int:
    if success.values is not None:
        if len(success.values) != count:
            raise InvalidArgument(
                f"success_blocks.bool_masks has {len(success.values)} values for {count} "
                "granted blocks"
            )
        return bits.from_flags(success.values)
    if success.offset is None and count:
        raise InvalidArgument(f"success_blocks is empty for {count} granted blocks")
    offset = success.offset or 0
    if not 0 <= offset <= count:
        raise InvalidArgument(
            f"success_blocks.offset {offset} is not within 0 and the {count} granted blocks"
        )
    return bits.ones(offset)
