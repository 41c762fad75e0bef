"""RocksStore keeps the KVStore contract."""

from pathlib import Path

from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.testing.contracts.kvstore import KVStoreContract


class TestRocksStore(KVStoreContract):
    def make_store(self, directory: Path) -> KVStore:
        return RocksStore(directory / "index", cache_bytes=8 << 20, write_buffer_bytes=4 << 20)
