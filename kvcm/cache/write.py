"""Write sessions: start, finish, abandon (design.md §4, wire.md §5)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from kvcm.cache import events
from kvcm.cache.admission import Verdict
from kvcm.cache.api import (
    FinishWriteRequest,
    StartWriteAnswer,
    StartWriteRequest,
    WireForm,
)
from kvcm.cache.base import Context
from kvcm.cache.files import Files
from kvcm.cache.locks import KeyLocks
from kvcm.cache.plan import Plan, Planner, followers_of, keys_of, needed_specs, runs_of, subsets_of
from kvcm.cache.rowlimit import with_room
from kvcm.core import quota
from kvcm.core.errors import (
    InvalidArgument,
    NoStorage,
    NotReady,
    SessionNotExist,
)
from kvcm.core.keys import KeyBatch
from kvcm.core.limits import HOME_SHARDS
from kvcm.core.mask import BlockMask
from kvcm.metaindex import answers, bits
from kvcm.metaindex.book import Entry
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import spec_slots
from kvcm.metaindex.records import Cause, Extent, Phase, State

_log = logging.getLogger(__name__)
_LOAD_WAIT_S = 0.5


class Writes:
    """Write sessions of all instances.

    Args:
        files: makes folders before an instance's first write to a storage, and files on wish.
    """

    def __init__(self, context: Context, files: Files) -> None:
        self._context = context
        self._planner = Planner(context)
        self._files = files
        self._locks: WeakKeyDictionary[InstanceIndex, KeyLocks] = WeakKeyDictionary()
        self._cleanups: set[asyncio.Task[None]] = set()

    # ---- start -------------------------------------------------------------------------------

    async def start(self, request: StartWriteRequest) -> StartWriteAnswer:
        """StartWriteCache. A cancelled call frees what it granted.

        Raises:
            InstanceNotExist: unknown instance.
            InvalidArgument: group names or key count.
            CapacityReached, NoStorage: a limit let nothing through; ``reason`` names it.
            NotReady: the instance's index is not loaded yet, or the index store failed.
        """
        index = self._context.instance(request.instance_id)
        await self._loaded(index)
        batch = await self._context.keys(index, request)
        self._context.admission.note(index, batch, write=True)
        keys = batch.array()
        needed = needed_specs(index, request.group_names, len(keys))
        wait_s = self._context.settings.room_wait_s
        answer = await self._attempt(index, request, batch, needed, None, last=wait_s <= 0)
        if isinstance(answer, Plan):
            # Nothing is held meanwhile, the keys least of all.
            await self._wait_for_room(index, answer, wait_s)
            judged = answer.verdict
            answer = await self._attempt(index, request, batch, needed, judged, last=True)
        assert isinstance(answer, StartWriteAnswer)
        return answer

    async def _attempt(
        self,
        index: InstanceIndex,
        request: StartWriteRequest,
        batch: KeyBatch,
        needed: list[int],
        judged: Verdict | None,
        *,
        last: bool,
    ) -> StartWriteAnswer | Plan:
        """The answer; the plan, when a limit cut it, eviction may help, and it is not the last."""
        # Its own task, so that a cancelled call neither lets go of its keys half-way nor leaves
        # a commit whose end nobody sees.
        task = asyncio.ensure_future(self._locked(index, request, batch, needed, judged, last))
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
        await self._counted(index)

    async def _counted(self, index: InstanceIndex) -> None:
        """Limits hold for a group, and for storages that groups share: nothing is granted before
        the usage of all of them is known, which takes no more than their claims."""
        unknown = self._context.index.uncounted
        if not unknown:
            return
        group = self._context.group_of(index.group)
        candidates = group.storage_candidates if group is not None else ()
        shares = any(
            quota.storage_capacity(self._context.storage_of(n)) < quota.UNLIMITED
            for n in candidates
        )
        others = [i for i in unknown.values() if shares or i.group == index.group]
        try:
            async with asyncio.timeout(_LOAD_WAIT_S):
                await asyncio.gather(*(i.shards.ensure(range(HOME_SHARDS)) for i in others))
        except TimeoutError as error:
            raise NotReady(f"the usage of group {index.group!r} is still being read") from error
        for other in others:
            unknown.pop(other.uid, None)

    async def _locked(
        self,
        index: InstanceIndex,
        request: StartWriteRequest,
        batch: KeyBatch,
        needed: list[int],
        judged: Verdict | None,
        last: bool,
    ) -> StartWriteAnswer | Plan:
        keys, raw = batch.array(), batch.raw()
        locks = self._locks.setdefault(index, KeyLocks())
        async with locks.hold(keys):
            together = not request.multi_storage
            plan = await self._planner.plan(index, keys, raw, needed, judged, together=together)
            if plan.granted and await self._files.prepared(index.uid, plan.storage):
                # Limits and what exists may have changed while the folders were made.
                plan = await self._planner.plan(
                    index, keys, raw, needed, plan.verdict, together=together
                )
            if plan.wants:
                index.shared.pressure.want(plan.wants)
                if not last:
                    return plan
            if plan.verdict is not None:
                self._context.admission.count(index.group, plan.verdict, len(plan.missing))
            if plan.reason:
                self._count(index, plan)
                if index.shared.watchers:
                    events.refused(index, plan)
            if plan.refusal is not None:
                raise plan.refusal
            if not plan.granted:
                return self._nothing(index, plan, request)
            timeout_s = self._timeout(request.write_timeout_seconds)
            return await self._grant(index, plan, timeout_s, request)

    async def _wait_for_room(self, index: InstanceIndex, plan: Plan, wait_s: float) -> None:
        """Until what was cut fits, or eviction has done what it could, but a moment at most."""
        pressure = index.shared.pressure
        woken = pressure.wait(plan.fits)
        timer = asyncio.ensure_future(self._context.clock.sleep(wait_s))
        try:
            await asyncio.wait((woken, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            pressure.leave(woken)

    def _count(self, index: InstanceIndex, plan: Plan) -> None:
        index.shared.refusals.count(
            index.group,
            index.uid,
            plan.reason,
            whole=not plan.granted,
            storage=plan.storage,
            storage_type=index.shared.type_of(plan.storage),
        )

    async def _undo(
        self, index: InstanceIndex, task: asyncio.Future[StartWriteAnswer | Plan]
    ) -> None:
        await asyncio.wait([task])
        answer = None if task.cancelled() or task.exception() else task.result()
        if isinstance(answer, StartWriteAnswer):
            session = index.sessions.read(answer.session_id)
            if session.extent_id is not None:
                await self._free(index, session.extent_id)

    async def _free(self, index: InstanceIndex, extent_id: bytes) -> None:
        """Abort a grant nobody will use; if the store stays away, its time-out does it."""
        try:
            await self._abort(index, extent_id)
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

    def _nothing(
        self, index: InstanceIndex, plan: Plan, request: StartWriteRequest
    ) -> StartWriteAnswer:
        clock = self._context.clock
        expires = self._context.now_ms() + self._context.settings.empty_session_timeout_s * 1000
        session = index.sessions.of_nothing(expires, clock.random_bytes(5))
        index.book.touch_chain(plan.entries, self._context.now_ms(), write=True)
        mask = BlockMask(offset=len(plan.keys))
        if index.shared.watchers:
            events.started(index, request, plan, session, mask, None, None)
        return StartWriteAnswer(session, mask, b"", 0, plan.reason)

    async def _grant(
        self, index: InstanceIndex, plan: Plan, timeout_s: int, request: StartWriteRequest
    ) -> StartWriteAnswer:
        extent = self._extent(index, plan, timeout_s)
        state = State(index.new_version(), Phase.OPEN, extent.started_ms)
        entries = plan.entries
        index.book.touch_chain(entries, extent.started_ms, write=True)
        index.book.hold(entries)
        session_id, mask = index.sessions.of_extent(extent.extent_id), plan.mask
        begun: Callable[[], None] | None = None
        if index.shared.watchers:
            begun = partial(events.started, index, request, plan, session_id, mask, extent, state)
        beside = plan.scan.others
        found = {p: beside[i] for p, i in enumerate(plan.granted) if i in beside} if beside else {}
        try:
            others = await with_room(index, found) if found else found
            entry = await index.grant(extent, state, others, _parents(index, extent), begun)
            if plan.crosses:
                index.shared.pressure.wake()
            if entry.phase is Phase.OPEN:
                index.book.pin(entry, entries)
            body = await self._body(index, extent, request.form)
            self._touch_files(index, extent)
        except BaseException:
            # A failed commit may have taken effect all the same.
            self._later(self._free(index, extent.extent_id))
            raise
        finally:
            index.book.release(entries)
        return StartWriteAnswer(session_id, mask, body, len(plan.granted), plan.reason)

    def _extent(self, index: InstanceIndex, plan: Plan, timeout_s: int) -> Extent:
        shared = index.shared
        storage = shared.storages.get(plan.storage)
        if storage is None:
            raise NoStorage(f"storage {plan.storage!r} is not open", reason="NO_STORAGE")
        sets, subset_of = subsets_of(plan)
        runs = runs_of(plan)
        draft = Extent(
            extent_id=shared.new_extent_id(),
            keys=keys_of(plan, runs),
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
            followers=followers_of(plan),
        )
        owner = answers.owner_of(shared.cluster_uid, index.uid, draft)
        return replace(draft, descriptor=storage.place(owner, spec_slots(draft)))

    def _touch_files(self, index: InstanceIndex, extent: Extent) -> None:
        storage = index.shared.storages.get(extent.storage)
        layout = index.layout(extent) if storage is not None and storage.touched else None
        if layout is not None:
            self._files.touch(extent.storage, [o.name for o in layout.objects])

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
        return b"".join(answers.closed(pieces, as_json))

    def _aborted(self, index: InstanceIndex, state: State) -> State | None:
        if state.phase is not Phase.OPEN:
            return None
        return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.EXPIRED)

    async def _abort(self, index: InstanceIndex, extent_id: bytes) -> None:
        await index.change(
            extent_id,
            lambda _extent, state: self._aborted(index, state),
            reason=Reason.ABANDONED,
        )

    async def abandon(self, instance_id: str, session_id: str) -> None:
        """Free a session whose client is gone; a session that is over stays as it is."""
        index = self._context.instance(instance_id)
        session = index.sessions.read(session_id)
        if session.extent_id is not None:
            await self._abort(index, session.extent_id)

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
            session.extent_id,
            lambda extent, state: self._finished(index, extent, state, success),
            reason=Reason.FINISHED,
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
        now_ms = self._context.now_ms()
        if state.phase is not Phase.OPEN and state.finished_ms:
            if mask != state.finished:
                raise InvalidArgument(
                    "success_blocks differs from the mask this session was finished with"
                )
            return None
        if state.phase is not Phase.OPEN:
            # Cancelled before its finish: nothing is published, but its mask counts.
            return state.next(index.new_version(), finished=mask, finished_ms=now_ms)
        entry = index.book.entries.get(extent.extent_id)
        if entry is not None and entry.deadline <= self._context.clock.monotonic():
            return self._aborted(index, state)
        publish = mask & ~state.cancelled if extent.trim >= index.trim else 0
        return state.next(
            index.new_version(),
            phase=Phase.SETTLED if publish else Phase.RETIRED,
            serving=publish,
            finished=mask,
            finished_ms=now_ms,
            stamp_ms=max(state.stamp_ms, now_ms),
        )


def _parents(index: InstanceIndex, extent: Extent) -> list[Entry]:
    found = (index.book.entries.get(r.parent) for r in extent.runs if r.parent is not None)
    return [entry for entry in found if entry is not None]


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
