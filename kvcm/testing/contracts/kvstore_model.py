"""Random programs against a KVStore, checked by a model of dictionaries (hypothesis)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvcm.core.clock import SystemClock
from kvcm.core.errors import StaleFence
from kvcm.metaindex.store import (
    Claim,
    Compare,
    Fence,
    KVStore,
    Mutation,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Write,
)

T = TypeVar("T")
TAILS = [b"", b"\0", b"\0\x01", b"\x01", b"\xff", b"\xff\xff"]
NUMBERS = [0, 1, 255, 256]

keys = st.one_of(
    st.sampled_from([b"", b"\0", b"\x01", b"\x01a", b"\xff", b"\xff\xff"]), st.binary(max_size=3)
)
values = st.binary(max_size=4)
tables = st.sampled_from([Table.ROWS, Table.EXTENTS, Table.TRASH])
shards = st.tuples(st.sampled_from(TAILS), st.sampled_from(NUMBERS))
compares = st.builds(Compare, tables, keys, st.none() | values, st.booleans())
mutations = st.builds(
    Mutation,
    st.lists(st.builds(Write, tables, keys, st.none() | values), max_size=4),
    st.lists(compares, max_size=2),
    st.dictionaries(st.sampled_from([b"", b"n", b"m"]), st.integers(-3, 3), max_size=2),
)


class ModelShard:
    """A shard as the contract describes it."""

    def __init__(self, fence: Fence) -> None:
        self.fence = fence
        self.number = 0
        self.counters: dict[bytes, int] = {}
        self.records: dict[tuple[Table, bytes], bytes] = {}

    def apply(self, mutation: Mutation) -> Outcome:
        for table, key, expected, whole in mutation.compare:
            value = self.records.get((table, key))
            if expected is None:
                holds = value is None
            else:
                holds = value is not None and value[: None if whole else len(expected)] == expected
            if not holds:
                return Outcome.CONFLICT
        for table, key, put in mutation.writes:
            self.records.pop((table, key), None)
            if put is not None:
                self.records[table, key] = put
        for name, delta in mutation.counters.items():
            self.counters[name] = self.counters.get(name, 0) + delta
        self.counters = {name: total for name, total in self.counters.items() if total}
        return Outcome.APPLIED

    def table(self, table: Table) -> dict[bytes, bytes]:
        return {key: value for (t, key), value in self.records.items() if t is table}


def run_against_model(make_store: Callable[[], KVStore]) -> None:
    """Run random programs on one opened store; each works in spaces of its own.

    Raises:
        AssertionError: the store and the model disagree; hypothesis prints a short program.
    """
    with asyncio.Runner() as runner:
        store = make_store()
        runner.run(store.open())
        try:
            # Any callable that makes a machine will do; hypothesis declares a class.
            run_state_machine_as_test(
                partial(StoreMachine, store, runner.run),  # type: ignore[arg-type]
                settings=settings(
                    max_examples=40,
                    stateful_step_count=25,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    # What a shrunk example of another store did says nothing about this one.
                    database=None,
                ),
            )
        finally:
            runner.run(store.close())


class StoreMachine(RuleBasedStateMachine):
    """One program."""

    def __init__(self, store: KVStore, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        super().__init__()
        self.store = store
        self.run = run
        self.base = SystemClock().random_bytes(10)
        self.model: dict[ShardId, ModelShard] = {}

    def shard(self, where: tuple[bytes, int]) -> ShardId:
        return ShardId(self.base + where[0], where[1])

    @rule(where=shards, epoch=st.integers(1, 3), n=st.integers(0, 2))
    def claim(self, where: tuple[bytes, int], epoch: int, n: int) -> None:
        shard, fence = self.shard(where), Fence(epoch, n)
        (answer,) = self.run(self.store.claim([shard], fence))
        held = self.model.get(shard)
        if held is not None and fence <= held.fence:
            assert isinstance(answer, StaleFence)
            assert answer.epoch == held.fence.epoch
            return
        held = self.model.setdefault(shard, ModelShard(fence))
        held.fence = fence
        assert isinstance(answer, Claim)
        assert answer.commit_number == held.number
        assert answer.counters == held.counters

    @rule(
        wheres=st.lists(shards, min_size=1, max_size=3),
        batch=st.lists(mutations, max_size=4),
        off_by=st.sampled_from([0, 0, 0, 0, -1, 1]),
        claimed=st.booleans(),
    )
    def commit(
        self,
        wheres: list[tuple[bytes, int]],
        batch: list[Mutation],
        off_by: int,
        claimed: bool,
    ) -> None:
        targets = [self.shard(where) for where in wheres]
        if claimed and self.model:
            # Steered to claimed shards, or most commits would only meet the fence.
            have = sorted(self.model)
            targets = [have[where[1] % len(have)] for where in wheres]
        commits: list[ShardCommit] = []
        for shard in targets:
            held = self.model.get(shard)
            fence = held.fence if held is not None else Fence(1, 1)
            commits.append(ShardCommit(shard, Fence(fence.epoch, fence.n + off_by), batch))
        if any(commit.fence.n < 0 for commit in commits):
            return
        for commit, result in zip(commits, self.run(self.store.commit(commits)), strict=True):
            held = self.model.get(commit.shard)
            if held is None or held.fence != commit.fence:
                assert isinstance(result.error, StaleFence)
                continue
            outcomes = [held.apply(mutation) for mutation in batch]
            assert result.error is None
            assert list(result.outcomes) == outcomes
            if Outcome.APPLIED in outcomes:
                assert result.commit_number > held.number
                held.number = result.commit_number
            assert result.commit_number == held.number

    @rule(where=shards)
    def drop(self, where: tuple[bytes, int]) -> None:
        self.run(self.store.drop(self.shard(where)))
        self.model.pop(self.shard(where), None)

    @rule(wheres=st.lists(shards, max_size=4), table=tables, wanted=st.lists(keys, max_size=5))
    def get_many(self, wheres: list[tuple[bytes, int]], table: Table, wanted: list[bytes]) -> None:
        targets = [self.shard(where) for where in wheres]
        got = self.run(self.store.get_many([(shard, wanted) for shard in targets], table))
        assert got == [[self.table(shard, table).get(key) for key in wanted] for shard in targets]

    @rule(where=shards, table=tables, count=st.integers(0, 5))
    def sample(self, where: tuple[bytes, int], table: Table, count: int) -> None:
        shard = self.shard(where)
        picked = self.run(self.store.sample(shard, table, count))
        records = self.table(shard, table)
        assert len(dict(picked)) == len(picked) == min(count, len(records))
        assert dict(picked).items() <= records.items()

    @rule()
    def spaces(self) -> None:
        mine = [space for space in self.run(self.store.spaces()) if space.startswith(self.base)]
        assert sorted(mine) == sorted({shard.space for shard in self.model})

    @rule()
    def every_table_holds_exactly_its_records(self) -> None:
        for shard in self.model:
            for table in Table:
                records = self.table(shard, table)
                assert self.run(self.scan(shard, table)) == records
                assert self.run(self.store.count(shard, table)) == len(records)

    def table(self, shard: ShardId, table: Table) -> dict[bytes, bytes]:
        held = self.model.get(shard)
        return held.table(table) if held is not None else {}

    async def scan(self, shard: ShardId, table: Table) -> dict[bytes, bytes]:
        return dict([record async for page in self.store.scan(shard, table) for record in page])

    def teardown(self) -> None:
        self.every_table_holds_exactly_its_records()
        for shard in self.model:
            self.run(self.store.drop(shard))
