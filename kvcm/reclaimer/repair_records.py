"""Extents, states, trash and counters of the home shards: each shard is held against itself.

A shard is read while it is in use. What commits touched meanwhile, and whatever looked wrong, is
read once more while nothing is committed to it; so what is reported is so, and what is mended is
mended in one commit that also makes the counters right.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from kvcm.core.errors import CorruptRecord, KvcmError
from kvcm.core.limits import BLOCKS_PER_EXTENT_MAX, HOME_SHARDS
from kvcm.metaindex import records
from kvcm.metaindex.ids import EXTENT_ID_BYTES, home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import held_by
from kvcm.metaindex.ledger import Delta, from_counters, to_counters
from kvcm.metaindex.store import Mutation, Outcome, Table, Write
from kvcm.reclaimer.repair_report import Kind
from kvcm.reclaimer.repair_scope import Lost, Scope, get_many, read_extents

_PAGE = 64
_LETTERS = {key[:1] for key in to_counters("", Delta(1, 1, 1, 1, 1, 1))}
_TABLES = (Table.STATES, Table.EXTENTS, Table.DUE)

Held = tuple[str, Delta]


class _Shard:
    """What one shard holds. Extents are ``held`` (whole), ``broken`` (their state or keys do not
    read) or ``orphans`` (parts without a state); ``expected`` are the counters that the readable
    ones amount to, added up as they come, since a shard may hold very many."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: dict[bytes, Held] = {}
        self.broken: set[bytes] = set()
        self.orphans: set[bytes] = set()
        self.trash: dict[bytes, Held] = {}
        self.lost_trash: set[bytes] = set()
        self.unreadable_trash: set[bytes] = set()
        self.expected: dict[bytes, int] = {}

    def hold(self, table: dict[bytes, Held], key: bytes, held: Held | None) -> None:
        """Put what a record amounts to in the place of what it did; None: it is gone."""
        for sign, each in ((-1, table.pop(key, None)), (1, held)):
            if each is not None:
                for counter, value in to_counters(*each).items():
                    self.expected[counter] = self.expected.get(counter, 0) + sign * value
        if held is not None:
            table[key] = held

    def damage(self) -> list[tuple[Kind, set[bytes]]]:
        """What is wrong with single records, by kind."""
        return [
            (Kind.UNREADABLE_EXTENT, self.broken),
            (Kind.ORPHAN_RECORD, self.orphans),
            (Kind.UNREADABLE_TRASH, self.unreadable_trash),
            (Kind.LOST_TRASH, self.lost_trash),
        ]

    def drop(self, extent_id: bytes) -> None:
        self.hold(self.held, extent_id, None)
        self.broken.discard(extent_id)
        self.orphans.discard(extent_id)


