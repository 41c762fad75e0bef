"""ValkeyStore keeps the KVStore contract."""

from pathlib import Path

import pytest

from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.testing.contracts.kvstore import KVStoreContract
from kvcm.testing.servers_valkey import ValkeyServer


class TestValkeyStore(KVStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, shared_valkey: ValkeyServer) -> None:
        self.url = shared_valkey.url

    def make_store(self, directory: Path) -> KVStore:
        return ValkeyStore(self.url)
