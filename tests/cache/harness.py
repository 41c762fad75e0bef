"""The whole cache service in one process: real registry, index store and files, simulated time.

`Harness` assembles a Manager, steps its loops by hand, survives crashes of it, and plays the
engines' part: it writes the bytes of granted blocks into the files their URIs name and reads them
back, so that a wrong hit shows as wrong bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from google.protobuf import json_format

from kvcm._pb import meta_pb2
from kvcm.cache.api import (
    FinishWriteRequest,
    LookupRequest,
    MetaRequest,
    RemoveRequest,
    ReportRequest,
    StartWriteAnswer,
    StartWriteRequest,
    TrimRequest,
    WireForm,
)
from kvcm.cache.base import CacheSettings
from kvcm.core.errors import KvcmError
from kvcm.core.keys import KeyBatch, pack_keys
from kvcm.core.mask import BlockMask
from kvcm.core.storage import MARKER
from kvcm.core.types import (
    CacheConfig,
    CacheReclaimStrategy,
    Instance,
    InstanceGroup,
    InstanceGroupQuota,
    LocationSpecGroup,
    LocationSpecInfo,
    MetaIndexerConfig,
    ModelDeployment,
    QueryType,
    QuotaConfig,
    ReportKind,
    ReportOutcome,
    StorageConfig,
    StorageType,
    TriggerStrategy,
    TrimStrategy,
)
from kvcm.metaindex import records
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.records import Phase, State
from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.metaindex.stores.valkey_scripts import decode_claim, meta_key, shard_tag
from kvcm.registry.registry import Registry
from kvcm.server.backends import BackendSet
from kvcm.server.wiring import Manager
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend
from kvcm.storage_backends.posix import root_of
from kvcm.testing.audit import (
    Cells,
    StoredInstance,
    add_to,
    cells_of,
    counter_problems,
    read_instance,
)
from kvcm.testing.clock import SimClock
from kvcm.testing.faults import FaultyStore, no_faults

GRACE_S = 10.0
UNLIMITED = 1 << 50
SLOT = 64
REGISTRY = "registry.db"
_empty_registry: list[bytes] = []


@dataclass(frozen=True)
class Location:
    """One decoded CacheLocation."""

    type: int
    spec_size: int
    uris: dict[str, str]

    @property
    def hit(self) -> bool:
        """Not a placeholder."""
        return self.type != 0


@dataclass
class Grant:
    """A decoded StartWrite answer."""

    instance_id: str
    keys: list[int]
    session: str
    existing: list[bool]
    locations: list[Location]
    reason: str
    messages: list[Any] = field(default_factory=list)

    @property
    def granted(self) -> list[int]:
        """The granted keys, in order."""
        return [k for k, have in zip(self.keys, self.existing, strict=True) if not have]

    @property
    def by_key(self) -> dict[int, Location]:
        """The granted locations."""
        return dict(zip(self.granted, self.locations, strict=True))


def group(
    name: str = "default",
    *,
    storages: Sequence[str] = ("nfs_01",),
    capacity: int = UNLIMITED,
    types: Sequence[tuple[StorageType, int]] = (),
    percentage: float = 2.0,
    size: int = 0,
    delay_ms: int = 1000,
    max_keys: int = 0,
    version: int = 1,
    low: float = 0.0,
    **reclaim: Any,
) -> InstanceGroup:
    """An instance group; no trigger unless asked for."""
    return InstanceGroup(
        name=name,
        storage_candidates=tuple(storages),
        quota=InstanceGroupQuota(
            capacity=capacity,
            quota_config=tuple(QuotaConfig(storage_type=t, capacity=c) for t, c in types),
        ),
        cache_config=CacheConfig(
            reclaim_strategy=CacheReclaimStrategy(
                trigger_strategy=TriggerStrategy(used_percentage=percentage, used_size=size),
                delay_before_delete_ms=delay_ms,
                low_percentage=low,
                **reclaim,
            ),
            meta_indexer_config=MetaIndexerConfig(max_key_count=max_keys, mutex_shard_num=16),
        ),
        version=version,
    )


def file_of(uri: str) -> tuple[Path, int, int]:
    """(path, byte offset, size) of a ``file://`` URI, by the rules of wire.md §6."""
    parts = urlsplit(uri)
    query = parse_qs(parts.query)
    size = int(query["size"][0])
    return Path(parts.path), int(query.get("blkid", ["0"])[0]) * size, size


