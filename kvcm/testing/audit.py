"""Checks what a stopped manager left behind: records, counters, rows and files must agree.

The invariants of design.md §9 that can be seen from outside: no address is named twice, counters
equal a full scan, every published block can be found and its bytes are there, every file has an
owner. ``audit_data_dir`` is the whole of it; the parts serve tests that hold the stores themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import CorruptRecord, KvcmError
from kvcm.core.limits import HOME_SHARDS
from kvcm.core.storage import MARKER
from kvcm.core.types import Instance, StorageConfig
from kvcm.metaindex import bits, records
from kvcm.metaindex.answers import owner_of
from kvcm.metaindex.ids import EXTENT_ID_BYTES, home_shard
from kvcm.metaindex.layout import Layout, held_by, live_blocks, spec_positions, spec_slots
from kvcm.metaindex.ledger import Delta, from_counters
from kvcm.metaindex.records import Extent, Phase, State, Trash
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Fence, KVStore, ShardId, Table
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.registry.registry import Registry
from kvcm.registry.view import RegistryView
from kvcm.server.datadir import DataDir
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend
from kvcm.storage_backends.posix import root_of

PROBE_PREFIX = ".kvcm-probe-"
"""A probe that was killed leaves its file at the root; the blocks' folders lie deeper."""

Cells = dict[str, Delta]
"""Sums by storage."""


@dataclass(slots=True)
class StoredInstance:
    """All records of one instance, by a full scan; ``problems`` says what does not parse."""

    uid: str
    extents: dict[bytes, tuple[Extent, State]] = field(default_factory=dict)
    trash: list[Trash] = field(default_factory=list)
    rows: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)
    held: dict[int, Cells] = field(default_factory=dict)
    """By shard, what its extents and its trash amount to; zeros left out."""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class AuditReport:
    """What was found; ``problems`` is empty when all is well.

    ``open``, ``overdue`` (open ones past their time-out by the wall clock), ``settled`` and
    ``over`` count extents; ``unowned`` and ``missing`` name files.
    """

    problems: list[str] = field(default_factory=list)
    instances: int = 0
    open: int = 0
    overdue: int = 0
    settled: int = 0
    over: int = 0
    trash: int = 0
    serving_blocks: int = 0
    rows: int = 0
    stale_hints: int = 0
    files: int = 0
    left_probes: int = 0
    unowned: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def add_to(cells: Cells, name: str, delta: Delta) -> None:
    """Add to a storage's sum; a cell that returns to zero goes."""
    total = cells.get(name, Delta()) + delta
    if total == Delta():
        cells.pop(name, None)
    else:
        cells[name] = total


async def read_instance(store: KVStore, uid: str, shard_count: int) -> StoredInstance:
    """Scan every table of every shard of an instance, past any manager.

    Raises:
        Unavailable: the store.
    """
    found = StoredInstance(uid)
    for number in range(shard_count):
        await _Shard(store, ShardId(uid.encode(), number), found, shard_count).read()
    return found


class _Shard:
    def __init__(
        self, store: KVStore, shard: ShardId, found: StoredInstance, shard_count: int
    ) -> None:
        self._store = store
        self._shard = shard
        self._found = found
        self._shard_count = shard_count
        self._held: Cells = {}

    async def read(self) -> None:
        await self._extents()
        for key, value in (await self._table(Table.TRASH)).items():
            try:
                trash = records.decode_trash(key, value)
            except CorruptRecord as error:
                self._say(str(error))
                continue
            self._found.trash.append(trash)
            add_to(self._held, trash.storage, Delta(trash_bytes=trash.counted))
        for key, value in (await self._table(Table.ROWS)).items():
            self._row(key, value)
        if self._held:
            self._found.held[self._shard.number] = self._held

    async def _table(self, table: Table) -> dict[bytes, bytes]:
        return {k: v async for page in self._store.scan(self._shard, table) for k, v in page}

    async def _extents(self) -> None:
        chunks = await self._table(Table.EXTENTS)
        states = await self._table(Table.STATES)
        mine: set[bytes] = set()
        for extent_id, value in states.items():
            mine.add(extent_id)
            if self._shard.number >= HOME_SHARDS or home_shard(extent_id) != self._shard.number:
                self._say(f"extent {extent_id.hex()} does not belong here")
            try:
                head, count = records.decode_header(
                    extent_id, chunks.get(records.chunk_key(extent_id, 0), b"")
                )
                rest = [
                    chunks.get(records.chunk_key(extent_id, i))
                    for i in range(1, records.chunk_count(count))
                ]
                extent = records.join_chunks(head, count, rest)
                state = records.decode_state(extent_id, value)
            except CorruptRecord as error:
                self._say(str(error))
                continue
            self._found.extents[extent_id] = (extent, state)
            add_to(self._held, extent.storage, held_by(extent, state))
        for extent_id in {k[:EXTENT_ID_BYTES] for k in chunks} - mine:
            self._say(f"extent {extent_id.hex()} has no state")
        for extent_id in (await self._table(Table.DUE)).keys() - mine:
            self._say(f"extent {extent_id.hex()} has a stamp and no state")

    def _row(self, key: bytes, value: bytes) -> None:
        block = int.from_bytes(key, "little", signed=True)
        if len(key) != 8 or shard_of(block, self._shard_count) != self._shard.number:
            self._say(f"row {key.hex()} does not belong here")
            return
        try:
            self._found.rows[block] = records.decode_row(value)
        except CorruptRecord as error:
            self._say(f"row of block {block}: {error}")

    def _say(self, what: str) -> None:
        where = f"instance {self._found.uid} shard {self._shard.number}"
        self._found.problems.append(f"{where}: {what}")


