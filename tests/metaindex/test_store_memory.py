"""MemoryStore keeps the KVStore contract."""

from pathlib import Path

from kvcm.metaindex.store import KVStore, ShardId
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.testing.contracts.kvstore import KVStoreContract, apply, claim, get, puts


class TestMemoryStore(KVStoreContract):
    persistent = False

    def make_store(self, directory: Path) -> KVStore:
        return MemoryStore()


async def test_a_restored_snapshot_forgets_what_came_after_it() -> None:
    store, shard = MemoryStore(), ShardId(b"space", 0)
    await claim(store, shard)
    await apply(store, shard, puts({b"k": b"old"}, counters={b"n": 1}))
    snapshot = store.snapshot()
    for _ in range(2):
        await apply(store, shard, puts({b"k": b"new"}, counters={b"n": 1}))
        store.restore(snapshot)
        assert await get(store, shard, b"k") == [b"old"]
