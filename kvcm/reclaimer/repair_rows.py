"""Rows that lead nowhere. They are harmless, and cost a read each time their key is looked up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from kvcm.core.errors import CorruptRecord, KvcmError
from kvcm.core.limits import ROW_REFS_MAX
from kvcm.metaindex import records
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.reading import RowRefs
from kvcm.metaindex.records import Phase
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Mutation, Table
from kvcm.reclaimer.repair_extents import commit_rows, live_refs, replace_row
from kvcm.reclaimer.repair_report import Kind
from kvcm.reclaimer.repair_scope import FINDINGS_MAX, Lost, Scope, get_many, read_extents

_PAGE = 256
_FIX_AT_ONCE = 256

_Row = tuple[bytes, bytes]
"""A row's key and its value."""


class RowCheck:
    """Rows of all instances in scope.

    A reference to an extent that is over is no damage: it goes when the extent is forgotten.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._odd: dict[InstanceIndex, list[tuple[int, bytes]]] = {}

    async def check(self, index: InstanceIndex) -> AsyncGenerator[int, None]:
        """Look at every row; yields rows read.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        for number in range(index.shard_count):
            if not self._scope.is_live(index):
                return
            await index.shards.ensure((number,))
            shard_id = index.shards.id(number)
            async for page in index.shared.store.scan(shard_id, Table.ROWS, page=_PAGE):
                odd = await self._odd_rows(index, number, page)
                if odd:
                    await self._note(index, number, list(odd))
                yield len(page)

    async def _note(self, index: InstanceIndex, number: int, rows: Sequence[_Row]) -> None:
        """Look once more: a row may have been written, or its extent forgotten, meanwhile."""
        keys = [key for key, _ in rows]
        (values,) = await get_many(index, [(number, keys)], Table.ROWS)
        present = [(k, v) for k, v in zip(keys, values, strict=True) if v is not None]
        kinds = await self._odd_rows(index, number, present)
        mine = self._odd.setdefault(index, [])
        for (key, _), kind in kinds.items():
            block = int.from_bytes(key, "little", signed=True)
            self._scope.report.found(kind, f"instance {index.uid} shard {number} block {block}")
            if len(mine) < FINDINGS_MAX:
                mine.append((number, key))

    async def _odd_rows(
        self, index: InstanceIndex, number: int, rows: Sequence[_Row]
    ) -> dict[_Row, Kind]:
        kept = await self._kept(index, number, rows)
        odd: dict[_Row, Kind] = {}
        for row in rows:
            refs = _parse(row)
            if refs is None or not _belongs(index, number, row[0]):
                odd[row] = Kind.UNREADABLE_ROW
            elif kept[row] != refs or len(refs) > ROW_REFS_MAX:
                odd[row] = Kind.STALE_ROW
        return odd

    async def _kept(
        self, index: InstanceIndex, number: int, rows: Sequence[_Row]
    ) -> Mapping[_Row, RowRefs]:
        """What of each row is to stay."""
        turn = self._scope.turn()
        parsed = {row: _parse(row) or [] for row in rows}
        live = {e for refs in parsed.values() for e, _ in live_refs(index, refs)}
        keys = await self._keys_of(index, live)
        entries = index.book.entries
        unknown = {e for refs in parsed.values() for e, _ in refs if e not in entries}
        absent = await self._absent(index, unknown)
        kept: dict[_Row, RowRefs] = {}
        for row, refs in parsed.items():
            if not _belongs(index, number, row[0]):
                kept[row] = []
                continue
            kept[row] = [
                r for r in refs if r[0] not in absent and self._stays(index, row[0], r, keys)
            ]
            if len(kept[row]) > ROW_REFS_MAX:
                kept[row] = live_refs(index, kept[row])[-ROW_REFS_MAX:]
            if turn.is_over():
                await turn.give()
        return kept

    def _stays(
        self, index: InstanceIndex, key: bytes, ref: tuple[bytes, int], keys: Mapping[bytes, bytes]
    ) -> bool:
        extent_id, position = ref
        if self._gives_up(index, extent_id):
            return False
        entry = index.book.entries.get(extent_id)
        if (
            entry is None
            or entry.phase not in (Phase.OPEN, Phase.SETTLED)
            or entry.trim < index.trim
        ):
            return True
        raw = keys.get(extent_id)
        return raw is None or raw[8 * position : 8 * position + 8] == key

    async def _absent(self, index: InstanceIndex, ids: set[bytes]) -> set[bytes]:
        """Those of which no record is left."""
        found = await read_extents(index, ids)
        return {extent_id for extent_id, answer in found.items() if answer is Lost.ABSENT}

    def _gives_up(self, index: InstanceIndex, extent_id: bytes) -> bool:
        is_broken = extent_id in self._scope.broken.get(index.uid, ())
        return is_broken and self._scope.options.unreadable

    async def _keys_of(self, index: InstanceIndex, ids: set[bytes]) -> dict[bytes, bytes]:
        """The keys of extents; those that are gone meanwhile are left out."""
        out: dict[bytes, bytes] = {}
        missing: list[bytes] = []
        for extent_id in ids:
            view = index.shared.cache.views.get(extent_id)
            if view is not None:
                out[extent_id] = view.extent.keys
            else:
                missing.append(extent_id)
        for extent_id, found in (await read_extents(index, missing)).items():
            if not isinstance(found, Lost):
                out[extent_id] = found[0].keys
        return out

    async def fix(self) -> AsyncGenerator[int, None]:
        """Mend what was found; yields rows changed."""
        for index, odd in self._odd.items():
            for at in range(0, len(odd), _FIX_AT_ONCE):
                if not self._scope.is_live(index):
                    break
                part = odd[at : at + _FIX_AT_ONCE]
                try:
                    await self._mend(index, part)
                except KvcmError as error:
                    self._scope.report.error(f"rows of instance {index.uid}: {error}")
                yield len(part)

    async def _mend(self, index: InstanceIndex, rows: Sequence[tuple[int, bytes]]) -> None:
        by_shard: dict[int, list[bytes]] = {}
        for number, key in rows:
            by_shard.setdefault(number, []).append(key)
        for number, keys in by_shard.items():
            (values,) = await get_many(index, [(number, keys)], Table.ROWS)
            present = [(k, v) for k, v in zip(keys, values, strict=True) if v is not None]
            odd = await self._odd_rows(index, number, present)
            kept = await self._kept(index, number, list(odd))
            for kind in (Kind.STALE_ROW, Kind.UNREADABLE_ROW):
                if kind is Kind.UNREADABLE_ROW and not self._scope.options.unreadable:
                    continue
                mutations: list[Mutation] = [
                    replace_row(row[0], row[1], kept[row])
                    for row, is_ in odd.items()
                    if is_ is kind
                ]
                if mutations:
                    self._scope.report.fixed(kind, await commit_rows(index, {number: mutations}))


def _parse(row: _Row) -> RowRefs | None:
    try:
        return records.decode_row(row[1])
    except CorruptRecord:
        return None


def _belongs(index: InstanceIndex, number: int, key: bytes) -> bool:
    if len(key) != 8:
        return False
    return shard_of(int.from_bytes(key, "little", signed=True), index.shard_count) == number