def counter_problems(stored: StoredInstance, counters: Mapping[int, Cells]) -> list[str]:
    """Where a shard's counters (by shard, zeros left out) are not what its records amount to."""
    return [
        f"instance {stored.uid} shard {number}: counters say {counters.get(number, {})}, "
        f"its records {stored.held.get(number, {})}"
        for number in sorted({*counters, *stored.held})
        if counters.get(number, {}) != stored.held.get(number, {})
    ]


def cells_of(counters: Mapping[bytes, int]) -> Cells:
    """Stored counters as sums by storage, zeros left out."""
    return {name: delta for name, delta in from_counters(counters).items() if delta != Delta()}


async def audit_data_dir(data_dir: Path, *, after_crash: bool = False) -> AuditReport:
    """Audit a data directory of the default layout (SQLite registry, RocksDB index).

    Args:
        after_crash: as of ``audit``.

    Raises:
        ConfigError: a manager holds it, or it cannot be opened.
    """
    held = DataDir(data_dir)
    try:
        store = RocksStore(data_dir / "index")
        await store.open()
        try:
            url = f"sqlite:///{data_dir}/registry.db"
            return await audit(url, store, after_crash=after_crash)
        finally:
            await store.close()
    finally:
        held.release()


async def audit(
    registry_url: str, store: KVStore, *, clock: Clock | None = None, after_crash: bool = False
) -> AuditReport:
    """Audit a registry, an open index store and the files of all storages.

    It takes a leadership epoch and claims every shard, so a manager that still runs on them is
    fenced off rather than read half-way.

    Args:
        after_crash: the manager was killed and not started since: an open extent may lack rows.

    Raises:
        ConfigError, Unavailable: a store.
    """
    clock = clock or SystemClock()
    registry = Registry(registry_url, clock)
    await registry.open()
    try:
        auditor = _Auditor(registry.view, store, await registry.next_epoch(), clock, after_crash)
        return await auditor.run()
    finally:
        await registry.close()


