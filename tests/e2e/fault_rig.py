"""Storages that fail for real, and what engines see of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
from e2e_harness import QUICK, Site

from kvcm.client import AdminClient, Client, block_keys
from kvcm.client.file_sdk import FileSdk
from kvcm.client.session import WriteSession
from kvcm.client.types import Locations
from kvcm.core.errors import KvcmError
from kvcm.core.types import StorageStatus
from kvcm.testing.mounts import FaultyMount, PrivateMounts, private_mounts

DISK, FAULTY, FINE = "disk", "faulty", "fine"
PERIOD_S = 0.3
HUNG_S = 2.5
SPACE_BYTES = 16 << 20
BLOCK_BYTES = 4096
BLOCKS = 4
SETTINGS = (*QUICK, f"probe_period_s={PERIOD_S}", f"probe_timeout_s={HUNG_S}")


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of one prefix, their bytes, and the storage these lie on."""

    keys: list[int]
    blocks: list[bytes]
    storage: str


class Rig:
    """A manager on three storages of equal size: one whose disk can be taken away or filled, one
    that fails on demand, and one that is fine. Each of the first two makes a group with that one.
    """

    def __init__(self, folder: Path, mounts: PrivateMounts) -> None:
        self._mounts = mounts
        self._folder = folder
        self._seeds = count()
        self.hardware = folder / "hardware"
        self.disk = folder / DISK
        mounts.tmpfs(self.hardware, SPACE_BYTES)
        mounts.bind(self.hardware, self.disk)
        mounts.tmpfs(folder / FINE, SPACE_BYTES)
        self.faulty: FaultyMount = mounts.faulty(folder / FAULTY)
        names = (DISK, FAULTY, FINE)
        storages = [
            {"global_unique_name": name, "nfs": {"root_path": str(folder / name)}} for name in names
        ]
        groups = [
            {
                "name": name,
                "storage_candidates": [name, FINE],
                "quota": {"capacity": 1 << 40},
                "cache_config": {"reclaim_strategy": {"trigger_strategy": {"used_percentage": 2}}},
            }
            for name in (DISK, FAULTY)
        ]
        document = {"storages": storages, "instance_groups": groups}
        self.site = Site(folder, document=document, inside=mounts.inside)
        begun = time.monotonic()
        self.site.start(settings=SETTINGS)
        self.start_s = time.monotonic() - begun

    # ---- faults ------------------------------------------------------------------------------

    def unmount(self) -> None:
        self._mounts.unmount(self.disk)

    def mount(self) -> None:
        self._mounts.bind(self.hardware, self.disk)

    def read_only(self, on: bool) -> None:
        self._mounts.remount(self.hardware, read_only=on)

    def fill(self) -> None:
        """No further byte fits then."""
        self._filler = self._mounts.fill(self.hardware)

    def empty(self) -> None:
        self._filler.unlink()

    # ---- what operators see --------------------------------------------------------------------

    def storage(self, name: str) -> StorageStatus:
        """As ListStorage tells of it."""
        with AdminClient(f"grpc://127.0.0.1:{self.site.ready['admin_rpc_port']}") as admin:
            return next(s for s in admin.list_storage() if s.global_unique_name == name)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of ``/metrics``; 0 when there is none."""
        url = f"http://127.0.0.1:{self.site.ready['admin_http_port']}/metrics"
        for line in httpx.get(url, timeout=10).text.splitlines():
            if line.startswith(f"{name}{{") and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return 0.0

    def held(self, name: str) -> dict[str, Any]:
        """Blocks and bytes that the index holds on a storage."""
        url = f"http://127.0.0.1:{self.site.ready['admin_http_port']}/v1/usage"
        usage: dict[str, Any] = httpx.get(url, timeout=10).json()["storages"][name]
        return usage

    # ---- what engines do -----------------------------------------------------------------------

    def keys(self) -> list[int]:
        """Of a prefix nobody has seen."""
        return block_keys([next(self._seeds), *range(1, BLOCKS * 4)], 4)

    def write(self, client: Client, instance: str) -> Chain:
        """A new prefix, bytes included."""
        keys = self.keys()
        blocks = [key.to_bytes(8, signed=True) * (BLOCK_BYTES // 8) for key in keys]
        with client.write(instance, keys) as session:
            assert len(session) == BLOCKS
            assert session.put(self, blocks) == {}
        return Chain(keys, blocks, self.storage_of(session))

    def storage_of(self, session: WriteSession) -> str:
        """The one storage that a session's places lie on."""
        uris = [location.specs["tp0"] for _, location in session]
        (storage,) = {uri.split("/")[2] for uri in uris}
        return storage

    @contextmanager
    def granted(
        self, client: Client, instance: str, storage: str
    ) -> Iterator[tuple[list[int], WriteSession]]:
        """A new prefix, and a session that may write it to a storage."""
        while True:
            keys = self.keys()
            with client.write(instance, keys) as session:
                if self.storage_of(session) == storage:
                    yield keys, session
                    return

    def write_both(self, client: Client, instance: str, storage: str) -> dict[str, list[Chain]]:
        """Prefixes on a storage and on the fine one, two or more on each."""
        chains: dict[str, list[Chain]] = {storage: [], FINE: []}
        while min(map(len, chains.values())) < 2:
            chain = self.write(client, instance)
            chains[chain.storage].append(chain)
        return chains

    def read(self, locations: Locations) -> list[bytes | KvcmError | None]:
        return FileSdk().get_many([(self._seen(uri), None) for uri in locations.uris("tp0")])

    def put_many(self, items: Sequence[tuple[str, Any]]) -> Sequence[KvcmError | None]:
        """As an engine inside the mounts would."""
        return FileSdk().put_many([(self._seen(uri), buffer) for uri, buffer in items])

    def _seen(self, uri: str) -> str:
        return uri.replace(str(self._folder), str(self._mounts.seen(self._folder)), 1)


@contextmanager
def fault_rig(folder: Path) -> Iterator[Rig]:
    """A rig whose manager and mounts are gone afterwards."""
    with private_mounts() as mounts:
        rig = Rig(folder, mounts)
        try:
            yield rig
        finally:
            rig.faulty.kill()
            rig.site.kill()


class Stopwatch:
    """The longest call of each kind."""

    def __init__(self) -> None:
        self.longest_s: dict[str, float] = {}

    def __call__(self, kind: str, call: Callable[[], Any]) -> Any:
        begun = time.monotonic()
        try:
            return call()
        finally:
            took = time.monotonic() - begun
            self.longest_s[kind] = max(took, self.longest_s.get(kind, 0.0))
