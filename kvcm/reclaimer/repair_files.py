"""Files that no record names.

What makes removing them safe:

* only folders of this cluster, and in them only of instances that this manager has claimed, or
  whose uid this registry issued and has forgotten;
* files are listed first and records are read second: a file that is there was named before;
* names are never used twice, so what is nobody's once stays so; it must still be nobody's after
  the grace (a reader may have been told of it), and the retiring commits must be safe;
* a file is compared by the part of its path that is its own (cluster, instance, folder, name), so
  one folder mounted in two places is no stranger to itself;
* what was written or changed within the longest write time-out and the grace is left alone, and a
  storage of which more than 5 % would go is left to a human.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.core.errors import KvcmError
from kvcm.metaindex import bits
from kvcm.metaindex.ids import EXTENT_ID_BYTES, extent_name, home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import live_blocks
from kvcm.reclaimer.repair_report import Kind, StorageCount
from kvcm.reclaimer.repair_scope import (
    FINDINGS_MAX,
    Lost,
    Scope,
    is_over,
    read_extents,
    read_trash,
)
from kvcm.registry.rules import is_uid, uid_number
from kvcm.registry.view import RegistryView
from kvcm.storage_backends.base import Capability, DataStorageBackend, FoundObject

_EXTENTS_AT_ONCE = 64
_DELETES_AT_ONCE = 256
_NAME_CHARS = 20


class _File(NamedTuple):
    """A file with what tells it from all others, wherever its storage is mounted."""

    name: str
    size: int
    extent_id: bytes
    own: str


@dataclass(slots=True)
class _Part:
    """Ownerless files on one storage, of one instance (None: one that is gone, by uid)."""

    storage: str
    index: InstanceIndex | None
    uid: str
    files: list[_File]
    seen: float


class FileCheck:
    """Files on all storages in scope."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._parts: list[_Part] = []
        self._probes: dict[str, list[str]] = {}
        self._names: set[str] = set()

    # ---- looking -----------------------------------------------------------------------------

    async def check(self, storage: str) -> AsyncGenerator[int, None]:
        """Look at every file of a storage; yields files seen.

        Raises:
            StorageError: the storage cannot be read.
            Unavailable, OutcomeUnknown, StaleFence: the index store.
        """
        backend = self._usable(storage)
        if backend is None:
            return
        if not self._scope.options.instance:
            await self._leftovers(storage, backend)
        for index in self._scope.indexes():
            async for count in self._instance(storage, backend, index):
                yield count
        async for count in self._gone(storage, backend):
            yield count

    def _usable(self, storage: str) -> DataStorageBackend | None:
        backend = self._scope.ports.backend(storage)
        if backend is None or not self._scope.ports.available(storage):
            self._scope.report.error(f"storage {storage!r} is not available")
            return None
        return backend if Capability.LIST in backend.capabilities else None

    async def _leftovers(self, storage: str, backend: DataStorageBackend) -> None:
        old = [f for f in await backend.leftovers() if f.age_s > self._scope.age_s_min()]
        for file in old:
            self._scope.report.found(Kind.PROBE_LEFTOVER, file.name, size=file.size)
        self._probes[storage] = [file.name for file in old]

    async def _instance(
        self, storage: str, backend: DataStorageBackend, index: InstanceIndex
    ) -> AsyncGenerator[int, None]:
        count, suspects = self._scope.report.storage(storage), list[_File]()
        async for page in backend.survey(index.shared.cluster_uid, index.uid):
            files = self._take(count, page)
            suspects += await self._nobodys(index, files, count)
            yield len(page)
        if suspects:
            suspects = await self._not_in_trash(index, suspects)
        self._note(storage, index, index.uid, suspects, count)

    def _take(self, count: StorageCount, page: Sequence[FoundObject]) -> list[_File]:
        """Count what lies there; the files that are old enough to be judged."""
        files: list[_File] = []
        for name, size, age_s in page:
            count.objects += 1
            count.bytes += size
            file = _file(name, size)
            if file is None:
                count.foreign += 1
            elif age_s > self._scope.age_s_min():
                files.append(file)
        return files

    async def _nobodys(
        self, index: InstanceIndex, files: Sequence[_File], count: StorageCount
    ) -> list[_File]:
        """Those of ``files`` that no extent holds, nor one that does not read."""
        by_extent: dict[bytes, list[_File]] = {}
        for file in files:
            if int.from_bytes(file.extent_id[:4], "big") > index.shared.epoch:
                # Made under a leader later than this one: we are deposed, or our registry is a
                # copy of earlier times.
                count.foreign += 1
            else:
                by_extent.setdefault(file.extent_id, []).append(file)
        out: list[_File] = []
        ids, turn = list(by_extent), self._scope.turn()
        for at in range(0, len(ids), _EXTENTS_AT_ONCE):
            part = ids[at : at + _EXTENTS_AT_ONCE]
            for extent_id, found in (await read_extents(index, part)).items():
                mine = by_extent[extent_id]
                if found is Lost.ABSENT:
                    out += mine
                elif isinstance(found, Lost):
                    out += mine if self._gives_up(index, extent_id) else []
                elif is_over(found[1].phase):
                    # Until its records are forgotten the trash may still be about to name them.
                    continue
                else:
                    layout = index.layout(found[0])
                    if layout is None:
                        continue
                    gone = layout.waste(live_blocks(*found)).gone
                    dead = {_own(layout.objects[i].name) for i in bits.positions(gone)}
                    out += [f for f in mine if f.own in dead]
                if turn.is_over():
                    await turn.give()
        return out

    def _gives_up(self, index: InstanceIndex, extent_id: bytes) -> bool:
        """Whether an extent that does not read was found to be so, and its record is to go."""
        is_broken = extent_id in self._scope.broken.get(index.uid, ())
        return is_broken and self._scope.options.unreadable

    async def _not_in_trash(self, index: InstanceIndex, files: Sequence[_File]) -> list[_File]:
        """Those that nobody is about to delete anyway."""
        trash = await read_trash(index)
        found = await read_extents(index, {f.extent_id for f in files} & trash.keys())
        pending: set[str] = set()
        for extent_id, answer in found.items():
            layout = None if isinstance(answer, Lost) else index.layout(answer[0])
            if layout is not None:
                for i in bits.positions(trash[extent_id] & bits.ones(len(layout.objects))):
                    pending.add(_own(layout.objects[i].name))
        return [f for f in files if f.own not in pending]

    def _note(
        self,
        storage: str,
        index: InstanceIndex | None,
        uid: str,
        files: list[_File],
        count: StorageCount,
    ) -> None:
        # Two storages may have one root.
        files = [file for file in files if file.name not in self._names]
        for file in files:
            self._names.add(file.name)
            self._scope.report.found(Kind.OWNERLESS_FILE, file.name, size=file.size)
            count.ownerless_objects += 1
            count.ownerless_bytes += file.size
        if files or index is None:
            now = self._scope.clock.monotonic()
            self._parts.append(_Part(storage, index, uid, files[:FINDINGS_MAX], now))

    # ---- instances that are gone ---------------------------------------------------------------

    async def _gone(self, storage: str, backend: DataStorageBackend) -> AsyncGenerator[int, None]:
        scope = self._scope
        cluster = scope.around.index.shared.cluster_uid
        # The folders first: an instance registered later is in the view that is taken second.
        uids = [
            uid
            for uid in await backend.instances(cluster)
            if scope.options.instance in ("", uid) and self._was_forgotten(uid)
        ]
        spaces = await self._spaces() if uids else set()
        for uid in uids:
            if uid.encode() in spaces:
                continue
            count = scope.report.storage(storage)
            files: list[_File] = []
            young = 0
            async for page in backend.survey(cluster, uid):
                taken = self._take(count, page)
                young += len(page) - len(taken)
                files += taken
                yield len(page)
            if young:
                # Somebody writes there, whom this registry does not know.
                count.too_young += young
                continue
            scope.report.found(Kind.GONE_INSTANCE, f"storage {storage}: instance {uid}")
            self._note(storage, None, uid, files, count)

    def _was_forgotten(self, uid: str) -> bool:
        index = self._scope.around.index
        return uid not in index.by_uid and was_issued(self._scope.ports.view(), uid)

    async def _spaces(self) -> set[bytes]:
        """Instances of which records are left: somebody may still use those."""
        return set(await self._scope.around.index.shared.store.spaces())

    # ---- mending -----------------------------------------------------------------------------

    async def fix(self) -> AsyncGenerator[int, None]:
        """Remove what was found; yields files, 0 while it waits for their grace."""
        scope = self._scope
        for storage, names in self._probes.items():
            await self._remove_probes(storage, names)
        for part in self._parts:
            if self._is_stopped(part.storage):
                continue
            while scope.clock.monotonic() < part.seen + scope.grace_s():
                yield 0
            try:
                if part.index is None:
                    await self._remove_instance(part)
                else:
                    await self._remove_files(part.index, part)
            except KvcmError as error:
                scope.report.error(f"storage {part.storage!r} instance {part.uid}: {error}")
            yield len(part.files)

    def _is_stopped(self, storage: str) -> bool:
        count = self._scope.report.storage(storage)
        for part, whole, what in (
            (count.ownerless_objects, count.objects, "files"),
            (count.ownerless_bytes, count.bytes, "bytes"),
        ):
            if self._scope.is_excess(part, whole):
                why = f"{part} of {whole} {what} have no owner"
                if why not in count.stopped:
                    count.stopped.append(why)
                return True
        return False

    async def _remove_probes(self, storage: str, names: list[str]) -> None:
        backend = self._scope.ports.backend(storage)
        if backend is None or not names:
            return
        try:
            answers = await backend.delete_leftovers(names)
        except KvcmError as error:
            self._scope.report.error(f"storage {storage!r}: {error}")
            return
        self._count(Kind.PROBE_LEFTOVER, answers)

    async def _remove_files(self, index: InstanceIndex, part: _Part) -> None:
        backend = self._scope.ports.backend(part.storage)
        if backend is None or not self._scope.is_live(index):
            return
        still = await self._nobodys(index, part.files, StorageCount())
        if still:
            still = await self._not_in_trash(index, still)
        for at in range(0, len(still), _DELETES_AT_ONCE):
            some = still[at : at + _DELETES_AT_ONCE]
            for home in {home_shard(file.extent_id) for file in some}:
                # A replica that took over without the commit that gave them up would serve them.
                await index.shards.confirm(home)
            if not self._scope.is_live(index):
                return
            self._count(Kind.OWNERLESS_FILE, await backend.delete([f.name for f in some]))

    async def _remove_instance(self, part: _Part) -> None:
        backend = self._scope.ports.backend(part.storage)
        if backend is None or not self._was_forgotten(part.uid):
            return
        if part.uid.encode() in await self._spaces():
            return
        names = [file.name for file in part.files]
        for at in range(0, len(names), _DELETES_AT_ONCE):
            answers = await backend.delete(names[at : at + _DELETES_AT_ONCE])
            self._count(Kind.OWNERLESS_FILE, answers)
        cluster = self._scope.around.index.shared.cluster_uid
        await backend.remove_instance(cluster, part.uid)
        if part.uid not in await backend.instances(cluster):
            self._scope.report.fixed(Kind.GONE_INSTANCE)

    def _count(self, kind: Kind, answers: Sequence[Exception | None]) -> None:
        self._scope.report.fixed(kind, sum(answer is None for answer in answers))
        for answer in answers:
            if answer is not None:
                self._scope.report.error(str(answer))


def was_issued(view: RegistryView, uid: str) -> bool:
    """Whether the registry once gave out a uid that it does not know any more.

    A number that it has yet to give, or that belongs to another uid that it knows, is from another
    history of this registry (a copy, a restored backup): not ours to judge.
    """
    if not is_uid(uid) or uid_number(uid) >= view.next_instance_number:
        return False
    known = [*(i.uid for i in view.instances.values()), *(i.uid for i in view.closing)]
    return all(uid_number(other) != uid_number(uid) for other in known)


def _own(name: str) -> str:
    """Cluster, instance, folder and file of an object's name."""
    return "/".join(name.rsplit("/", 4)[1:])


def _file(name: str, size: int) -> _File | None:
    """None for a name that no extent of ours has."""
    text = name.rpartition("/")[2].partition("_")[0]
    if len(text) != _NAME_CHARS:
        return None
    try:
        extent_id = base64.b32decode(text.upper() + "====")
    except ValueError:
        return None
    if len(extent_id) != EXTENT_ID_BYTES or extent_name(extent_id) != text:
        return None
    return _File(name, size, extent_id, _own(name))