class RecordCheck:
    """Home shards of all instances in scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._damaged: list[tuple[InstanceIndex, int]] = []
        self._drifted: set[tuple[InstanceIndex, int]] = set()
        self._states: dict[str, int] = {}

    async def check(self, index: InstanceIndex) -> AsyncGenerator[int, None]:
        """Look at every home shard of an instance; yields records read.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        for number in range(HOME_SHARDS):
            async for count in self._shard(index, number, fix=False):
                yield count

    async def fix(self) -> AsyncGenerator[int, None]:
        """Mend the shards in which something was found; yields records read."""
        for index, number in self._damaged:
            if not self._scope.is_live(index):
                continue
            try:
                async for count in self._shard(index, number, fix=True):
                    yield count
            except KvcmError as error:
                self._scope.report.error(f"instance {index.uid} shard {number}: {error}")

    async def _shard(
        self, index: InstanceIndex, number: int, *, fix: bool
    ) -> AsyncGenerator[int, None]:
        if not self._scope.is_live(index):
            return
        with index.shards.turnstile.watch(number) as touched:
            shard = _Shard(number)
            async for count in self._read(index, shard):
                yield count
            if not self._scope.is_live(index):
                # Claiming what is about to be dropped would leave something of it behind.
                return
            async with index.shards.alone(number) as counters:
                await self._look_again(index, shard, touched)
                drift = _difference(shard.expected, counters)
                if not fix:
                    self._report(index, shard, drift)
                else:
                    await self._mend(index, shard, counters)

    async def _read(self, index: InstanceIndex, shard: _Shard) -> AsyncGenerator[int, None]:
        store, shard_id = index.shared.store, index.shards.id(shard.number)
        turn = self._scope.turn()
        async for page in store.scan(shard_id, Table.STATES, page=_PAGE):
            await self._take(index, shard, [key for key, _ in page])
            yield len(page)
        for table in (Table.EXTENTS, Table.DUE):
            async for page in store.scan(shard_id, table, page=_PAGE):
                for key, _ in page:
                    extent_id = key[:EXTENT_ID_BYTES]
                    if extent_id not in shard.held and extent_id not in shard.broken:
                        shard.orphans.add(extent_id)
                if turn.is_over():
                    await turn.give()
        async for page in store.scan(shard_id, Table.TRASH, page=_PAGE):
            for key, value in page:
                self._take_trash(shard, key, value)
            yield len(page)

    async def _take(self, index: InstanceIndex, shard: _Shard, ids: Sequence[bytes]) -> None:
        """(Re-)read extents whose states were seen in this shard."""
        turn = self._scope.turn()
        here = [e for e in ids if len(e) == EXTENT_ID_BYTES and home_shard(e) == shard.number]
        for extent_id in ids:
            shard.drop(extent_id)
        shard.broken |= set(ids) - set(here)
        for extent_id, found in (await read_extents(index, here)).items():
            if found is Lost.UNREADABLE:
                shard.broken.add(extent_id)
            elif found is not Lost.ABSENT:
                extent, state = found
                shard.hold(shard.held, extent_id, (extent.storage, held_by(extent, state)))
            if turn.is_over():
                await turn.give()

    def _take_trash(self, shard: _Shard, key: bytes, value: bytes | None) -> None:
        shard.hold(shard.trash, key, None)
        shard.unreadable_trash.discard(key)
        if value is None:
            return
        try:
            trash = records.decode_trash(key, value)
        except CorruptRecord:
            shard.unreadable_trash.add(key)
            return
        shard.hold(shard.trash, key, (trash.storage, Delta(trash_bytes=trash.counted)))

    async def _look_again(
        self, index: InstanceIndex, shard: _Shard, touched: set[tuple[Table, bytes]]
    ) -> None:
        """Nothing is committed to the shard meanwhile: few records are read here."""
        odd = shard.broken | shard.orphans
        ids = sorted(odd | {key[:EXTENT_ID_BYTES] for table, key in touched if table in _TABLES})
        for at in range(0, len(ids), _PAGE):
            part = ids[at : at + _PAGE]
            await self._take(index, shard, part)
            (states,) = await get_many(index, [(shard.number, part)], Table.STATES)
            firsts = [records.chunk_key(e, 0) for e in part]
            (heads,) = await get_many(index, [(shard.number, firsts)], Table.EXTENTS)
            (due,) = await get_many(index, [(shard.number, part)], Table.DUE)
            for extent_id, state, head, stamp in zip(part, states, heads, due, strict=True):
                if state is not None:
                    continue
                shard.broken.discard(extent_id)
                is_there = head is not None or stamp is not None
                if is_there or (extent_id in odd and await self._chunks(index, shard, extent_id)):
                    shard.orphans.add(extent_id)
        keys = sorted(
            {key for table, key in touched if table is Table.TRASH} | shard.unreadable_trash
        )
        for at in range(0, len(keys), _PAGE):
            part = keys[at : at + _PAGE]
            (values,) = await get_many(index, [(shard.number, part)], Table.TRASH)
            for key, value in zip(part, values, strict=True):
                self._take_trash(shard, key, value)
        turn = self._scope.turn()
        for key in shard.trash:
            if key[:EXTENT_ID_BYTES] not in shard.held:
                shard.lost_trash.add(key)
            if turn.is_over():
                await turn.give()

    async def _chunks(self, index: InstanceIndex, shard: _Shard, extent_id: bytes) -> list[bytes]:
        """Keys of all chunks of an extent there are."""
        most = records.chunk_count(BLOCKS_PER_EXTENT_MAX)
        keys = [records.chunk_key(extent_id, i) for i in range(most)]
        (values,) = await get_many(index, [(shard.number, keys)], Table.EXTENTS)
        return [key for key, value in zip(keys, values, strict=True) if value is not None]

    def _report(self, index: InstanceIndex, shard: _Shard, drift: dict[bytes, int]) -> None:
        report, where = self._scope.report, f"instance {index.uid} shard {shard.number}"
        self._states[index.uid] = self._states.get(index.uid, 0) + len(shard.held)
        self._scope.broken.setdefault(index.uid, set()).update(shard.broken | shard.orphans)
        for kind, keys in shard.damage():
            for key in sorted(keys):
                report.found(kind, f"{where}: {key.hex()}")
        if drift:
            report.found(Kind.COUNTER_DRIFT, f"{where}: off by {_shown(drift)}")
            self._drifted.add((index, shard.number))
        if drift or any(keys for _, keys in shard.damage()):
            self._damaged.append((index, shard.number))

    async def _mend(
        self, index: InstanceIndex, shard: _Shard, counters: Mapping[bytes, int]
    ) -> None:
        """One commit: what is broken goes, and the counters are what is left."""
        scope = self._scope
        broken = scope.broken.get(index.uid, set())
        removes = scope.options.unreadable and not scope.is_excess(
            len(broken), self._states.get(index.uid, 0) + len(broken)
        )
        if not removes and (shard.broken or shard.unreadable_trash):
            # What the counters should be cannot be told while records do not read.
            return
        writes: list[Write] = []
        gone = shard.orphans | shard.broken
        trash = shard.lost_trash | shard.unreadable_trash
        for extent_id in gone:
            writes += [Write(Table.STATES, extent_id, None), Write(Table.DUE, extent_id, None)]
            for key in await self._chunks(index, shard, extent_id):
                writes.append(Write(Table.EXTENTS, key, None))
        for key in trash:
            shard.hold(shard.trash, key, None)
            writes.append(Write(Table.TRASH, key, None))
        drift = _difference(shard.expected, counters)
        if not writes and not drift:
            return
        for extent_id in gone:
            index.hide(extent_id)
        outcome = await index.shards.commit_alone(
            shard.number, Mutation(writes=writes, counters=drift)
        )
        if outcome is not Outcome.APPLIED:
            return
        for extent_id in gone:
            index.book.forget(extent_id)
            index.hide(extent_id)
        for key in trash:
            index.trash.pop(key, None)
        report = scope.report
        for kind, keys in shard.damage():
            report.fixed(kind, len(keys))
        if (index, shard.number) in self._drifted:
            report.fixed(Kind.COUNTER_DRIFT)


def _difference(expected: Mapping[bytes, int], counters: Mapping[bytes, int]) -> dict[bytes, int]:
    """What to add to the stored counters; those of other kinds stay as they are."""
    keys = expected.keys() | {key for key in counters if key[:1] in _LETTERS}
    drift = {key: expected.get(key, 0) - counters.get(key, 0) for key in keys}
    return {key: value for key, value in drift.items() if value}


def _shown(drift: dict[bytes, int]) -> str:
    cells = from_counters(drift)
    return ", ".join(f"{name} {delta}" for name, delta in cells.items())
