"""The index of one instance: loading, reading and changing extents.

Every change of an extent is one compare-and-set on its state record, with counters and trash in
the same commit, however many blocks it touches (design.md §3, §4).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt

from kvcm.core.clock import Clock
from kvcm.core.errors import CorruptRecord, InternalError, OutcomeUnknown, StaleFence
from kvcm.core.keys import array_of
from kvcm.core.limits import HOME_SHARDS
from kvcm.core.types import Instance, StorageType
from kvcm.metaindex import bits, records
from kvcm.metaindex.answers import Selector, owner_of
from kvcm.metaindex.book import Book, Entry
from kvcm.metaindex.ids import EXTENT_ID_BYTES, SessionIds, home_shard
from kvcm.metaindex.layout import Layout, Waste, live_blocks, live_bytes, spec_slots
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.readcache import Ref, View
from kvcm.metaindex.records import Extent, Phase, State, Trash
from kvcm.metaindex.shards import Shards, by_shard, shard_of
from kvcm.metaindex.shared import Shared
from kvcm.metaindex.store import Compare, Mutation, Outcome, Table, Write

_log = logging.getLogger(__name__)
_CHANGE_TRIES = 8
_ROWS_PER_COMMIT = 1024
_SCAN_PAGE = 128

Decide = Callable[[Extent, State], State | None]
RowRefs = list[tuple[bytes, int]]
_NO_REFS: RowRefs = []


@dataclass(frozen=True, slots=True)
class Change:
    """What ``change`` found and did; ``trash`` is what it put there."""

    extent: Extent
    state: State
    applied: bool
    trash: Trash | None = None


def held_by(extent: Extent, state: State) -> Delta:
    """An extent's share of the ledger in a state, without trash."""
    live = live_blocks(extent, state)
    size, count = live_bytes(extent, live), live.bit_count()
    if state.phase is Phase.OPEN:
        return Delta(open_bytes=size, dead_bytes=state.dead, open_blocks=count)
    if state.phase is Phase.SETTLED:
        return Delta(serving_bytes=size, dead_bytes=state.dead, serving_blocks=count)
    return Delta()


def _raw_keys(keys: npt.NDArray[np.int64]) -> list[bytes]:
    """The row key of each block key: raw little-endian, 8 bytes."""
    raw = keys.astype("<i8").tobytes()
    return [raw[i : i + 8] for i in range(0, len(raw), 8)]


