"""Checks of the space test: a full scan of records and files against the ledger, and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcm.core import quota
from kvcm.core.types import StorageType
from kvcm.metaindex.layout import live_blocks
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.records import Phase
from kvcm.storage_backends.posix import root_of
from kvcm.testing.audit import StoredInstance
from tests.cache.harness import Harness, clean
from tests.reclaimer.space_model import StorageFaults, sizes_of


class Limits:
    """Hard limits: usage is never above one, unless the limit was lowered below it; then it only
    falls."""

    def __init__(self, h: Harness) -> None:
        self._h = h
        self._last: dict[tuple[str, ...], int] = {}
        self.full = 0
        """Times that something was within a block of its limit, so that one more could show."""

    def check(self) -> None:
        """All limits, as the ledger stands."""
        ledger, view = self._h.manager.shared.ledger, self._h.registry.view
        for name, of in view.groups.items():
            self._one(("group", name), ledger.group(name).counted, quota.group_capacity(of))
            for kind in (StorageType.NFS, StorageType.HF3FS):
                used = ledger.group_type(name, kind).counted
                self._one(("type", name, kind.name), used, quota.type_capacity(of, kind))
        for index in self._h.manager.index.by_uid.values():
            group = view.groups.get(index.group)
            if group is not None:
                used = ledger.instance(index.uid).blocks
                self._one(("keys", index.uid), used, quota.key_limit(group))
        for name, config in view.storages.items():
            held = ledger.storage(name)
            used = held.counted + held.trash_bytes
            self._one(("storage", name), used, quota.storage_capacity(config))

    def _one(self, what: tuple[str, ...], used: int, capacity: int) -> None:
        last = self._last.get(what, 0)
        assert used <= capacity or used <= last, f"{what}: {used} of {capacity}, before {last}"
        self._last[what] = used
        self.full += used == capacity

    def below_marks(self) -> list[str]:
        """What is above its high mark now."""
        h, found = self._h, []
        ledger, view = h.manager.shared.ledger, h.registry.view
        for name, of in view.groups.items():
            pairs = [("", quota.group_marks(of), ledger.group(name).counted)]
            for entry in of.quota.quota_config if of.quota else ():
                kind = entry.storage_type
                used = ledger.group_type(name, kind).counted
                pairs.append((kind.name, quota.type_marks(of, kind), used))
            for index in h.manager.index.by_uid.values():
                if index.group == name:
                    used = ledger.instance(index.uid).blocks
                    pairs.append((index.uid, quota.key_marks(of), used))
            found += [
                f"group {name} {what}: {used} above {marks.high}"
                for what, marks, used in pairs
                if marks.high is not None and used > marks.high
            ]
        for name, config in view.storages.items():
            marks, used = quota.storage_marks(config), ledger.storage(name).counted
            if marks.high is not None and used > marks.high:
                found.append(f"storage {name}: {used} above {marks.high}")
        return found


@dataclass
class Scanned:
    """A full scan of everything stored."""

    instances: dict[str, StoredInstance]
    live: dict[str, int] = field(default_factory=dict)
    """Objects that hold a live block, with their sizes."""
    trash: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Every file on the storages, with its size."""
    again: set[str] = field(default_factory=set)
    """Objects that were deleted and will be once more, for a late writer."""
    extent_of: dict[str, bytes] = field(default_factory=dict)


async def scan(h: Harness) -> Scanned:
    """Read every record, and derive which objects must be there."""
    by_uid = h.manager.index.by_uid
    found = Scanned({uid: await h.stored(index) for uid, index in by_uid.items()})
    for uid, stored in found.instances.items():
        assert stored.problems == []
        gone: dict[bytes, int] = {}
        again: dict[bytes, int] = {}
        for trash in stored.trash:
            side = again if trash.again else gone
            assert not side.get(trash.extent_id, 0) & trash.objects, "twice in the trash"
            side[trash.extent_id] = side.get(trash.extent_id, 0) | trash.objects
        for extent_id, (extent, state) in stored.extents.items():
            layout = by_uid[uid].layout(extent)
            assert layout is not None
            waste = layout.waste(live_blocks(extent, state))
            assert state.dead == waste.dead or not live_blocks(extent, state)
            for i, obj in enumerate(layout.objects):
                assert obj.name not in found.extent_of, "an address is named twice"
                found.extent_of[obj.name] = extent_id
                if not waste.gone >> i & 1:
                    assert not gone.get(extent_id, 0) >> i & 1, "in the trash, and live"
                    found.live[obj.name] = obj.size
                elif gone.get(extent_id, 0) >> i & 1:
                    found.trash[obj.name] = obj.size
                elif again.get(extent_id, 0) >> i & 1:
                    found.again.add(obj.name)
        nobody = [t for t in stored.trash if t.extent_id not in stored.extents]
        known = {t.extent_id: by_uid[uid].book.entries.get(t.extent_id) for t in nobody}
        assert not nobody, f"trash of nobody: {nobody}, known as {known}"
    return found


def check_ledger(h: Harness, found: Scanned) -> None:
    """Invariant 3, by group, type and storage (`Harness.check_counters` does instances)."""
    ledger = h.manager.shared.ledger
    groups: dict[str, Delta] = {}
    types: dict[tuple[str, StorageType], Delta] = {}
    storages: dict[tuple[str, str], Delta] = {}
    for uid, stored in found.instances.items():
        group = h.manager.index.by_uid[uid].group
        for cells in stored.held.values():
            for name, delta in cells.items():
                kind = h.manager.shared.type_of(name)
                groups[group] = groups.get(group, Delta()) + delta
                types[group, kind] = types.get((group, kind), Delta()) + delta
                storages[group, name] = storages.get((group, name), Delta()) + delta
    assert clean(ledger.groups) == clean(groups)
    assert clean(ledger.group_types) == clean(types)
    assert clean(ledger.group_storages) == clean(storages)


def check_files(
    h: Harness, found: Scanned, written: set[bytes], faults: StorageFaults, left: set[str]
) -> None:
    """The files are what the ledger counts, byte by byte.

    Args:
        written: extents whose writer wrote all blocks; others may have no files.
        left: objects that a trim of the records left to repair.
    """
    roots = {name: root_of(config) for name, config in h.registry.view.storages.items()}
    files = found.files = sizes_of(list(roots.values()))
    missing: dict[str, int] = {}
    for name, size in {**found.live, **found.trash}.items():
        if name in files:
            assert files[name] == size, f"{name} has {files[name]} bytes, not {size}"
            continue
        dead = name in found.trash and name in faults.deleted
        where = "live" if name in found.live else "in the trash"
        assert dead or found.extent_of[name] not in written, f"{name} is {where} and gone"
        missing[name] = size
    extra = files.keys() - found.live.keys() - found.trash.keys()
    assert extra <= found.again | left, f"files of nobody: {sorted(extra - found.again - left)[:4]}"
    for storage, root in roots.items():
        held = h.manager.shared.ledger.storage(storage)
        there = sum(n for path, n in files.items() if path.startswith(root) and path not in extra)
        there += sum(n for path, n in missing.items() if path.startswith(root))
        assert there == held.counted + held.trash_bytes, f"{storage}: {there} bytes, {held}"


def check_over(found: Scanned, left: set[str]) -> None:
    """Invariant 5: everything ended, nothing lies in the trash, and only live files are there."""
    for stored in found.instances.values():
        assert stored.trash == []
        assert {s.phase for _, s in stored.extents.values()} <= {Phase.SETTLED}
    assert found.files.keys() <= found.live.keys() | left
