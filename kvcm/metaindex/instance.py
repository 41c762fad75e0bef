"""The index of one instance: changing extents.

Every change of an extent is one compare-and-set on its state record, with counters and trash in
the same commit, however many blocks it touches (design.md §3, §4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import TypeVar

import numpy as np

from kvcm.core.errors import CorruptRecord, InternalError, KvcmError, OutcomeUnknown, StaleFence
from kvcm.core.keys import array_of
from kvcm.core.storage import ObjectRef
from kvcm.core.types import Instance
from kvcm.metaindex import bits, records
from kvcm.metaindex.answers import owner_of
from kvcm.metaindex.book import Entry
from kvcm.metaindex.events import Reason
from kvcm.metaindex.ids import EXTENT_ID_BYTES, home_shard
from kvcm.metaindex.layout import (
    Layout,
    Objects,
    Shape,
    held_by,
    live_blocks,
    shape_of,
    spec_slots,
)
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.loading import InstanceLoader
from kvcm.metaindex.reading import RowRefs, raw_row_keys
from kvcm.metaindex.records import Extent, Phase, State, Trash
from kvcm.metaindex.shards import by_shard
from kvcm.metaindex.shared import Shared
from kvcm.metaindex.store import Compare, Mutation, Outcome, Table, Write

_CHANGE_TRIES = 8
_SHAPES_KEPT = 64
T = TypeVar("T")

Decide = Callable[[Extent, State], State | None]


def by_home(extent_ids: Iterable[bytes]) -> dict[int, list[bytes]]:
    """Extents by their home shard."""
    groups: dict[int, list[bytes]] = {}
    for extent_id in extent_ids:
        groups.setdefault(home_shard(extent_id), []).append(extent_id)
    return groups


@dataclass(frozen=True, slots=True)
class Change:
    """What ``change`` found and did; ``trash`` is what it put there."""

    extent: Extent
    state: State
    applied: bool
    trash: Trash | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A change ready to be committed to the extent's home shard."""

    extent: Extent
    before: State
    state: State
    mutation: Mutation
    trash: Trash | None


Found = tuple[Extent, State]


