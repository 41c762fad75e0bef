"""The contract on ``mooncake``, with a real master and a process that lends it memory."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest

from kvcm.client.mooncake_sdk import MooncakeSdk
from kvcm.core.clock import SystemClock
from kvcm.core.mooncake import check_spec
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend
from kvcm.storage_backends.mooncake import LEASED
from kvcm.testing.contracts.storage_backend import StorageBackendContract
from kvcm.testing.eventually import eventually
from kvcm.testing.servers_mooncake import mooncake_store, needs_mooncake

pytestmark = needs_mooncake


@pytest.fixture(scope="module")
def entry() -> Iterator[str]:
    with mooncake_store("-default_kv_lease_ttl=100") as (master, _):
        yield master.entry


@pytest.fixture(scope="module")
def sdk(entry: str) -> Iterator[MooncakeSdk]:
    sdk = MooncakeSdk({"store_01.a-b": check_spec({"master_service_entry": entry})})
    yield sdk
    sdk.close()


@lru_cache(maxsize=1)
def raw_client(entry: str) -> Any:
    """Mooncake's own client."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", entry) == 0
    return store


class TestMooncake(StorageBackendContract):
    @pytest.fixture
    async def backend(self, entry: str, sdk: MooncakeSdk) -> AsyncIterator[DataStorageBackend]:
        self._sdk = sdk
        config = StorageConfig(
            global_unique_name="store_01.a-b",
            type=StorageType.MOONCAKE,
            spec={"master_service_entry": entry},
        )
        backend = build_backend(config, SystemClock())
        await backend.create()
        await backend.open()
        yield backend
        await backend.close()
        assert raw_client(entry).remove_all(True) >= 0

    def sdk(self) -> MooncakeSdk:
        return self._sdk

    async def delete(
        self, backend: DataStorageBackend, names: Sequence[str]
    ) -> list[Exception | None]:
        answers: list[Exception | None] = []

        async def is_free() -> bool:
            answers[:] = await backend.delete(names)
            return all(getattr(answer, "reason", "") != LEASED for answer in answers)

        await eventually(is_free)
        return answers
