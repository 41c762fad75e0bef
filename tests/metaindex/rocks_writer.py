"""Writes numbered commits to a RocksStore for ever, printing each number once acknowledged."""

from __future__ import annotations

import asyncio
import sys

from kvcm.metaindex.store import Mutation, ShardCommit, ShardId, Table, Write
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.testing.contracts.kvstore import FENCE


async def main(path: str, sync: str) -> None:
    store = RocksStore(path, sync=sync == "1", write_buffer_bytes=1 << 20)
    await store.open()
    shards = [ShardId(b"space", number) for number in range(4)]
    await store.claim(shards, FENCE)
    i = 0
    while True:
        i += 1
        writes = [Write(Table.ROWS, b"%d-%d" % (i, j), b"%d" % i) for j in range(10)]
        mutation = Mutation(writes, counters={b"records": len(writes)})
        results = await store.commit([ShardCommit(shard, FENCE, [mutation]) for shard in shards])
        assert all(result.error is None for result in results)
        sys.stdout.write(f"{i}\n")
        sys.stdout.flush()


asyncio.run(main(*sys.argv[1:]))
