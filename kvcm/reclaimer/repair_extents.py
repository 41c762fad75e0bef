"""Published extents: their files are there, every block of theirs is named by a row, and the dead
bytes they record are those their files have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

from kvcm.core.errors import KvcmError
from kvcm.core.keys import array_of
from kvcm.core.limits import ROW_REFS_MAX
from kvcm.metaindex import bits, records
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import Decide, InstanceIndex
from kvcm.metaindex.layout import Layout, spec_positions
from kvcm.metaindex.reading import RowRefs
from kvcm.metaindex.records import Extent, Phase, State
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Compare, Mutation, Outcome, Table, Write
from kvcm.reclaimer.repair_report import Kind
from kvcm.reclaimer.repair_scope import FINDINGS_MAX, Found, Lost, Scope, read_extents

_EXTENTS_AT_ONCE = 32
_ROWS_AT_ONCE = 512


@dataclass(slots=True)
class _Findings:
    """Of one instance, by extent."""

    missing: dict[bytes, float] = field(default_factory=dict)
    """When a file was first seen to be gone (monotonic)."""
    unnamed: dict[bytes, int] = field(default_factory=dict)
    """Positions that no row names."""
    dead: list[bytes] = field(default_factory=list)


class ExtentCheck:
    """Settled extents of all instances in scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._found: dict[InstanceIndex, _Findings] = {}

    async def check(self, index: InstanceIndex) -> AsyncGenerator[int, None]:
        """Look at every settled extent; yields records read.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        entries = index.book.entries
        ids = list(entries)
        for at in range(0, len(ids), _EXTENTS_AT_ONCE):
            if not self._scope.is_live(index):
                return
            part = ids[at : at + _EXTENTS_AT_ONCE]
            part = [e for e in part if e in entries and entries[e].phase is Phase.SETTLED]
            if not part:
                await asyncio.sleep(0)
                continue
            found = await self._settled(index, part)
            await self._files(index, found)
            await self._rows(index, found)
            yield len(part)

    async def _settled(self, index: InstanceIndex, ids: Iterable[bytes]) -> list[Found]:
        """Those that serve now."""
        answers = (await read_extents(index, ids)).values()
        found = [a for a in answers if not isinstance(a, Lost)]
        return [(e, s) for e, s in found if s.phase is Phase.SETTLED and e.trim >= index.trim]

    # ---- files -------------------------------------------------------------------------------

    async def _files(self, index: InstanceIndex, found: Sequence[Found]) -> None:
        scope, turn = self._scope, self._scope.turn()
        layouts: dict[bytes, Layout] = {}
        for extent, state in found:
            layout = index.layout(extent)
            if layout is not None:
                layouts[extent.extent_id] = layout
                dead = layout.waste(state.serving).dead
                if dead != state.dead:
                    self._note_dead(index, extent, state, dead)
            if turn.is_over():
                await turn.give()
        by_storage: dict[str, list[Found]] = {}
        for extent, state in found:
            if extent.extent_id in layouts:
                by_storage.setdefault(extent.storage, []).append((extent, state))
        for storage, those in by_storage.items():
            if storage not in scope.storages() or not scope.ports.available(storage):
                continue
            gone = await self._gone(index, storage, those, layouts)
            scope.report.storage(storage).needed += sum(
                len(layouts[e.extent_id].objects)
                - layouts[e.extent_id].waste(s.serving).gone.bit_count()
                for e, s in those
            )
            if gone:
                await self._note_missing(index, storage, set(gone))

    async def _gone(
        self,
        index: InstanceIndex,
        storage: str,
        found: Sequence[Found],
        layouts: dict[bytes, Layout],
    ) -> dict[bytes, int]:
        """By extent the objects that are missing or too short, as a bit set."""
        backend = self._scope.ports.backend(storage)
        if backend is None:
            return {}
        asked: list[tuple[bytes, int]] = []
        names: list[str] = []
        sizes: list[int] = []
        for extent, state in found:
            for i, size in needed_sizes(extent, state, layouts[extent.extent_id]).items():
                asked.append((extent.extent_id, i))
                names.append(layouts[extent.extent_id].objects[i].name)
                sizes.append(size)
        gone: dict[bytes, int] = {}
        for (extent_id, i), is_there in zip(asked, await backend.exists(names, sizes), strict=True):
            if not is_there:
                gone[extent_id] = gone.get(extent_id, 0) | 1 << i
        return gone

    async def _note_missing(self, index: InstanceIndex, storage: str, ids: set[bytes]) -> None:
        """Look once more: it may have been evicted, and deleted, since its record was read."""
        again = await self._settled(index, ids)
        layouts = {e.extent_id: layout for e, _ in again if (layout := index.layout(e)) is not None}
        those = [(e, s) for e, s in again if e.extent_id in layouts]
        report, now = self._scope.report, self._scope.clock.monotonic()
        for extent_id, objects in (await self._gone(index, storage, those, layouts)).items():
            for i in bits.positions(objects):
                name = layouts[extent_id].objects[i].name
                report.found(Kind.MISSING_FILE, name, size=layouts[extent_id].objects[i].size)
                report.storage(storage).missing += 1
            if len(self._of(index).missing) < FINDINGS_MAX:
                self._of(index).missing[extent_id] = now

    def _note_dead(self, index: InstanceIndex, extent: Extent, state: State, dead: int) -> None:
        self._scope.report.found(
            Kind.DEAD_BYTES,
            f"instance {index.uid} extent {extent.extent_id.hex()}: "
            f"{state.dead} recorded, {dead} counted",
        )
        if len(self._of(index).dead) < FINDINGS_MAX:
            self._of(index).dead.append(extent.extent_id)

    def _of(self, index: InstanceIndex) -> _Findings:
        return self._found.setdefault(index, _Findings())

    # ---- rows --------------------------------------------------------------------------------

    async def _rows(self, index: InstanceIndex, found: Sequence[Found]) -> None:
        suspects: dict[bytes, int] = {}
        for extent, state in found:
            unnamed = await self._unnamed(index, extent, state.serving)
            if unnamed:
                suspects[extent.extent_id] = unnamed
        for extent, state in await self._settled(index, suspects):
            # Evicted and forgotten meanwhile, its rows went with it.
            lost = suspects[extent.extent_id] & state.serving
            if not lost:
                continue
            keys = array_of(extent.keys)
            for position in bits.positions(lost):
                self._scope.report.found(
                    Kind.MISSING_ROW, f"instance {index.uid} block {keys[position]}"
                )
            if len(self._of(index).unnamed) < FINDINGS_MAX:
                self._of(index).unnamed[extent.extent_id] = lost

    async def _unnamed(self, index: InstanceIndex, extent: Extent, positions: int) -> int:
        keys = array_of(extent.keys)
        wanted = list(bits.positions(positions))
        lost, turn = 0, self._scope.turn()
        for at in range(0, len(wanted), _ROWS_AT_ONCE):
            part = wanted[at : at + _ROWS_AT_ONCE]
            values = await index.row_values([keys[p] for p in part])
            for position, value in zip(part, values, strict=True):
                if value is None or records.encode_ref(extent.extent_id, position) not in value:
                    lost |= 1 << position
            if turn.is_over():
                await turn.give()
        return lost

    # ---- mending -----------------------------------------------------------------------------

    async def fix(self) -> AsyncGenerator[int, None]:
        """Mend what was found; yields changes made, 0 while it waits."""
        for index, found in self._found.items():
            for work in (self._fix_dead, self._fix_missing, self._fix_rows):
                async for count in work(index, found):
                    yield count

    async def _fix_dead(self, index: InstanceIndex, found: _Findings) -> AsyncGenerator[int, None]:
        for extent_id in found.dead:
            try:
                change = await index.change(extent_id, lambda _e, s: _restated(index, s))
            except KvcmError as error:
                self._scope.report.error(f"extent {extent_id.hex()}: {error}")
                continue
            self._scope.report.fixed(Kind.DEAD_BYTES, int(change is not None and change.applied))
            yield 1

    async def _fix_missing(
        self, index: InstanceIndex, found: _Findings
    ) -> AsyncGenerator[int, None]:
        scope = self._scope
        for extent_id, seen in found.missing.items():
            if self._is_stopped(index, extent_id):
                continue
            # A network file system may show a new file late: it has to stay away for a while.
            while scope.clock.monotonic() < seen + scope.grace_s():
                yield 0
            try:
                await self._give_up(index, extent_id)
            except KvcmError as error:
                scope.report.error(f"extent {extent_id.hex()}: {error}")
            yield 1

    def _is_stopped(self, index: InstanceIndex, extent_id: bytes) -> bool:
        """A mount that is not there looks like a storage that lost everything."""
        entry = index.book.entries.get(extent_id)
        if entry is None:
            return True
        count = self._scope.report.storage(entry.storage)
        if not self._scope.is_excess(count.missing, count.needed):
            return False
        why = f"{count.missing} of {count.needed} needed files are missing"
        if why not in count.stopped:
            count.stopped.append(why)
        return True

    async def _give_up(self, index: InstanceIndex, extent_id: bytes) -> None:
        """Blocks in files that are still missing become misses, as if they were removed."""
        scope = self._scope
        settled = await self._settled(index, [extent_id]) if scope.is_live(index) else []
        for extent, state in settled:
            layout = index.layout(extent)
            if layout is None or not scope.ports.available(extent.storage):
                continue
            layouts = {extent_id: layout}
            gone = (await self._gone(index, extent.storage, [(extent, state)], layouts)).get(
                extent_id, 0
            )
            blocks = 0
            for i in bits.positions(gone):
                blocks |= layout.members[i]
            change = await index.change(extent_id, _without(index, blocks), reason=Reason.REPAIRED)
            if change is not None and change.applied:
                scope.report.fixed(Kind.MISSING_FILE, gone.bit_count())

    async def _fix_rows(self, index: InstanceIndex, found: _Findings) -> AsyncGenerator[int, None]:
        for extent_id in found.unnamed:
            if not self._scope.is_live(index):
                return
            try:
                for extent, state in await self._settled(index, [extent_id]):
                    lost = await self._unnamed(index, extent, state.serving)
                    await self._name(index, extent, list(bits.positions(lost)))
            except KvcmError as error:
                self._scope.report.error(f"extent {extent_id.hex()}: {error}")
            yield 1

    async def _name(self, index: InstanceIndex, extent: Extent, positions: list[int]) -> None:
        """Put rows again. A row that a grant changes meanwhile is left to the next run."""
        keys = array_of(extent.keys)
        for at in range(0, len(positions), _ROWS_AT_ONCE):
            part = positions[at : at + _ROWS_AT_ONCE]
            values = await index.row_values([keys[p] for p in part])
            groups: dict[int, list[Mutation]] = {}
            full = 0
            for position, value in zip(part, values, strict=True):
                refs = live_refs(index, index.refs_of(value))
                if len(refs) >= ROW_REFS_MAX:
                    full |= 1 << position
                    continue
                raw = keys[position].to_bytes(8, "little", signed=True)
                new = [*refs, (extent.extent_id, position)]
                groups.setdefault(shard_of(keys[position], index.shard_count), []).append(
                    replace_row(raw, value, new)
                )
            done = await commit_rows(index, groups)
            if full:
                # No row can name them: they are as good as gone.
                await index.change(extent.extent_id, _without(index, full), reason=Reason.REPAIRED)
            self._scope.report.fixed(Kind.MISSING_ROW, done + full.bit_count())


def needed_sizes(extent: Extent, state: State, layout: Layout) -> dict[int, int]:
    """For each object that holds a serving block the bytes it must have, at least."""
    carried: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    per_spec = spec_positions(extent)
    for i, (obj, members) in enumerate(zip(layout.objects, layout.members, strict=True)):
        live = members & state.serving
        if not live:
            continue
        if obj.spec not in carried:
            carried[obj.spec] = list(bits.positions(per_spec[obj.spec]))
        slots = carried[obj.spec][obj.first : obj.first + obj.count]
        last = max(slot for slot, position in enumerate(slots) if live >> position & 1)
        sizes[i] = (last + 1) * (obj.size // obj.count)
    return sizes


def live_refs(index: InstanceIndex, refs: RowRefs) -> RowRefs:
    """The references to extents that hold a place."""
    entries = index.book.entries
    return [
        (e, p)
        for e, p in refs
        if (entry := entries.get(e)) is not None
        and entry.phase in (Phase.OPEN, Phase.SETTLED)
        and entry.trim >= index.trim
    ]


def replace_row(raw: bytes, value: bytes | None, refs: RowRefs) -> Mutation:
    """Put a row's references in place of exactly ``value``; none removes it."""
    new = b"".join(records.encode_ref(e, p) for e, p in refs) or None
    return Mutation(
        writes=[Write(Table.ROWS, raw, new)],
        compare=[Compare(Table.ROWS, raw, value, whole=True)],
    )


async def commit_rows(index: InstanceIndex, groups: dict[int, list[Mutation]]) -> int:
    """Commit mutations of ``replace_row`` by shard; how many applied.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: the store; some may be applied.
    """
    if not groups:
        return 0
    try:
        outcomes = await index.shards.commit(list(groups.items()))
    finally:
        index.row_generation += 1
        for mutations in groups.values():
            for mutation in mutations:
                raw = mutation.writes[0][1]
                if len(raw) == 8:
                    index.rows.pop(int.from_bytes(raw, "little", signed=True), None)
    return sum(outcome is Outcome.APPLIED for part in outcomes for outcome in part)


def _restated(index: InstanceIndex, state: State) -> State | None:
    """The same state once more: committing it counts the dead bytes anew."""
    return state.next(index.new_version()) if state.phase is Phase.SETTLED else None


def _without(index: InstanceIndex, blocks: int) -> Decide:
    """A decision that takes some blocks out of a settled extent; what it serves none of stays."""

    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is not Phase.SETTLED or not state.serving & blocks:
            return None
        serving = state.serving & ~blocks
        phase = Phase.SETTLED if serving else Phase.RETIRED
        return state.next(index.new_version(), phase=phase, serving=serving)

    return decide
