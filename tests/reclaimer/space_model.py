"""What the space test knows: sessions, chains of keys, storages that fail, configurations."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvcm.core.errors import StorageError
from kvcm.core.quota import UNLIMITED
from kvcm.core.storage import MARKER
from kvcm.core.types import (
    AdmissionPolicy,
    CachePreferStrategy,
    InstanceGroup,
    ReclaimPolicy,
    StorageConfig,
    StorageType,
    TtlSince,
)
from kvcm.storage_backends.base import DataStorageBackend
from tests.cache.harness import SLOT, Grant, group

BLOCK = 2 * SLOT
NFS, HF3FS = "nfs_01", "hf3fs_01"
STORAGES = {NFS: StorageType.NFS, HF3FS: StorageType.HF3FS}
GROUPS = ("a", "b")
PLAIN = {"a1": "a", "b1": "b"}
"""Instances whose blocks all carry both specs, by name, with their groups."""
SPLIT = {"a2": "a", "b2": "b"}
"""Instances whose blocks may carry one spec only."""
INSTANCES = PLAIN | SPLIT
SUBSETS = {"one": ("tp0",), "two": ("tp1",), "all": ("tp0", "tp1")}


@dataclass(slots=True, eq=False)
class Session:
    """A write session: ``blocks`` holds what each granted key may be: ``open``, ``serving``,
    ``gone``, or ``maybe`` any of them. ``trims``: trims of the instance before it. ``deadline``:
    when the manager ends it, which a restart puts off; ``promised``: until when its writer writes.
    """

    grant: Grant
    uid: str
    extent_id: bytes
    deadline: float
    trims: int
    uris: dict[int, dict[str, str]]
    blocks: dict[int, str] = field(default_factory=dict)
    mask: list[bool] | None = None
    finished_ms: int = 0
    promised: float = 0.0

    def __post_init__(self) -> None:
        self.promised = self.deadline

    def doubt(self) -> None:
        """Something failed: whatever was not gone may be now."""
        for key, state in self.blocks.items():
            if state != "gone":
                self.blocks[key] = "maybe"


def extent_token(uri: str) -> str:
    """The part of an address that names its extent."""
    return Path(urlsplit(uri).path).name.split("_")[0]


class StorageFaults:
    """How storages fail: the share of calls, and of names within a delete, that do."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rate = 0.0
        self.deleted: set[str] = set()
        """Objects whose bytes may be deleted; the index may not know yet."""
        self.refused = 0
        self.not_placed = 0

    def strikes(self) -> bool:
        return self.chance.random() < self.rate


class FaultyBackend:
    """Puts faults before a storage: nothing can be allocated, folders not made, bytes not deleted,
    or not those of some names, with the rest done."""

    def __init__(self, inner: DataStorageBackend, faults: StorageFaults) -> None:
        self._inner = inner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def place(self, *args: Any) -> bytes:
        if self._faults.strikes():
            self._faults.not_placed += 1
            raise StorageError("injected: nothing can be allocated")
        return self._inner.place(*args)

    async def prepare(self, *args: Any) -> None:
        if self._faults.strikes():
            raise StorageError("injected: no folders")
        await self._inner.prepare(*args)

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        faults = self._faults
        if faults.strikes():
            faults.refused += len(names)
            raise StorageError("injected: nothing can be deleted")
        tried = [name for name in names if not faults.strikes()]
        # Before the call: a manager that dies meanwhile does not stop the thread that deletes.
        faults.deleted.update(tried)
        answers = dict(zip(tried, await self._inner.delete(tried), strict=True))
        faults.refused += len(names) - len(tried)
        return [answers.get(n, StorageError("injected: not this one")) for n in names]


def chains_of(chance: random.Random, first: int, count: int = 10) -> list[list[int]]:
    """Chains of 2 to 14 keys or so, many of which share their heads with others."""
    chains: list[list[int]] = []
    for _ in range(count):
        head: list[int] = []
        if chains and chance.random() < 0.7:
            other = chance.choice(chains)
            head = other[: chance.randint(1, len(other))]
        length = chance.randint(2, 9)
        chains.append(head + list(range(first, first + length)))
        first += length
    return chains


def storage_fields(root: Path, keys_per_file: int) -> dict[str, dict[str, Any]]:
    """The fields of the storages that are not as the harness makes them."""
    spec = {"mountpoint": str(root / HF3FS), "key_count_per_file": keys_per_file}
    (root / HF3FS).mkdir(parents=True, exist_ok=True)
    return {HF3FS: {"type": StorageType.HF3FS, "spec": spec}}


def any_group(chance: random.Random, name: str, version: int = 1) -> InstanceGroup:
    """A group with limits, marks and policies by chance."""
    pick = chance.choice
    policy = pick([ReclaimPolicy.LRU, ReclaimPolicy.LRU, ReclaimPolicy.LFU, ReclaimPolicy.TTL])
    made = group(
        name,
        storages=pick([(NFS, HF3FS), (HF3FS, NFS), (NFS,), (NFS, HF3FS)]),
        capacity=pick([20, 40, 60, 90, 140, UNLIMITED // BLOCK]) * BLOCK,
        types=[
            (kind, pick([10, 30, 60]) * BLOCK)
            for kind in STORAGES.values()
            if chance.random() < 0.3
        ],
        percentage=pick([0.0, 0.5, 0.8, 0.9, 0.95, 1.0, 1.01]),
        size=pick([0, 0, 0, 30 * BLOCK]),
        delay_ms=pick([1000, 15_000]),
        max_keys=pick([0, 0, 25, 50]),
        low=pick([0.0, 0.0, 0.3]),
        version=version,
        reclaim_policy=policy,
        ttl_seconds=pick([0, 7, 60]) if policy is ReclaimPolicy.TTL else 0,
        ttl_since=pick(list(TtlSince)),
        admission=pick([AdmissionPolicy.ALL, AdmissionPolicy.ALL, AdmissionPolicy.TINYLFU]),
        trigger_period_seconds=pick([0, 0, 0, 3]),
        reclaim_step_size=pick([0, 0, 0, 5 * BLOCK]),
        reclaim_step_percentage=pick([0, 0, 0, 10]),
    )
    assert made.cache_config is not None
    prefer = pick([CachePreferStrategy.UNSPECIFIED, CachePreferStrategy.PREFER_3FS])
    cache = made.cache_config.model_copy(update={"data_storage_strategy": prefer})
    return made.model_copy(update={"cache_config": cache})


def any_capacity(chance: random.Random, config: StorageConfig) -> StorageConfig:
    """A storage with another capacity and marks."""
    capacity = chance.choice([0, 0, 60, 120, 200]) * BLOCK
    update = {
        "capacity_bytes": capacity,
        "high_percentage": chance.choice([0.0, 0.7, 0.9]) if capacity else 0.0,
        "low_percentage": 0.0,
    }
    return config.model_copy(update=update)


def sizes_of(roots: Sequence[str]) -> dict[str, int]:
    """Path → size of every file that is neither a probe's nor the marker of a root."""
    found: dict[str, int] = {}
    todo = list(roots)
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                # Of hundreds of folders few hold anything.
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
                elif entry.name != MARKER and not entry.name.startswith(".kvcm-probe-"):
                    found[entry.path] = entry.stat().st_size
    return found
