"""FaultyStore: a KVStore that fails on purpose, by a script or at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import TypeVar

from kvcm.core.errors import KvcmError, OutcomeUnknown, StaleFence, Unavailable
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Fence,
    KVStore,
    ShardCommit,
    ShardId,
    Table,
    Values,
)

T = TypeVar("T")


class Crash(BaseException):
    """The process died here. A BaseException, so that no handler of the code under test runs on."""


class Fault(Enum):
    """What goes wrong with one call, or with one shard of a commit or claim."""

    UNAVAILABLE = "nothing happened"
    UNKNOWN_LOST = "the outcome is unknown; it did not happen"
    UNKNOWN_DONE = "the outcome is unknown; it did happen"
    STALE = "refused by the fence, whoever holds it"
    CRASH_BEFORE = "the process dies before it happened"
    CRASH_AFTER = "the process dies after it happened"


class Op(Enum):
    """The calls a plan tells apart."""

    READ = "read"
    """get_many, acknowledged, scan (per page), sample, count, spaces."""
    COMMIT = "commit"
    CLAIM = "claim"
    DROP = "drop"


Plan = Callable[[Op, int], Fault | None]
"""Asked before each call with its kind and its number among those of its kind, from 1. Every
element of a commit or claim counts as one call, since every shard has an outcome of its own."""


def no_faults(op: Op, number: int) -> Fault | None:
    """The plan in which all goes well."""
    return None


def script(faults: Iterable[tuple[Op, int, Fault]]) -> Plan:
    """These calls fail like this: ``(Op.COMMIT, 3, Fault.CRASH_AFTER)``. All others go well."""
    planned = {(op, number): fault for op, number, fault in faults}
    return lambda op, number: planned.get((op, number))


def at_random(
    seed: int,
    rate: float,
    faults: Sequence[Fault] = (Fault.UNAVAILABLE, Fault.UNKNOWN_LOST, Fault.UNKNOWN_DONE),
) -> Plan:
    """Each call fails with probability ``rate`` (0 to 1), in one of the ways named."""
    chance = random.Random(seed)

    def plan(op: Op, number: int) -> Fault | None:
        return chance.choice(faults) if chance.random() < rate else None

    return plan


class FaultyStore:
    """Wraps a store; ``plan`` (which may be replaced at any time) says what fails.

    Faults strike single shards of a commit or a claim: the others of the same call go through,
    except after a crash, which ends the call where it stands, with the shards before it done. A
    read changes nothing, so every fault of it but a crash is Unavailable. A failed drop raises.
    After a crash every call raises Crash, until `restart`.

    Attributes:
        calls: calls so far, by kind.
        injected: what struck so far.
    """

    def __init__(self, store: KVStore, plan: Plan = no_faults, *, turns: int = 0) -> None:
        """
        Args:
            store: what does the work.
            plan: what fails.
            turns: turns of the event loop between doing a call and returning from it: the window
                in which others act on what the caller does not know yet.
        """
        self.store = store
        self.plan = plan
        self.read_ahead = store.read_ahead
        self.calls: dict[Op, int] = dict.fromkeys(Op, 0)
        self.injected: list[tuple[Op, int, Fault]] = []
        self._turns = turns
        self._crashed = False

    def restart(self) -> None:
        """The process came up again; the wrapped store kept what it had."""
        self._crashed = False

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        return await self._read(lambda: self.store.get_many(shard_keys, table))

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        if self.plan is no_faults and not self._crashed:
            # In one piece, so that its cost can be seen.
            self.calls[Op.COMMIT] += len(commits)
            whole = await self.store.commit(commits)
            await self._wait()
            return whole
        results: list[CommitResult] = []
        for commit in commits:
            done = await self._strike(Op.COMMIT, partial(self.store.commit, [commit]))
            results.append(CommitResult(error=done) if isinstance(done, Exception) else done[0])
        await self._wait()
        return results

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        if self.plan is no_faults and not self._crashed:
            self.calls[Op.CLAIM] += len(shards)
            whole = await self.store.claim(shards, fence)
            await self._wait()
            return whole
        answers: list[Claim | Exception] = []
        for shard in shards:
            done = await self._strike(Op.CLAIM, partial(self.store.claim, [shard], fence))
            answers.append(done if isinstance(done, Exception) else done[0])
        await self._wait()
        return answers

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        return await self._read(lambda: self.store.acknowledged(shards))

    async def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        pages = self.store.scan(shard, table, page=page)
        while (records := await self._read(lambda: anext(pages, None))) is not None:
            yield records

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        return await self._read(lambda: self.store.sample(shard, table, count))

    async def count(self, shard: ShardId, table: Table) -> int:
        return await self._read(lambda: self.store.count(shard, table))

    async def drop(self, shard: ShardId) -> None:
        done = await self._strike(Op.DROP, lambda: self.store.drop(shard))
        await self._wait()
        if done is not None:
            raise done

    async def spaces(self) -> list[bytes]:
        return await self._read(self.store.spaces)

    async def open(self) -> None:
        await self.store.open()

    async def close(self) -> None:
        await self.store.close()

    async def _read(self, call: Callable[[], Awaitable[T]]) -> T:
        done = await self._strike(Op.READ, call)
        await self._wait()
        if isinstance(done, Exception):
            raise Unavailable("injected: the read failed") from done
        return done

    async def _strike(self, op: Op, call: Callable[[], Awaitable[T]]) -> T | Exception:
        """Do the call, or not, as the plan says; its answer or the error to answer instead."""
        self.calls[op] += 1
        number = self.calls[op]
        fault = None if self._crashed else self.plan(op, number)
        if fault is not None:
            self.injected.append((op, number, fault))
        what = f"injected at {op.value} {number}"
        if self._crashed or fault is Fault.CRASH_BEFORE:
            self._crashed = True
            raise Crash(what)
        if fault is Fault.UNAVAILABLE:
            return Unavailable(what)
        if fault is Fault.UNKNOWN_LOST:
            return OutcomeUnknown(what)
        if fault is Fault.STALE:
            return StaleFence(what)
        done = await call()
        if fault is Fault.CRASH_AFTER:
            self._crashed = True
            raise Crash(what)
        return OutcomeUnknown(what) if fault is Fault.UNKNOWN_DONE else done

    async def _wait(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
