"""The index of one instance as readers see it: rows, extents, views."""

from __future__ import annotations

import abc
import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvcm.core.clock import Clock
from kvcm.core.errors import CorruptRecord, KvcmError
from kvcm.core.limits import HOME_SHARDS
from kvcm.core.types import Instance
from kvcm.metaindex import bits, records
from kvcm.metaindex.answers import Selector, owner_of
from kvcm.metaindex.book import Book, Entry
from kvcm.metaindex.entry import one_of
from kvcm.metaindex.events import Changed, Cleared, Reason
from kvcm.metaindex.ids import EXTENT_ID_BYTES, SessionIds, home_shard
from kvcm.metaindex.layout import held_by
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.readcache import Ref, View
from kvcm.metaindex.records import Extent, Phase, State
from kvcm.metaindex.shards import Shards, by_shard, shard_of
from kvcm.metaindex.shared import Shared
from kvcm.metaindex.store import Table, Values, values_of
from kvcm.metaindex.trashtable import TrashTable

_log = logging.getLogger(__name__)

RowRefs = list[tuple[bytes, int]]
_NO_REFS: RowRefs = []


def raw_row_keys(keys: npt.NDArray[np.int64]) -> list[bytes]:
    """The row key of each block key: raw little-endian, 8 bytes."""
    raw = keys.astype("<i8").tobytes()
    return [raw[i : i + 8] for i in range(0, len(raw), 8)]


