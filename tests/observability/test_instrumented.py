"""The store that times its calls is a store like the one below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcm.core.errors import Unavailable
from kvcm.metaindex.store import KVStore, ShardId, Table
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.observability.instrumented import InstrumentedStore
from kvcm.testing.clock import SimClock
from kvcm.testing.contracts.kvstore import FENCE, KVStoreContract, claim

SHARD = ShardId(b"u", 0)


class TestInstrumentedStore(KVStoreContract):
    persistent = False

    def make_store(self, directory: Path) -> KVStore:
        return InstrumentedStore(MemoryStore(), SimClock())


def counts(store: InstrumentedStore) -> dict[tuple[str, str], float]:
    (family,) = store.collect()
    return {
        (s.labels["operation"], s.labels["outcome"]): s.value
        for s in family.samples
        if s.name.endswith("_count")
    }


async def test_calls_are_counted_by_operation_and_outcome() -> None:
    store = InstrumentedStore(MemoryStore(), SimClock())
    await store.open()
    await claim(store, SHARD)
    assert await store.get_many([(SHARD, [b"k"])], Table.ROWS) == [[None]]
    await store.claim([SHARD], FENCE)
    assert counts(store) == {("claim", "ok"): 1, ("get_many", "ok"): 1, ("claim", "failed"): 1}


async def test_what_raises_has_failed() -> None:
    class Away(MemoryStore):
        async def spaces(self) -> list[bytes]:
            raise Unavailable("away")

    store = InstrumentedStore(Away(), SimClock())
    with pytest.raises(Unavailable):
        await store.spaces()
    assert counts(store) == {("spaces", "failed"): 1}
