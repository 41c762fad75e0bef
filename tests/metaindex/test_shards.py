"""What a leader knows of its shards' counters, when answers come late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.shards import ClaimNumbers, Shards
from kvcm.metaindex.store import CommitResult, Mutation, ShardCommit
from kvcm.metaindex.stores.memory import MemoryStore


class LateAnswers(MemoryStore):
    """Commits take effect at once; their answers come when ``told``."""

    def __init__(self) -> None:
        super().__init__()
        self.done = asyncio.Event()
        self.told = asyncio.Event()

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        results = await super().commit(commits)
        self.done.set()
        await self.told.wait()
        return results


async def test_a_commit_answered_while_its_shard_is_read_again_counts_once() -> None:
    store = LateAnswers()
    await store.open()
    reloading, read = asyncio.Event(), asyncio.Event()

    async def reload(_number: int) -> None:
        reloading.set()
        await read.wait()

    counted: list[Delta] = []
    shards = Shards(
        *(store, b"i", ClaimNumbers(1)),
        *(lambda _storage, delta: counted.append(delta), reload),
        *(lambda _number: None, lambda _error: None),
    )
    usage = Delta(serving_bytes=64, serving_blocks=1)
    mutation = Mutation(counters=to_counters("nfs", usage))
    await shards.ensure([0])
    commit = asyncio.ensure_future(shards.commit([(0, [mutation])]))
    await store.done.wait()
    # Another commit of the shard has an unknown outcome: it is claimed again, and read.
    shards._doubt(0, shards._fences[0])
    again = asyncio.ensure_future(shards.ensure([0]))
    await reloading.wait()
    store.told.set()
    await commit
    read.set()
    await again
    assert shards.usage() == {"nfs": usage}
    assert sum(delta.serving_blocks for delta in counted) == 1