def payload(session: str, key: int, spec: str, size: int) -> bytes:
    """The bytes that a session writes for one spec of one block: nobody else's are equal."""
    return hashlib.shake_128(f"{session}/{key}/{spec}".encode()).digest(size)


def write_slot(uri: str, data: bytes) -> None:
    """What an engine does with a granted address."""
    path, offset, _ = file_of(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def read_slot(uri: str) -> bytes | None:
    """What a reader gets; None when the file is gone."""
    path, offset, size = file_of(uri)
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def locations_of(message: Any) -> list[Location]:
    """Decode the ``locations`` of a response message."""
    return [
        Location(m.type, m.spec_size, {s.name: s.uri for s in m.location_specs})
        for m in message.locations
    ]


def parse_body(body: bytes, form: WireForm, kind: Any) -> Any:
    """A response message with the locations of an answer's body."""
    if form is WireForm.PROTO:
        return kind.FromString(body)
    message = kind()
    json_format.ParseDict({"locations": json.loads(b"[" + body + b"]")}, message)
    return message


async def place_registry(path: Path) -> None:
    """Puts an empty registry where none is: making its tables is half the work of a harness."""
    if path.exists():
        return
    if not _empty_registry:
        with tempfile.TemporaryDirectory(prefix="kvcm-cache-test-") as folder:
            made = Registry(f"sqlite:///{folder}/{REGISTRY}", SimClock())
            await made.open()
            await made.close()
            _empty_registry.append((Path(folder) / REGISTRY).read_bytes())
    path.write_bytes(_empty_registry[0])


_END_S = 10.0


class Harness:
    """One manager over things that outlive it.

    Args:
        store_kind: ``memory`` or ``rocksdb``.
        store: takes the place of ``store_kind``.
        root: a folder of its own; made and removed when None.
        space: fields of storages, as ``capacity_bytes``.
        wrap: puts something of its own before each storage.
    """

    def __init__(
        self,
        store_kind: str = "memory",
        *,
        store: KVStore | None = None,
        root: Path | None = None,
        groups: Sequence[InstanceGroup] = (),
        storages: Sequence[str] = ("nfs_01",),
        keys_per_file: int = 3,
        cache_bytes: int = 1 << 26,
        grace_s: float = GRACE_S,
        timeout_max_s: int = 600,
        turns: int = 0,
        space: Mapping[str, Mapping[str, Any]] | None = None,
        wrap: Callable[[DataStorageBackend], DataStorageBackend] = lambda backend: backend,
    ) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="kvcm-cache-test-"))
        self.root.mkdir(parents=True, exist_ok=True)
        self._owns_root = root is None
        self._wrap = wrap
        self.clock = SimClock()
        self.groups = tuple(groups) or (group(storages=storages),)
        self.storages = tuple(
            StorageConfig.model_validate(
                {
                    "global_unique_name": name,
                    "type": StorageType.NFS,
                    "spec": {
                        "root_path": str(self.root / name),
                        "key_count_per_file": keys_per_file,
                    },
                }
                | dict((space or {}).get(name, {}))
            )
            for name in storages
        )
        self.settings = CacheSettings(
            grace_s_min=grace_s,
            read_cache_bytes=cache_bytes,
            write_timeout_s_max=timeout_max_s,
            # Simulated time stands still while a test waits for an answer.
            room_wait_s=0.0,
        )
        self.inner: KVStore = store or (
            MemoryStore(clock=self.clock)
            if store_kind == "memory"
            else RocksStore(self.root / "index", sync=False, cache_bytes=8 << 20)
        )
        self.store = FaultyStore(self.inner, turns=turns)
        self.registry = Registry(f"sqlite:///{self.root / REGISTRY}", self.clock)
        self.backends: BackendSet
        self.manager: Manager

    # ---- life cycle --------------------------------------------------------------------------

    async def open(self) -> Harness:
        """Start everything; the manager is loaded."""
        await place_registry(self.root / REGISTRY)
        await self.registry.open()
        created = await self.registry.bootstrap(self.storages, self.groups)
        await self.store.open()
        await self._start(new=created)
        return self

    async def _start(self, *, new: bool = False) -> None:
        self.backends = BackendSet(
            lambda config: self._wrap(build_backend(config, self.clock)), self.clock, period_s=5
        )
        await self.backends.open(self.registry.view, new=new)
        self.manager = Manager(self.registry, self.store, self.backends, self.clock, self.settings)
        await self.manager.open()
        await self.rounds(2)

    async def close(self) -> None:
        """Stop everything and remove the files."""
        self.store.restart()
        self.store.plan = no_faults
        await self._end(graceful=True)
        await self.store.close()
        await self.registry.close()
        if self._owns_root:
            shutil.rmtree(self.root, ignore_errors=True)

    async def restart(self) -> None:
        """A graceful stop and start."""
        await self._end(graceful=True)
        await self._start()

    async def crash(self) -> None:
        """Drop the manager where it stands, then start another on what is stored."""
        await self._end(graceful=False)
        self.store.restart()
        self.store.plan = no_faults
        if isinstance(self.inner, RocksStore | ValkeyStore):
            await self.inner.close()
            await self.inner.open()
        await self._start()

    async def _end(self, *, graceful: bool) -> None:
        if graceful:
            await self.manager.close()
        current = asyncio.current_task()
        others = [t for t in asyncio.all_tasks() if t is not current]
        if not graceful:
            for task in others:
                task.cancel()
        elif others:
            # Whoever waits for a store that is away would go on doing so.
            _, left = await asyncio.wait(others, timeout=_END_S)
            for task in left:
                task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.registry._subscribers.clear()
        await self.backends.close()

    # ---- time --------------------------------------------------------------------------------

    async def round(self) -> list[Any]:
        """Run every background loop once; their reports."""
        reports = []
        for loop in self.manager.loops:
            try:
                reports.append(await loop.run_once(self.clock.monotonic()))
            except KvcmError as error:
                # The supervisor logs it and goes on.
                reports.append(error)
        return reports

    async def rounds(self, count: int = 3) -> None:
        """Several rounds at one moment."""
        for _ in range(count):
            await self.round()

    async def wait(self, seconds: float, *, step: float | None = None) -> None:
        """Let simulated time pass, with a round after each step (all at once by default)."""
        left = seconds
        while left > 0:
            part = min(step or left, left)
            self.clock.advance(part)
            left -= part
            await self.round()

    async def drain(self) -> None:
        """Enough time and rounds for everything pending to end: time-outs, graces, second
        deletes, back-offs."""
        for _ in range(4):
            await self.wait(self.settings.write_timeout_s_max + GRACE_S + 1)
            await self.rounds(2)

    # ---- calls -------------------------------------------------------------------------------

    async def register(
        self,
        instance_id: str = "i1",
        *,
        group_name: str = "default",
        specs: Sequence[tuple[str, int]] = (("tp0", SLOT), ("tp1", SLOT)),
        groups: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> Instance:
        """Register and load an instance."""
        instance = await self.registry.register_instance(
            Instance(
                instance_id=instance_id,
                instance_group=group_name,
                block_size=4,
                location_spec_infos=tuple(LocationSpecInfo(name=n, size=s) for n, s in specs),
                location_spec_groups=tuple(
                    LocationSpecGroup(name=n, spec_names=tuple(s)) for n, s in groups
                ),
                model_deployment=ModelDeployment(model_name="m"),
            )
        )
        await self.round()
        return instance

    def index(self, instance_id: str = "i1") -> InstanceIndex:
        """The index behind a registered instance."""
        return self.manager.index.by_id[instance_id]

    async def start_raw(
        self, keys: Sequence[int], instance_id: str = "i1", **options: Any
    ) -> StartWriteAnswer:
        """StartWrite, undecoded."""
        return await self.manager.start_write(
            StartWriteRequest(instance_id, KeyBatch.from_ints(keys), **options)
        )

    async def start(
        self,
        keys: Sequence[int],
        instance_id: str = "i1",
        *,
        names: Sequence[str] = (),
        timeout: int = 0,
        form: WireForm = WireForm.PROTO,
        multi_storage: bool = False,
    ) -> Grant:
        """StartWrite, decoded."""
        answer = await self.start_raw(
            keys,
            instance_id,
            group_names=tuple(names),
            write_timeout_seconds=timeout,
            form=form,
            multi_storage=multi_storage,
        )
        message = parse_body(answer.body, form, meta_pb2.StartWriteCacheResponse)
        grant = Grant(
            instance_id,
            list(keys),
            answer.session_id,
            answer.mask.flags(len(keys)),
            locations_of(message),
            answer.reason,
            list(message.locations),
        )
        assert answer.granted == len(grant.granted) == len(grant.locations)
        return grant

    def fill(self, grant: Grant, keys: Iterable[int] | None = None) -> None:
        """Write the bytes of granted blocks (all by default)."""
        wanted = set(grant.granted if keys is None else keys)
        for key, location in grant.by_key.items():
            if key in wanted:
                for spec, uri in location.uris.items():
                    write_slot(uri, payload(grant.session, key, spec, file_of(uri)[2]))

    async def finish(self, grant: Grant, success: BlockMask | Sequence[bool] | None = None) -> None:
        """FinishWrite; everything succeeded by default."""
        if success is None:
            success = BlockMask(offset=len(grant.granted))
        elif not isinstance(success, BlockMask):
            success = BlockMask(values=list(success))
        await self.manager.finish_write(
            FinishWriteRequest(grant.instance_id, grant.session, success)
        )

    async def put(self, keys: Sequence[int], instance_id: str = "i1", **options: Any) -> Grant:
        """Start, write, finish."""
        grant = await self.start(keys, instance_id, **options)
        self.fill(grant)
        await self.finish(grant)
        return grant

    async def lookup(
        self,
        keys: Sequence[int],
        instance_id: str = "i1",
        *,
        query: QueryType | int = QueryType.PREFIX_MATCH,
        form: WireForm = WireForm.PROTO,
        packed: bool = False,
        mask: BlockMask | None = None,
        sw: int = 0,
        specs: Sequence[str] = (),
    ) -> list[Location]:
        """GetCacheLocation, decoded."""
        message = await self.lookup_message(
            keys, instance_id, query=query, form=form, packed=packed, mask=mask, sw=sw, specs=specs
        )
        return locations_of(message)

    async def lookup_message(
        self,
        keys: Sequence[int],
        instance_id: str = "i1",
        *,
        query: QueryType | int = QueryType.PREFIX_MATCH,
        form: WireForm = WireForm.PROTO,
        packed: bool = False,
        mask: BlockMask | None = None,
        sw: int = 0,
        specs: Sequence[str] = (),
    ) -> Any:
        """GetCacheLocation as a response message."""
        batch = KeyBatch.from_ints(keys)
        if packed:
            batch = KeyBatch.from_packed(pack_keys(batch.data)[0])
        answer = await self.manager.lookup(
            LookupRequest(
                instance_id,
                batch,
                form=form,
                query=query,
                mask=mask,
                sw_size=sw,
                spec_names=tuple(specs),
            )
        )
        message = parse_body(answer.body, form, meta_pb2.GetCacheLocationResponse)
        assert answer.hits == sum(m.type != 0 for m in message.locations)
        return message

    async def hits(self, keys: Sequence[int], instance_id: str = "i1") -> int:
        """Length of the matched prefix."""
        return len(await self.lookup(keys, instance_id))

    async def meta(
        self,
        keys: Sequence[int],
        instance_id: str = "i1",
        *,
        mask: BlockMask | None = None,
        detail: int = 0,
        form: WireForm = WireForm.PROTO,
    ) -> list[tuple[Location, dict[str, Any]]]:
        """GetCacheMeta, decoded."""
        answer = await self.manager.get_meta(
            MetaRequest(
                instance_id, KeyBatch.from_ints(keys), mask=mask, detail_level=detail, form=form
            )
        )
        message = parse_body(answer.body, form, meta_pb2.GetCacheMetaResponse)
        return list(zip(locations_of(message), (json.loads(m) for m in answer.metas), strict=True))

    async def statuses(self, keys: Sequence[int], instance_id: str = "i1") -> list[str]:
        """Status names of keys, without the CLS_ prefix."""
        return [m["status"].removeprefix("CLS_") for _, m in await self.meta(keys, instance_id)]

    async def remove(
        self, keys: Sequence[int], instance_id: str = "i1", mask: BlockMask | None = None
    ) -> None:
        """RemoveCache."""
        await self.manager.remove(RemoveRequest(instance_id, KeyBatch.from_ints(keys), mask=mask))

    async def report(
        self,
        keys: Sequence[int],
        locations: Sequence[Mapping[str, str]],
        *kinds: ReportKind,
        instance_id: str = "i1",
        reader: str = "",
    ) -> list[ReportOutcome]:
        """ReportCacheError; everything is missing by default."""
        answer = await self.manager.report(
            ReportRequest(
                instance_id,
                KeyBatch.from_ints(keys),
                locations=locations,
                kinds=kinds or (ReportKind.MISSING,),
                reader=reader,
            )
        )
        return list(answer.outcomes)

    async def trim(
        self,
        strategy: TrimStrategy | int = TrimStrategy.REMOVE_ALL_CACHE,
        instance_id: str = "i1",
        begin: int = 0,
        end: int = 0,
    ) -> None:
        """TrimCache."""
        await self.manager.trim(TrimRequest(instance_id, strategy, begin, end))

    async def change_group(
        self, change: Callable[[InstanceGroup], InstanceGroup], name: str = "default"
    ) -> None:
        """Update a group."""
        old = self.registry.view.groups[name]
        new = change(old).model_copy(update={"version": old.version + 1})
        await self.registry.update_group(new, old.version)

    # ---- checks ------------------------------------------------------------------------------

    def files(self) -> set[str]:
        """All files on all storages but their markers."""
        return {
            str(Path(folder) / name)
            for storage in self.storages
            for folder, _, names in os.walk(root_of(storage))
            for name in names
            if name != MARKER
        }

    async def stored(self, index: InstanceIndex) -> StoredInstance:
        """Every record of an instance, read past the manager."""
        return await read_instance(self.inner, index.uid, index.shard_count)

    async def extents(self, index: InstanceIndex) -> dict[bytes, tuple[records.Extent, State]]:
        """Every stored extent of an instance."""
        return (await self.stored(index)).extents

    async def check_counters(self) -> None:
        """Invariant 3: ledger == shard counters == a full scan, and the book knows every extent."""
        ledger = self.manager.shared.ledger
        totals: Cells = {}
        for uid, index in self.manager.index.by_uid.items():
            stored = await self.stored(index)
            assert stored.problems == []
            shards = range(index.shard_count)
            counted = {n: cells_of(await self.counters(index.shards.id(n))) for n in shards}
            assert counter_problems(stored, counted) == []
            scanned: Cells = {}
            for name, delta in (i for cells in stored.held.values() for i in cells.items()):
                add_to(scanned, name, delta)
                add_to(totals, name, delta)
            assert clean(ledger.instances.get(uid, {})) == scanned, f"{uid}: ledger"
            assert clean(index.shards.usage()) == scanned, f"{uid}: known counters"
            if index.loaded:
                known = {e: x.phase for e, x in index.book.entries.items()}
                phases = {e: s.phase for e, (_, s) in stored.extents.items()}
                assert known == phases, f"{uid}: book"
                settled = {e for e in index.book.entries.values() if e.phase is Phase.SETTLED}
                mine = {e for e in index.book.entries.values() if e in index.book.order}
                assert mine == settled, f"{uid}: eviction order"
        assert clean(ledger.storages) == totals

    async def counters(self, shard: Any) -> dict[bytes, int]:
        """A shard's counters as stored."""
        if isinstance(self.inner, MemoryStore):
            held = self.inner._shards.get(shard)
            return dict(held.counters) if held is not None else {}
        if isinstance(self.inner, ValkeyStore):
            tag = shard_tag(shard)
            fields = await self.inner._one(tag, (b"HGETALL", meta_key(tag)))
            return dict(decode_claim(fields)[0].counters) if fields else {}
        meta = self.inner._meta(shard)  # type: ignore[attr-defined]
        return dict(meta.counters) if meta is not None else {}

    async def check_rest(self) -> None:
        """Invariant 5, after `drain`: nothing open past its time-out, nothing left in the trash,
        no file without an owner, no record of what is over."""
        live: set[str] = set()
        for index in self.manager.index.by_uid.values():
            stored = await self.stored(index)
            for extent, state in stored.extents.values():
                assert state.phase is Phase.SETTLED, f"{extent.extent_id.hex()} is {state.phase!r}"
                layout = index.layout(extent)
                assert layout is not None
                gone = layout.waste(state.serving).gone
                live |= {o.name for i, o in enumerate(layout.objects) if not gone >> i & 1}
            assert stored.trash == []
            assert not index.trash
        assert self.files() <= live
        await self.check_counters()


def clean(cells: Any) -> dict[str, Delta]:
    """Without zeros."""
    return {k: v for k, v in cells.items() if v != Delta()}