class _Auditor:
    def __init__(
        self, view: RegistryView, store: KVStore, epoch: int, clock: Clock, after_crash: bool
    ) -> None:
        self._view = view
        self._store = store
        self._fence = Fence(epoch, 1)
        self._now_ms = clock.now() * 1000
        self._after_crash = after_crash
        self._backends = {n: build_backend(c, clock) for n, c in view.storages.items()}
        self._files = files_of(view.storages.values(), view.cluster_uid)
        self._named: dict[str, str] = {}
        self._owned: set[str] = set()
        self._report = AuditReport()

    async def run(self) -> AuditReport:
        report = self._report
        live = list(self._view.instances.values())
        for instance in [*live, *self._view.closing]:
            report.instances += 1
            await self._instance(instance, closing=instance in self._view.closing)
        known = {i.uid.encode() for i in [*live, *self._view.closing]}
        for space in set(await self._store.spaces()) - known:
            report.problems.append(f"records of an unknown instance {space!r}")
        self._check_files()
        return report

    async def _instance(self, instance: Instance, *, closing: bool) -> None:
        stored = await read_instance(self._store, instance.uid, instance.shard_count)
        problems = self._report.problems
        problems += stored.problems
        problems += counter_problems(stored, await self._counters(instance))
        trash: dict[bytes, list[Trash]] = {}
        for entry in stored.trash:
            trash.setdefault(entry.extent_id, []).append(entry)
        for extent_id in trash.keys() - stored.extents.keys():
            problems.append(f"trash of an unknown extent {extent_id.hex()}")
        self._report.trash += len(stored.trash)
        for extent_id, (extent, state) in stored.extents.items():
            self._count(extent, state)
            self._extent(instance, extent, state, trash.get(extent_id, []))
        if not closing:
            self._rows(instance, stored)

    async def _counters(self, instance: Instance) -> dict[int, Cells]:
        numbers = range(instance.shard_count)
        shards = [ShardId(instance.uid.encode(), number) for number in numbers]
        counters: dict[int, Cells] = {}
        for number, claim in zip(
            numbers, await self._store.claim(shards, self._fence), strict=True
        ):
            if isinstance(claim, Exception):
                self._report.problems.append(f"instance {instance.uid} shard {number}: {claim}")
            elif cells := cells_of(claim.counters):
                counters[number] = cells
        return counters

    def _count(self, extent: Extent, state: State) -> None:
        report = self._report
        if state.phase is Phase.OPEN:
            report.open += 1
            report.overdue += extent.started_ms + extent.timeout_s * 1000 < self._now_ms
        elif state.phase is Phase.SETTLED:
            report.settled += 1
            report.serving_blocks += state.serving.bit_count()
        else:
            report.over += 1

    def _extent(
        self, instance: Instance, extent: Extent, state: State, trash: Sequence[Trash]
    ) -> None:
        """Addresses, dead bytes, trash and files of one extent."""
        backend = self._backends.get(extent.storage)
        if backend is None:
            return
        name = f"extent {extent.extent_id.hex()}"
        try:
            layout = self._layout(backend, instance, extent)
        except KvcmError as error:
            self._report.problems.append(f"{name}: {error}")
            return
        problems = self._report.problems
        pending = 0
        for entry in trash:
            pending |= entry.objects
            size = layout.size_of(entry.objects & bits.ones(len(layout.objects)))
            if entry.size != size and not entry.again:
                problems.append(f"{name}: trash of {entry.size} bytes, its objects have {size}")
        for i, obj in enumerate(layout.objects):
            other = self._named.setdefault(obj.name, name)
            if other is not name:
                problems.append(f"{name} and {other} name the same address {obj.name}")
            if pending >> i & 1:
                self._owned.add(obj.name)
        if pending >> len(layout.objects):
            problems.append(f"{name}: its trash names objects that it does not have")
        live = live_blocks(extent, state)
        waste = layout.waste(live)
        if live:
            self._owned |= {o.name for i, o in enumerate(layout.objects) if not waste.gone >> i & 1}
        if pending & ~waste.gone:
            problems.append(f"{name}: an object in the trash still holds a live block")
        if state.dead != waste.dead:
            problems.append(f"{name}: {state.dead} dead bytes recorded, {waste.dead} counted")
        if state.phase is Phase.SETTLED:
            self._missing(extent, state, layout)

    def _layout(self, backend: DataStorageBackend, instance: Instance, extent: Extent) -> Layout:
        owner = owner_of(self._view.cluster_uid, instance.uid, extent)
        return Layout.of(extent, backend.objects(extent.descriptor, owner, spec_slots(extent)))

    def _missing(self, extent: Extent, state: State, layout: Layout) -> None:
        """Published slots whose file is not there, or ends before them."""
        carried = [list(bits.positions(p)) for p in spec_positions(extent)]
        for obj in layout.objects:
            slots = carried[obj.spec][obj.first : obj.first + obj.count]
            last = max((i for i, p in enumerate(slots) if state.serving >> p & 1), default=-1)
            needed = (last + 1) * (obj.size // obj.count)
            size = self._files.get(obj.name, -1)
            if last >= 0 and size < needed:
                what = "is not there" if size < 0 else f"has {size} of {needed} bytes"
                self._report.missing.append(f"{obj.name} {what}")

    def _rows(self, instance: Instance, stored: StoredInstance) -> None:
        report = self._report
        named: dict[bytes, int] = {}
        for key, refs in stored.rows.items():
            report.rows += 1
            raw = key.to_bytes(8, "little", signed=True)
            for extent_id, position in refs:
                extent, state = stored.extents.get(extent_id, (None, None))
                if extent is None or state is None:
                    report.stale_hints += 1
                elif extent.keys[8 * position : 8 * position + 8] != raw:
                    report.problems.append(
                        f"row of block {key} names another block: extent {extent_id.hex()}, "
                        f"position {position}"
                    )
                elif live_blocks(extent, state) >> position & 1 and extent.trim >= instance.trim:
                    named[extent_id] = named.get(extent_id, 0) | 1 << position
                else:
                    report.stale_hints += 1
        for extent_id, (extent, state) in stored.extents.items():
            if extent.trim < instance.trim:
                continue
            if self._after_crash and state.phase is Phase.OPEN:
                continue
            lost = live_blocks(extent, state) & ~named.get(extent_id, 0)
            if lost:
                report.problems.append(
                    f"extent {extent_id.hex()} ({state.phase.name}): no row names its positions "
                    f"{list(bits.positions(lost))[:8]}"
                )

    def _check_files(self) -> None:
        report = self._report
        for path in self._files:
            if Path(path).name.startswith(PROBE_PREFIX):
                report.left_probes += 1
            else:
                report.files += 1
                if path not in self._owned:
                    report.unowned.append(path)
        report.problems += [f"file without an owner: {path}" for path in report.unowned]
        report.problems += [f"published bytes: {what}" for what in report.missing]


def files_of(storages: Iterable[StorageConfig], cluster_uid: str) -> dict[str, int]:
    """Path → size of every file below the storages' roots, without their markers and the folders
    of other clusters."""
    found: dict[str, int] = {}
    for root in {root_of(config) for config in storages}:
        for folder, inner, names in os.walk(root):
            if folder == root:
                inner[:] = [name for name in inner if name == cluster_uid]
                names = [name for name in names if name != MARKER]
            found |= {f"{folder}/{n}": os.lstat(f"{folder}/{n}").st_size for n in names}
    return found