class InstanceReader(abc.ABC):
    """Extents and rows of one registered instance: its state in memory, and reads."""

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
        self._read_before: set[int] = set()
        self.lost_writes = 0
        self.rows: dict[int, tuple[Ref, ...]] = {}
        self.row_generation = 0
        self.stretch = 0
        """Blocks of the shortest extent among those a cold lookup read last: a guess of the next
        ones' length, which costs or saves reads and decides nothing."""
        self.book = Book(shared.order_of(self.group))
        self.trash = TrashTable()
        self.ended: deque[Entry] = deque()
        """Entries retired or aborted since the forget loop last looked."""
        self.trim_held = 0
        """While positive the trim loop frees nothing: a trim that keeps the bytes is under way."""
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
            shared.quarantine.add,
        )

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
        if trim > self.trim and self.shared.watchers:
            self.shared.watchers.tell(Cleared(self.instance, Reason.TRIMMED))
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

    def full_set(self) -> int:
        """All specs of the instance as a bit set."""
        return bits.ones(len(self.instance.location_spec_infos))

    def new_version(self) -> bytes:
        """A version token for a state record."""
        return self.clock.random_bytes(8)

    @abc.abstractmethod
    async def _load_shard(self, number: int) -> None:
        """Read the extents of a home shard anew."""

    def _follow(
        self,
        entry: Entry,
        extent: Extent,
        state: State,
        before: State | None = None,
        reason: Reason = Reason.OTHER,
        *,
        keyless: bool = False,
    ) -> None:
        """Take an entry to what its record says; the arguments as in `Changed`."""
        was = entry.phase
        if state.phase < was:
            # The answer to a commit came after that of a later one.
            return
        if self.shared.watchers:
            changed = Changed(self.instance, entry, extent, before, state, reason, keyless)
            event = changed.event(self.sessions.of_extent, self.book.order.policy.kind)
            if event is not None:
                self.shared.watchers.tell(event)
        entry.phase = state.phase
        entry.finished_ms = state.finished_ms
        if state.phase in (Phase.RETIRED, Phase.ABORTED):
            if was in (Phase.OPEN, Phase.SETTLED):
                self.book.leave(entry, was)
                self.ended.append(entry)
            return
        entry.held = one_of(held_by(extent, state))
        if state.phase is Phase.OPEN:
            entry.state = state
        elif was is Phase.OPEN:
            entry.opened = entry.state = None
            self.book.unpin(entry)
            self.book.settle(entry, state.stamp_ms)

    async def rows_of(self, keys: Sequence[int], *, partial: bool = False) -> list[RowRefs]:
        """The references of each key's row, in order, as ``row_values`` and ``refs_of`` give."""
        return list(map(self.refs_of, await self.row_values(keys, partial=partial)))

    async def row_values(self, keys: Sequence[int], *, partial: bool = False) -> list[bytes | None]:
        """Each key's row as it is stored, in order; None where there is none.

        Args:
            partial: rows in shards that cannot be reached are None too, unless none can.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        if len(keys) == 1:
            number = shard_of(keys[0], self.shard_count)
            raw = keys[0].to_bytes(8, "little", signed=True)
            got = await self._get([(number, [raw])], Table.ROWS, partial)
            return got[0]
        values = np.asarray(keys, dtype=np.int64)
        order, parts = by_shard(values, self.shard_count)
        raw_keys = raw_row_keys(values[order])
        asked = [(number, raw_keys[start:end]) for number, start, end in parts]
        answers = await self._get(asked, Table.ROWS, partial)
        out: list[bytes | None] = [None] * len(keys)
        for at, value in zip(order.tolist(), chain.from_iterable(answers), strict=True):
            out[at] = value
        return out

    def extents_in(self, rows: Sequence[bytes | None]) -> set[bytes]:
        """The extents that rows name."""
        names = {row[:EXTENT_ID_BYTES] for row in rows if row is not None}
        size = records.REF_BYTES
        # Few rows have more than one reference.
        for row in [row for row in rows if row is not None and len(row) > size]:
            names.update(row[i : i + EXTENT_ID_BYTES] for i in range(0, len(row), size))
        return names

    async def _get(
        self, asked: Sequence[tuple[int, Sequence[bytes]]], table: Table, partial: bool
    ) -> list[Values]:
        """Records by shard number, from claimed shards; with ``partial`` None for all records of
        a shard that cannot be reached."""
        shards = self.shards
        numbers = [number for number, _ in asked]
        if not partial:
            await shards.ensure(numbers)
            return values_of(
                await self.shared.store.get_many([(shards.id(n), k) for n, k in asked], table)
            )
        reached = await shards.reach(numbers)
        answers: list[Values | KvcmError] = await self.shared.store.get_many(
            [(shards.id(n), keys) for n, keys in asked if n in reached], table
        )
        got = iter(answers)
        values: list[Values] = []
        for number, keys in asked:
            answer = next(got) if number in reached else None
            none: Values = [None] * len(keys)
            values.append(none if answer is None or isinstance(answer, KvcmError) else answer)
        return values

    def refs_of(self, value: bytes | None) -> RowRefs:
        """The references in a stored row; none in one that is not there or not readable."""
        if value is None:
            return _NO_REFS
        try:
            return records.decode_row(value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return []

    async def views_of(
        self, extent_ids: Iterable[bytes], *, partial: bool = False
    ) -> Mapping[bytes, View]:
        """Views of those extents that are usable; the others are left out.

        Args:
            partial: extents in shards that cannot be reached are left out too, unless none can.

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
            cache.read += len(missing)
            before = list(self._generation)
            for extent_id, found in (await self._read(missing, partial)).items():
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

    async def _read(
        self, extent_ids: Sequence[bytes], partial: bool = False
    ) -> dict[bytes, tuple[Extent, State] | None]:
        """Extents and states from the store; None where missing or unreadable."""
        by_shard: dict[int, list[bytes]] = {}
        for extent_id in extent_ids:
            by_shard.setdefault(home_shard(extent_id), []).append(extent_id)
        ids = list(by_shard.items())
        heads = [(n, [records.chunk_key(e, 0) for e in members]) for n, members in ids]
        states, firsts = await asyncio.gather(
            self._get(ids, Table.STATES, partial), self._get(heads, Table.EXTENTS, partial)
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
                    state = records.decode_state(extent_id, state_bytes)
                    extent, count = records.decode_header(extent_id, first)
                except CorruptRecord as error:
                    self.shared.quarantine.add(error)
                    continue
                if extent.count == count:
                    out[extent_id] = (extent, state)
                else:
                    more.append((extent, count, state))
        if more:
            await self._read_rest(more, out, partial)
        return out

    async def _read_rest(
        self,
        more: Sequence[tuple[Extent, int, State]],
        out: dict[bytes, tuple[Extent, State] | None],
        partial: bool,
    ) -> None:
        asked = [
            (
                home_shard(e.extent_id),
                [records.chunk_key(e.extent_id, i) for i in range(1, records.chunk_count(count))],
            )
            for e, count, _ in more
        ]
        rests = await self._get(asked, Table.EXTENTS, partial)
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
