"""ValkeyStore keeps the KVStore contract on a cluster of three servers."""

from pathlib import Path

import pytest

from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.testing.contracts.kvstore import KVStoreContract
from kvcm.testing.servers_valkey import ValkeyCluster


class TestValkeyClusterStore(KVStoreContract):
    @pytest.fixture(autouse=True)
    def _cluster(self, shared_cluster: ValkeyCluster) -> None:
        self.url = shared_cluster.url

    def make_store(self, directory: Path) -> KVStore:
        return ValkeyStore(self.url)