class InstanceIndex(InstanceLoader):
    """Extents and rows of one registered instance."""

    def __init__(self, shared: Shared, instance: Instance) -> None:
        super().__init__(shared, instance)
        self._sums: dict[Shape, Objects] = {}

    def _trash_found(self, trash: Trash) -> None:
        self.shared.on_trash(self, trash)

    def objects_of(self, extent: Extent) -> Sequence[ObjectRef] | None:
        """What the storage frees of an extent piece by piece; None when its storage is gone."""
        storage = self.shared.storages.get(extent.storage)
        if storage is None:
            return None
        owner = owner_of(self.shared.cluster_uid, self.uid, extent)
        return storage.objects(extent.descriptor, owner, spec_slots(extent))

    def layout(self, extent: Extent) -> Layout | None:
        """Objects of an extent; None when its storage is gone."""
        objects = self.objects_of(extent)
        return None if objects is None else Layout.of(extent, objects)

    def _all_objects(self, extent: Extent) -> Objects | None:
        """How many objects an extent has, and their bytes; None when its storage is gone.

        Extents of one shape have the same: naming their objects is most of what retiring one costs.
        """
        shape = shape_of(extent)
        found = self._sums.get(shape)
        if found is None or self.shared.storages.get(extent.storage) is None:
            objects = self.objects_of(extent)
            if objects is None:
                return None
            if len(self._sums) >= _SHAPES_KEPT:
                self._sums.clear()
            found = self._sums[shape] = Objects(len(objects), sum(o.size for o in objects))
        return found

    async def change(
        self,
        extent_id: bytes,
        decide: Decide,
        *,
        keep_bytes: bool = False,
        reason: Reason = Reason.OTHER,
    ) -> Change | None:
        """Move an extent to the state that ``decide`` names, as one compare-and-set.

        ``decide`` gets the current record and gives the wanted state, or None for "leave it"; it
        may be called again after a conflict. ``keep_bytes`` puts nothing into the trash; ``reason``
        is for whoever watches.

        Returns:
            What was found and done; None when there is no such extent.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store; the change may be half-known and
                calling again is safe.
        """
        failure: Exception | None = None
        for _ in range(_CHANGE_TRIES):
            found = await self.read(extent_id)
            if found is None:
                return None
            extent, state = found
            wanted = decide(extent, state)
            if wanted is None:
                return self.unchanged(extent, state, reason)
            try:
                done = await self._swap(self.step(extent, state, wanted, keep_bytes), reason)
            except (OutcomeUnknown, StaleFence) as error:
                # Claimed again at the next touch, which re-reads the record: a change that did
                # apply shows as its own version there.
                failure = error
                continue
            if done is not None:
                return done
        raise failure or InternalError(f"extent {extent_id.hex()} keeps changing")

    def step(self, extent: Extent, old: State, new: State, keep_bytes: bool) -> Step:
        """The commit that takes an extent from one state to another, with counters and trash."""
        dead, gone, size = (0, 0, 0) if keep_bytes else self._freed(extent, old, new)
        trash: Trash | None = None
        if gone:
            late = old.phase is Phase.OPEN
            trash = Trash(extent.extent_id, new.version, extent.storage, gone, size, late)
        if dead != new.dead:
            new = replace(new, dead=dead)
        delta = held_by(extent, new) + -held_by(extent, old)
        writes = [Write(Table.STATES, extent.extent_id, records.encode_state(new))]
        if trash is not None:
            delta = delta + Delta(trash_bytes=trash.size)
            writes.append(Write(Table.TRASH, trash.key, records.encode_trash(trash)))
        mutation = Mutation(
            writes=writes,
            compare=[Compare(Table.STATES, extent.extent_id, old.version)],
            counters=to_counters(extent.storage, delta),
        )
        return Step(extent, old, new, mutation, trash)

    def _freed(self, extent: Extent, old: State, new: State) -> tuple[int, int, int]:
        """What a change leaves dead (bytes), and the objects it frees: as a set, and bytes."""
        everything = bits.ones(extent.count)
        old_live, new_live = live_blocks(extent, old), live_blocks(extent, new)
        if new_live == everything:
            return 0, 0, 0
        if not new_live and old_live == everything:
            whole = self._all_objects(extent)
            return (0, bits.ones(whole.number), whole.size) if whole is not None else (0, 0, 0)
        layout = self.layout(extent)
        if layout is None:
            return 0, 0, 0
        waste = layout.waste(new_live)
        gone = waste.gone & ~layout.waste(old_live).gone if old_live else 0
        return waste.dead, gone, layout.size_of(gone)

    async def _swap(self, step: Step, reason: Reason) -> Change | None:
        extent_id = step.extent.extent_id
        self.hide(extent_id)
        try:
            (outcomes,) = await self.shards.commit([(home_shard(extent_id), [step.mutation])])
        finally:
            self.hide(extent_id)
        return self.committed(step, outcomes[0], reason)

    def committed(self, step: Step, outcome: Outcome, reason: Reason) -> Change | None:
        """Follow a commit; None when it met another state than it was made for."""
        entry = self.book.entries.get(step.extent.extent_id)
        if outcome is not Outcome.APPLIED:
            if entry is not None:
                entry.opened = entry.state = None
            return None
        if entry is not None:
            self._follow(entry, step.extent, step.state, step.before, reason)
        if step.trash is not None:
            self.trash[step.trash.key] = step.trash
            self._trash_found(step.trash)
        return Change(step.extent, step.state, applied=True, trash=step.trash)

    def unchanged(self, extent: Extent, state: State, reason: Reason) -> Change:
        """Nothing is wanted. The record may be further than its entry: a change whose outcome
        nobody saw."""
        entry = self.book.entries.get(extent.extent_id)
        if entry is not None and entry.phase < state.phase:
            self._follow(entry, extent, state, reason=reason)
        return Change(extent, state, applied=False)

    def hide(self, extent_id: bytes) -> None:
        """Take an extent out of the read cache; what is being read of it now stays out."""
        self._generation[home_shard(extent_id)] += 1
        self.shared.cache.invalidate(extent_id)

    async def grant(
        self,
        extent: Extent,
        state: State,
        old_refs: Mapping[int, RowRefs],
        parents: Sequence[Entry],
        begun: Callable[[], None] | None = None,
    ) -> Entry:
        """Commit a new open extent, then its rows.

        Args:
            old_refs: for positions whose row keeps other locations, those references.
            parents: entries that the extent's runs build on.
            begun: called once the extent is there; its end is told after that.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store. The caller aborts the extent; rows
                written so far are stale hints.
        """
        delta = held_by(extent, state)
        home = home_shard(extent.extent_id)
        writes = [Write(Table.EXTENTS, k, v) for k, v in records.encode_extent(extent)]
        writes.append(Write(Table.STATES, extent.extent_id, records.encode_state(state)))
        mutation = Mutation(
            writes=writes,
            compare=[Compare(Table.STATES, extent.extent_id, None)],
            counters=to_counters(extent.storage, delta),
        )
        # Reserved until the commit counts it, so that writers side by side cannot overshoot.
        self._count_changed(extent.storage, delta)
        try:
            # Planning took its part of a step.
            await asyncio.sleep(0)
            (outcomes,) = await self.shards.commit([(home, [mutation])])
        except BaseException:
            # Cancelled, too: it may have taken effect, so the shard decides when room is free.
            self.shards.release(home, extent.storage, delta)
            raise
        self._count_changed(extent.storage, -delta)
        if outcomes[0] is not Outcome.APPLIED:
            raise InternalError(f"extent id {extent.extent_id.hex()} was used before")
        entry = Entry(self.uid, extent, state, delta)
        entry.opened, entry.state = extent, state
        deadline = self.clock.monotonic() + extent.timeout_s
        entry.keep_until = deadline
        self.book.add(entry, parents)
        self.book.follow(entry, extent.followers)
        self.book.order.granted(delta.counted)
        self.book.expect(entry, deadline)
        if begun is not None:
            begun()
        self._unlink(extent)
        try:
            await self.shards.commit(await self._row_commits(extent, old_refs))
        finally:
            self._unlink(extent)
        return entry

    def _unlink(self, extent: Extent) -> None:
        self.row_generation += 1
        if self.rows:
            for key in self.rows.keys() & set(array_of(extent.keys)):
                del self.rows[key]

    async def _row_commits(
        self, extent: Extent, old_refs: Mapping[int, RowRefs]
    ) -> list[tuple[int, list[Mutation]]]:
        keys = np.frombuffer(extent.keys, dtype="<i8").astype(np.int64)
        refs = np.empty((len(keys), EXTENT_ID_BYTES + 2), dtype=np.uint8)
        refs[:, :EXTENT_ID_BYTES] = np.frombuffer(extent.extent_id, dtype=np.uint8)
        refs[:, EXTENT_ID_BYTES:] = (
            np.arange(len(keys), dtype=">u2").view(np.uint8).reshape(len(keys), 2)
        )
        order, parts = by_shard(keys, self.shard_count)
        raw_keys = raw_row_keys(keys[order])
        raw_refs = refs[order].tobytes()
        size = EXTENT_ID_BYTES + 2
        values = [raw_refs[i : i + size] for i in range(0, len(raw_refs), size)]
        await asyncio.sleep(0)
        if old_refs:
            for at, position in enumerate(order.tolist()):
                kept = old_refs.get(position, ())
                values[at] = b"".join(records.encode_ref(e, p) for e, p in kept) + values[at]
        # Plain tuples: thousands of named ones cost as much as writing them.
        writes = list(zip(repeat(Table.ROWS), raw_keys, values))
        return [(number, [Mutation(writes=writes[a:b])]) for number, a, b in parts]

    async def read_many(self, extent_ids: Iterable[bytes]) -> dict[bytes, Found | KvcmError | None]:
        """``read`` of many extents; the error in place of those whose shard failed."""
        out: dict[bytes, Found | KvcmError | None] = {}
        missing: list[bytes] = []
        for extent_id in extent_ids:
            entry = self.book.entries.get(extent_id)
            if entry is not None and entry.opened is not None and entry.state is not None:
                out[extent_id] = entry.opened, entry.state
            else:
                missing.append(extent_id)
        return out | await self._by_shard(missing, self._read)

    async def headers_of(
        self, extent_ids: Iterable[bytes]
    ) -> dict[bytes, Extent | KvcmError | None]:
        """Extents with zeros for their keys, whatever their state: enough to know their objects.

        None where there is none, or it does not parse; the error where its shard failed.
        """
        return await self._by_shard(list(extent_ids), self._headers)

    async def _headers(self, extent_ids: Sequence[bytes]) -> dict[bytes, Extent | None]:
        groups = list(by_home(extent_ids).items())
        asked = [(n, [records.chunk_key(e, 0) for e in members]) for n, members in groups]
        out: dict[bytes, Extent | None] = {}
        answers = await self._get(asked, Table.EXTENTS, partial=False)
        for (_, members), values in zip(groups, answers, strict=True):
            for extent_id, value in zip(members, values, strict=True):
                out[extent_id] = None
                if value is None:
                    continue
                try:
                    header, count = records.decode_header(extent_id, value)
                except CorruptRecord as error:
                    self.shared.quarantine.add(error)
                    continue
                out[extent_id] = replace(header, keys=bytes(8 * count))
        return out

    async def _by_shard(
        self,
        extent_ids: Sequence[bytes],
        read: Callable[[Sequence[bytes]], Awaitable[dict[bytes, T]]],
    ) -> dict[bytes, T | KvcmError]:
        """All at once, and shard by shard when that fails, so that a shard that is away holds up
        no other."""
        out: dict[bytes, T | KvcmError] = {}
        if not extent_ids:
            return out
        try:
            return out | await read(extent_ids)
        except KvcmError:
            for members in by_home(extent_ids).values():
                try:
                    out |= await read(members)
                except KvcmError as error:
                    out |= dict.fromkeys(members, error)
        return out

    async def save_stamps(self, limit: int) -> int:
        """Write up to ``limit`` changed last-access stamps; returns how many."""
        groups: dict[int, list[Write]] = {}
        taken: list[Entry] = []
        for entry in list(islice(self.book.dirty, limit)):
            del self.book.dirty[entry]
            entry.stamped = False
            if entry.phase in (Phase.OPEN, Phase.SETTLED):
                taken.append(entry)
                value = records.encode_use(self.book.use_of(entry))
                groups.setdefault(home_shard(entry.extent_id), []).append(
                    Write(Table.DUE, entry.extent_id, value)
                )
        if groups:
            await self.shards.commit([(n, [Mutation(writes=w)]) for n, w in groups.items()])
        return len(taken)