class InstanceIndex:
    """Extents and rows of one registered instance."""

    def __init__(self, shared: Shared, instance: Instance) -> None:
        self.shared = shared
        self.instance = instance
        self.uid = instance.uid
        self.group = instance.instance_group
        self.shard_count = instance.shard_count
        self.trim = instance.trim
        self.trimmed_to = -1
        self.closed = False
        self.loaded = False
        self._loading = asyncio.Lock()
        self.lost_writes = 0
        self.rows: dict[int, tuple[Ref, ...]] = {}
        self.row_generation = 0
        self.book = Book(shared.order_of(self.group))
        self.trash: dict[bytes, Trash] = {}
        self.sessions = SessionIds(shared.secret, self.uid)
        self.spec_bits = {s.name: 1 << i for i, s in enumerate(instance.location_spec_infos)}
        self._selectors: dict[tuple[bool, int], Selector] = {}
        self._generation = [0] * HOME_SHARDS
        self.shards = Shards(
            shared.store,
            self.uid.encode(),
            shared.numbers,
            self._count_changed,
            self._load_shard,
            self._lost,
        )

    # ---- small facts -------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return self.shared.clock

    def selector(self, as_json: bool, asked: int) -> Selector:
        """The one selector object of a wish."""
        found = self._selectors.get((as_json, asked))
        if found is None:
            found = self._selectors[as_json, asked] = Selector(as_json, asked)
        return found

    def raise_trim(self, trim: int) -> None:
        """Everything granted under a lower trim number is dead from now on."""
        self.trim = trim
        self.row_generation += 1
        for number in range(HOME_SHARDS):
            self._generation[number] += 1
        self.shared.cache.clear_instance(self.rows)

    def usable(self, extent: Extent, state: State) -> bool:
        """Whether rows to this extent count: not retired, aborted or trimmed."""
        return state.phase in (Phase.OPEN, Phase.SETTLED) and extent.trim >= self.trim

    def _count_changed(self, storage: str, delta: Delta) -> None:
        kind = self.shared.type_of(storage)
        self.shared.ledger.apply(self.group, self.uid, storage, kind, delta)

    def _lost(self, number: int) -> None:
        self.lost_writes += 1
        _log.error("instance %s: the index store lost writes of shard %d", self.uid, number)
        self.shared.cache.clear_instance(self.rows)

    # ---- loading -----------------------------------------------------------------------------

    async def load(self) -> None:
        """Claim the home shards and read their extents into memory; once, however often called.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store; call again.
        """
        async with self._loading:
            if self.loaded:
                return
            for number in range(HOME_SHARDS):
                await self.shards.ensure([number])
                await self._load_shard(number)
            self._link()
            self.loaded = True

    async def _load_shard(self, number: int) -> None:
        shard = self.shards.id(number)
        store = self.shared.store
        self._generation[number] += 1
        headers: dict[bytes, Extent] = {}
        counts: dict[bytes, int] = {}
        async for page in store.scan(shard, Table.EXTENTS, page=_SCAN_PAGE):
            for key, value in page:
                if key[EXTENT_ID_BYTES:] == b"\0\0":
                    self._read_header(key[:EXTENT_ID_BYTES], value, headers, counts)
        stamps: dict[bytes, int] = {}
        async for page in store.scan(shard, Table.DUE):
            stamps.update((k, int.from_bytes(v, "big")) for k, v in page)
        found: set[bytes] = set()
        async for page in store.scan(shard, Table.STATES, page=_SCAN_PAGE):
            for key, value in page:
                extent = headers.get(key)
                if extent is not None and self._load_entry(extent, value, stamps.get(key, 0)):
                    found.add(key)
        for extent_id in [e for e in self.book.entries if home_shard(e) == number]:
            if extent_id not in found:
                self.book.forget(extent_id)
                self.shared.cache.invalidate(extent_id)
        await self._load_trash(number)
        if self.loaded:
            self._link()

    async def _load_trash(self, number: int) -> None:
        found: dict[bytes, Trash] = {}
        async for page in self.shared.store.scan(self.shards.id(number), Table.TRASH):
            for key, value in page:
                try:
                    found[key] = records.decode_trash(key, value)
                except CorruptRecord as error:
                    self.shared.quarantine.add(error)
        for key in [k for k in self.trash if home_shard(k) == number and k not in found]:
            del self.trash[key]
        for key, trash in found.items():
            if self.trash.get(key) != trash:
                self.trash[key] = trash
                self.shared.trash_added(self, trash)

    def _read_header(
        self, extent_id: bytes, value: bytes, headers: dict[bytes, Extent], counts: dict[bytes, int]
    ) -> None:
        try:
            header, count = records.decode_header(extent_id, value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return
        # Only the header matters here; a stand-in for the keys keeps ``count`` right.
        headers[extent_id] = replace(header, keys=bytes(8 * count))
        counts[extent_id] = count

    def _load_entry(self, extent: Extent, value: bytes, stamp_ms: int) -> bool:
        try:
            state = records.decode_state(value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return False
        # A view made before its entry was known would never be stamped, nor count as written.
        self.shared.cache.invalidate(extent.extent_id)
        known = self.book.entries.get(extent.extent_id)
        if known is not None and known.phase <= state.phase:
            # The same object goes on: sessions pin it and others build on it.
            known.opened = known.state = None
            self._follow(known, extent, state)
            return True
        entry = Entry(self.uid, extent, state, held_by(extent, state))
        entry.stamp_ms = max(stamp_ms, state.stamp_ms)
        entry.runs = extent.runs
        deadline = self.clock.monotonic() + extent.timeout_s
        entry.keep_until = deadline
        self.book.add(entry)
        if state.phase is Phase.OPEN:
            self.book.expect(entry, deadline)
        return True

    def _link(self) -> None:
        """Resolve parents, raise a parent's stamp to its youngest child's, rebuild the order."""
        entries = self.book.entries
        depth: dict[Entry, int] = {}
        for entry in entries.values():
            if entry.runs is not None:
                depth[entry] = max((r.depth for r in entry.runs), default=0)
                found = [entries[r.parent] for r in entry.runs if r.parent in entries]
                entry.parents = tuple(dict.fromkeys(p for p in found if p is not entry))
                entry.runs = None
        for entry in sorted(entries.values(), key=lambda e: -depth.get(e, 0)):
            for parent in entry.parents:
                parent.stamp_ms = max(parent.stamp_ms, entry.stamp_ms)
        order = self.book.order
        for entry in sorted(order, key=lambda e: (e.stamp_ms, -depth.get(e, 0))):
            order.move_to_end(entry)

    # ---- reading -----------------------------------------------------------------------------

    async def rows_of(self, keys: Sequence[int]) -> list[RowRefs]:
        """The references of each key's row, in order; an unreadable row is empty.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        if len(keys) == 1:
            number = shard_of(keys[0], self.shard_count)
            await self.shards.ensure((number,))
            raw = keys[0].to_bytes(8, "little", signed=True)
            got = await self.shared.store.get_many([(self.shards.id(number), [raw])], Table.ROWS)
            return [self._row(got[0][0])]
        values = np.asarray(keys, dtype=np.int64)
        order, parts = by_shard(values, self.shard_count)
        await self.shards.ensure(number for number, _, _ in parts)
        raw_keys = _raw_keys(values[order])
        asked = [(self.shards.id(n), raw_keys[start:end]) for n, start, end in parts]
        answers = await self.shared.store.get_many(asked, Table.ROWS)
        out: list[RowRefs] = [_NO_REFS] * len(keys)
        for (_, start, _), found in zip(parts, answers, strict=True):
            if found.count(None) == len(found):
                continue
            for at, value in enumerate(found, start):
                if value is not None:
                    out[order[at]] = self._row(value)
        return out

    def _row(self, value: bytes | None) -> RowRefs:
        if value is None:
            return []
        try:
            return records.decode_row(value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return []

    async def views_of(self, extent_ids: Iterable[bytes]) -> Mapping[bytes, View]:
        """Views of those extents that are usable; the others are left out.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        cache = self.shared.cache
        out: dict[bytes, View] = {}
        missing: list[bytes] = []
        for extent_id in dict.fromkeys(extent_ids):
            view = cache.views.get(extent_id)
            if view is not None and view.rows is self.rows:
                out[extent_id] = view
            elif not self._known_gone(extent_id):
                opened = self._view_of_open(extent_id)
                if opened is None:
                    missing.append(extent_id)
                else:
                    out[extent_id] = opened
        if missing:
            before = list(self._generation)
            for extent_id, found in (await self._read(missing)).items():
                if found is None or not self.usable(*found):
                    continue
                view = self.view(*found)
                out[extent_id] = view
                unchanged = before[home_shard(extent_id)] == self._generation[home_shard(extent_id)]
                # Without its storage it shows nothing, and must not stay so once that is open.
                if unchanged and view.storage is not None:
                    cache.put(view)
        return out

    def _view_of_open(self, extent_id: bytes) -> View | None:
        entry = self.book.entries.get(extent_id)
        if entry is None or entry.opened is None or entry.state is None:
            return None
        if entry.trim < self.trim:
            return None
        view = self.view(entry.opened, entry.state)
        self.shared.cache.put(view)
        return view

    def link(self, key: int, refs: Sequence[Ref], generation: int) -> None:
        """Remember a row read at ``row_generation`` == ``generation``, if it still holds.

        All its extents must be cached, since a row leaves with them.
        """
        cached = self.shared.cache.views
        if generation == self.row_generation and all(
            cached.get(view.extent.extent_id) is view for view, _ in refs
        ):
            self.shared.cache.link(key, refs)

    def _known_gone(self, extent_id: bytes) -> bool:
        if not self.loaded:
            return False
        entry = self.book.entries.get(extent_id)
        return entry is None or entry.phase in (Phase.RETIRED, Phase.ABORTED)

    def view(self, extent: Extent, state: State) -> View:
        """A view of an extent, not yet in the cache."""
        shared = self.shared
        return View(
            extent,
            state,
            owner_of(shared.cluster_uid, self.uid, extent),
            shared.storages.get(extent.storage),
            self.book.entries.get(extent.extent_id),
            shared.cache,
            self.rows,
        )

    async def _read(self, extent_ids: Sequence[bytes]) -> dict[bytes, tuple[Extent, State] | None]:
        """Extents and states from the store; None where missing or unreadable."""
        by_shard: dict[int, list[bytes]] = {}
        for extent_id in extent_ids:
            by_shard.setdefault(home_shard(extent_id), []).append(extent_id)
        await self.shards.ensure(by_shard)
        store = self.shared.store
        ids = [(self.shards.id(n), members) for n, members in by_shard.items()]
        states = await store.get_many(ids, Table.STATES)
        firsts = await store.get_many(
            [(s, [records.chunk_key(e, 0) for e in members]) for s, members in ids], Table.EXTENTS
        )
        out: dict[bytes, tuple[Extent, State] | None] = {}
        more: list[tuple[Extent, int, State]] = []
        for (_, members), shard_states, shard_firsts in zip(ids, states, firsts, strict=True):
            for extent_id, state_bytes, first in zip(
                members, shard_states, shard_firsts, strict=True
            ):
                out[extent_id] = None
                if state_bytes is None or first is None:
                    continue
                try:
                    state = records.decode_state(state_bytes)
                    extent, count = records.decode_header(extent_id, first)
                except CorruptRecord as error:
                    self.shared.quarantine.add(error)
                    continue
                if extent.count == count:
                    out[extent_id] = (extent, state)
                else:
                    more.append((extent, count, state))
        if more:
            await self._read_rest(more, out)
        return out

    async def _read_rest(
        self,
        more: Sequence[tuple[Extent, int, State]],
        out: dict[bytes, tuple[Extent, State] | None],
    ) -> None:
        asked = [
            (
                self.shards.id(home_shard(e.extent_id)),
                [records.chunk_key(e.extent_id, i) for i in range(1, records.chunk_count(count))],
            )
            for e, count, _ in more
        ]
        rests = await self.shared.store.get_many(asked, Table.EXTENTS)
        for (extent, count, state), rest in zip(more, rests, strict=True):
            try:
                out[extent.extent_id] = (records.join_chunks(extent, count, rest), state)
            except CorruptRecord as error:
                self.shared.quarantine.add(error)

    async def read(self, extent_id: bytes) -> tuple[Extent, State] | None:
        """One extent with its state, from memory while it is open; None when it is gone."""
        entry = self.book.entries.get(extent_id)
        if entry is not None and entry.opened is not None and entry.state is not None:
            return entry.opened, entry.state
        return (await self._read([extent_id]))[extent_id]

    # ---- changing ----------------------------------------------------------------------------

    def layout(self, extent: Extent) -> Layout | None:
        """Objects of an extent; None when its storage is gone."""
        storage = self.shared.storages.get(extent.storage)
        if storage is None:
            return None
        owner = owner_of(self.shared.cluster_uid, self.uid, extent)
        return Layout.of(extent, storage.objects(extent.descriptor, owner, spec_slots(extent)))

    async def change(
        self, extent_id: bytes, decide: Decide, *, keep_bytes: bool = False
    ) -> Change | None:
        """Move an extent to the state that ``decide`` names, as one compare-and-set.

        ``decide`` gets the current record and gives the wanted state, or None for "leave it"; it
        may be called again after a conflict. ``keep_bytes`` puts nothing into the trash.

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
                self._catch_up(extent, state)
                return Change(extent, state, applied=False)
            try:
                done = await self._swap(extent, state, wanted, keep_bytes)
            except (OutcomeUnknown, StaleFence) as error:
                # Claimed again at the next touch, which re-reads the record: a change that did
                # apply shows as its own version there.
                failure = error
                continue
            if done is not None:
                return done
        raise failure or InternalError(f"extent {extent_id.hex()} keeps changing")

    async def _swap(
        self, extent: Extent, old: State, new: State, keep_bytes: bool
    ) -> Change | None:
        old_live, new_live = live_blocks(extent, old), live_blocks(extent, new)
        whole = new_live == bits.ones(extent.count)
        layout = None if keep_bytes or whole else self.layout(extent)
        waste = Waste(0, 0)
        trash: Trash | None = None
        if layout is not None:
            waste = layout.waste(new_live)
            gone = waste.gone & ~layout.waste(old_live).gone if old_live else 0
            if gone:
                late = old.phase is Phase.OPEN
                trash = Trash(
                    extent.extent_id, new.version, extent.storage, gone, layout.size_of(gone), late
                )
        new = replace(new, dead=waste.dead)
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
        home = home_shard(extent.extent_id)
        self._hide(extent.extent_id)
        try:
            (outcomes,) = await self.shards.commit([(home, [mutation])])
        finally:
            self._hide(extent.extent_id)
        entry = self.book.entries.get(extent.extent_id)
        if outcomes[0] is not Outcome.APPLIED:
            if entry is not None:
                entry.opened = entry.state = None
            return None
        if entry is not None:
            self._follow(entry, extent, new)
        if trash is not None:
            self.trash[trash.key] = trash
            self.shared.trash_added(self, trash)
        return Change(extent, new, applied=True, trash=trash)

    def _catch_up(self, extent: Extent, state: State) -> None:
        """The record is further than its entry: a change whose outcome nobody saw."""
        entry = self.book.entries.get(extent.extent_id)
        if entry is not None and entry.phase < state.phase:
            self._follow(entry, extent, state)

    def _hide(self, extent_id: bytes) -> None:
        self._generation[home_shard(extent_id)] += 1
        self.shared.cache.invalidate(extent_id)

    def _follow(self, entry: Entry, extent: Extent, state: State) -> None:
        was = entry.phase
        entry.phase = state.phase
        entry.finished_ms = state.finished_ms
        if state.phase in (Phase.RETIRED, Phase.ABORTED):
            if was in (Phase.OPEN, Phase.SETTLED):
                self.book.leave(entry, was)
            return
        entry.held = held_by(extent, state)
        if state.phase is Phase.OPEN:
            entry.state = state
        elif was is Phase.OPEN:
            entry.opened = entry.state = None
            self.book.unpin(entry)
            self.book.settle(entry)

    async def grant(
        self,
        extent: Extent,
        state: State,
        old_refs: Mapping[int, RowRefs],
        parents: Sequence[Entry],
    ) -> Entry:
        """Commit a new open extent, then its rows.

        Args:
            old_refs: for positions whose row keeps other locations, those references.
            parents: entries that the extent's runs build on.

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
            (outcomes,) = await self.shards.commit([(home, [mutation])])
        finally:
            self._count_changed(extent.storage, -delta)
        if outcomes[0] is not Outcome.APPLIED:
            raise InternalError(f"extent id {extent.extent_id.hex()} was used before")
        entry = Entry(self.uid, extent, state, delta)
        entry.opened, entry.state = extent, state
        entry.parents = tuple(dict.fromkeys(parents))
        deadline = self.clock.monotonic() + extent.timeout_s
        entry.keep_until = deadline
        self.book.add(entry)
        self.book.expect(entry, deadline)
        self._unlink(extent)
        try:
            await self.shards.commit(await self._row_commits(extent, old_refs))
        finally:
            self._unlink(extent)
        return entry

    def _unlink(self, extent: Extent) -> None:
        self.row_generation += 1
        if self.rows:
            for key in array_of(extent.keys):
                self.rows.pop(key, None)

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
        raw_keys = _raw_keys(keys[order])
        raw_refs = refs[order].tobytes()
        size = EXTENT_ID_BYTES + 2
        values = [raw_refs[i : i + size] for i in range(0, len(raw_refs), size)]
        await asyncio.sleep(0)
        if old_refs:
            for at, position in enumerate(order.tolist()):
                kept = old_refs.get(position, ())
                values[at] = b"".join(records.encode_ref(e, p) for e, p in kept) + values[at]
        writes = list(map(Write._make, zip(repeat(Table.ROWS), raw_keys, values)))
        return [(number, [Mutation(writes=writes[a:b])]) for number, a, b in parts]

    async def delete_rows(self, extent: Extent) -> int:
        """Remove the rows that still name an extent that is gone; other references stay.

        Returns:
            Rows changed.
        """
        keys = np.frombuffer(extent.keys, dtype="<i8").astype(np.int64)
        changed = 0
        for start in range(0, len(keys), _ROWS_PER_COMMIT):
            part = keys[start : start + _ROWS_PER_COMMIT].tolist()
            groups: dict[int, list[Mutation]] = {}
            for key, refs in zip(part, await self.rows_of(part), strict=True):
                rest = [r for r in refs if r[0] != extent.extent_id]
                if len(rest) == len(refs):
                    continue
                raw = key.to_bytes(8, "little", signed=True)
                old = b"".join(records.encode_ref(e, p) for e, p in refs)
                new = b"".join(records.encode_ref(e, p) for e, p in rest) or None
                groups.setdefault(shard_of(key, self.shard_count), []).append(
                    Mutation(
                        writes=[Write(Table.ROWS, raw, new)],
                        compare=[Compare(Table.ROWS, raw, old, whole=True)],
                    )
                )
                changed += 1
            if groups:
                await self.shards.commit(list(groups.items()))
        return changed

    async def forget(self, extent: Extent, state: State) -> bool:
        """Remove the records of a retired or aborted extent whose trash is empty."""
        home = home_shard(extent.extent_id)
        eid = extent.extent_id
        writes = [
            Write(Table.EXTENTS, records.chunk_key(eid, i), None)
            for i in range(records.chunk_count(extent.count))
        ]
        writes += [Write(Table.STATES, eid, None), Write(Table.DUE, eid, None)]
        mutation = Mutation(writes=writes, compare=[Compare(Table.STATES, eid, state.version)])
        self._hide(eid)
        (outcomes,) = await self.shards.commit([(home, [mutation])])
        if outcomes[0] is Outcome.APPLIED:
            self.book.forget(eid)
            return True
        return False

    async def replace_trash(self, trash: Trash, again: Trash | None) -> None:
        """Bytes of ``trash`` are deleted: its entry goes, or stays for a second pass."""
        home = home_shard(trash.extent_id)
        value = None if again is None else records.encode_trash(again)
        # A second pass holds no bytes: they were credited to the storage by the first.
        freed = trash.size
        mutation = Mutation(
            writes=[Write(Table.TRASH, trash.key, value)],
            compare=[Compare(Table.TRASH, trash.key, records.encode_trash(trash), whole=True)],
            counters=to_counters(trash.storage, Delta(trash_bytes=-freed)),
        )
        await self.shards.commit([(home, [mutation])])
        if again is None:
            self.trash.pop(trash.key, None)
        else:
            self.trash[trash.key] = again

    async def save_stamps(self, limit: int) -> int:
        """Write up to ``limit`` changed last-access stamps; returns how many."""
        groups: dict[int, list[Write]] = {}
        taken: list[Entry] = []
        for entry in list(islice(self.book.dirty, limit)):
            del self.book.dirty[entry]
            entry.stamped = False
            if entry.phase in (Phase.OPEN, Phase.SETTLED):
                taken.append(entry)
                value = entry.stamp_ms.to_bytes(8, "big")
                groups.setdefault(home_shard(entry.extent_id), []).append(
                    Write(Table.DUE, entry.extent_id, value)
                )
        if groups:
            await self.shards.commit([(n, [Mutation(writes=w)]) for n, w in groups.items()])
        return len(taken)

    def full_set(self) -> int:
        """All specs of the instance as a bit set."""
        return bits.ones(len(self.instance.location_spec_infos))

    def new_version(self) -> bytes:
        """A version token for a state record."""
        return self.clock.random_bytes(8)

    def storage_type(self, storage: str) -> StorageType:
        """Type of a storage by name."""
        return self.shared.type_of(storage)
