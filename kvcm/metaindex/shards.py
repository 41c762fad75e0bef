"""Claims and commits of one instance's shards (design.md §3 "Claims").

A shard is touched only after it was claimed. Every commit's counters are mirrored here and in the
ledger as soon as it is known to have been applied. After an unknown outcome, or a stale fence, the
shard counts as unclaimed; the next touch claims it with a higher number, takes its counters as they
are, and has its extents read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt

from kvcm.core.errors import CorruptRecord, KvcmError, OutcomeUnknown, StaleFence, Unavailable
from kvcm.core.limits import HOME_SHARDS
from kvcm.metaindex.ledger import Delta, from_counters
from kvcm.metaindex.store import (
    Claim,
    Fence,
    KVStore,
    Mutation,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
)
from kvcm.metaindex.turnstile import Turnstile

_MIX = 0x9E3779B97F4A7C15
_MIX_U64 = np.uint64(_MIX)
_MASK = (1 << 64) - 1


def shard_of(key: int, shard_count: int) -> int:
    """The row shard of a key; ``shard_count`` is a power of two."""
    return ((key * _MIX) & _MASK) >> 40 & (shard_count - 1)


def shards_of(keys: npt.NDArray[np.int64], shard_count: int) -> npt.NDArray[np.int64]:
    """``shard_of`` of many keys at once."""
    mixed = keys.view(np.uint64) * _MIX_U64
    return ((mixed >> np.uint64(40)) & np.uint64(shard_count - 1)).astype(np.int64)


def by_shard(
    keys: npt.NDArray[np.int64], shard_count: int
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
    """Keys in shard order.

    Returns:
        Indexes into ``keys``, shard by shard, and for each shard that any key lies in its number
        and the [start, end) of its indexes.
    """
    numbers = shards_of(keys, shard_count)
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    cuts = (np.flatnonzero(np.diff(in_order)) + 1).tolist()
    starts = [0, *cuts] if len(in_order) else []
    ends = [*cuts, len(in_order)]
    held = in_order[starts].tolist()
    return order, list(zip(held, starts, ends, strict=False))


class ClaimNumbers:
    """Fences of this leader: one epoch, claims numbered upwards."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._n = 0

    def next(self) -> Fence:
        """A fence higher than all before."""
        self._n += 1
        return Fence(self.epoch, self._n)


class Shards:
    """The shards of one instance.

    Args:
        count_changed: called with (storage, delta) for every change of the instance's usage.
        reload: called after a home shard was claimed again; re-reads its extents.
        lost: called with a shard number whose store went back in time.
        damaged: called with the error of a shard whose own record does not parse; what the shard
            held is dropped.
    """

    def __init__(
        self,
        store: KVStore,
        space: bytes,
        numbers: ClaimNumbers,
        count_changed: Callable[[str, Delta], None],
        reload: Callable[[int], Awaitable[None]],
        lost: Callable[[int], None],
        damaged: Callable[[CorruptRecord], None],
    ) -> None:
        self._store = store
        self._space = space
        self._numbers = numbers
        self._count_changed = count_changed
        self._reload = reload
        self._lost = lost
        self._damaged = damaged
        self._fences: dict[int, Fence] = {}
        self._known: dict[int, dict[bytes, int]] = {}
        self._commits: dict[int, int] = {}
        self._counted: dict[int, Fence] = {}
        """Whose claim brought a shard's counters: they hold all that was committed before it."""
        self._suspect: set[int] = set()
        self._uncertain: dict[int, list[tuple[str, Delta]]] = {}
        """Reservations of commits that may have taken effect, until a claim tells."""
        self._claiming = asyncio.Lock()
        self.turnstile = Turnstile()

    def id(self, number: int) -> ShardId:
        """The store's name of a shard."""
        return ShardId(self._space, number)

    async def ensure(self, numbers: Iterable[int]) -> None:
        """Claim those that are not claimed yet.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: a claim failed.
        """
        fences = self._fences
        wanted = list(dict.fromkeys(numbers))
        # Again, since one that was claimed may come into doubt while the others are.
        while any(n not in fences for n in wanted):
            async with self._claiming:
                await self._claim([n for n in wanted if n not in fences])

    async def reach(self, numbers: Sequence[int]) -> set[int]:
        """Those of ``numbers`` that are claimed, after trying to claim the others.

        Raises:
            Unavailable, OutcomeUnknown: none is, and it is not only these that are away.
            StaleFence: a claim met another leader's.
        """
        try:
            await self.ensure(numbers)
        except (Unavailable, OutcomeUnknown):
            reached = self._fences.keys() & set(numbers)
            if not reached and not await self._are_away_alone(numbers):
                raise
            return reached
        return set(numbers)

    async def _are_away_alone(self, numbers: Sequence[int]) -> bool:
        """Whether the store answers for other shards, though for none of these.

        Raises:
            Unavailable: it answers for none.
        """
        asked = [(self.id(number), [b"-"]) for number in numbers]
        answers = await self._store.get_many(asked, Table.ROWS)
        return all(isinstance(answer, KvcmError) for answer in answers)

    async def confirm(self, number: int) -> None:
        """Make sure that what is known of a shard stays, though its server be lost.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: it is not sure now; call again.
        """
        await self.ensure((number,))
        known, fence = self._commits[number], self._fences[number]
        (safe,) = await self._store.acknowledged([self.id(number)])
        if isinstance(safe, KvcmError):
            raise safe
        if safe < known:
            self._went_back(number, fence)
            raise Unavailable(f"the index store lost commits of shard {number}")

    def _went_back(self, number: int, fence: Fence) -> None:
        """The store knows less of a shard than it had acknowledged: all of it is in doubt."""
        if self._fences.get(number) == fence:
            self._lost(number)
            # Said once; the claim to come takes what number there is.
            self._commits.pop(number, None)
            self._doubt(number, fence)

    async def _claim(self, missing: list[int]) -> None:
        if not missing:
            return
        fence = self._numbers.next()
        try:
            claims = await self._store.claim([self.id(n) for n in missing], fence)
        except BaseException:
            # Cancelled, too: it may have taken effect.
            self._doubt_all(missing)
            raise
        for i, answer in enumerate(claims):
            if isinstance(answer, CorruptRecord):
                claims[i] = await self._start_afresh(missing[i], fence, answer)
        failure: Exception | None = None
        again: list[int] = []
        for number, claim in zip(missing, claims, strict=True):
            if isinstance(claim, Exception):
                failure = claim
                if not isinstance(claim, Unavailable):
                    self._doubt_all((number,))
                continue
            if claim.commit_number < self._commits.get(number, 0):
                self._lost(number)
                self._suspect.add(number)
            self._commits[number] = claim.commit_number
            self._take_counters(number, dict(claim.counters))
            self._counted[number] = fence
            if number in self._suspect:
                again.append(number)
            else:
                self._fences[number] = fence
        for number in again:
            # Nobody commits to it before it is read again, and it stays in doubt if that fails.
            if number < HOME_SHARDS:
                await self._reload(number)
            self._suspect.discard(number)
            self._fences[number] = fence
        if failure is not None:
            raise failure

    async def _start_afresh(
        self, number: int, fence: Fence, error: CorruptRecord
    ) -> Claim | Exception:
        """Its counters are gone, so usage could never be right again: the shard begins empty. Its
        blocks become misses, their files fall to the repair sweep."""
        self._damaged(error)
        self._suspect.add(number)
        self._commits.pop(number, None)
        try:
            await self._store.drop(self.id(number))
            (claim,) = await self._store.claim([self.id(number)], fence)
        except KvcmError as failure:
            return failure
        return claim

    def release(self, number: int, storage: str, delta: Delta) -> None:
        """Take back what was counted ahead of a commit that failed. If it may have taken effect
        all the same, it stays counted until the shard's counters are read again: others must not
        be given the room."""
        if number in self._suspect:
            self._uncertain.setdefault(number, []).append((storage, delta))
        else:
            self._count_changed(storage, -delta)

    def release_all(self) -> None:
        """The instance is gone: whatever may have taken effect went with it."""
        for number in list(self._uncertain):
            self._release(number)

    def _release(self, number: int) -> None:
        for storage, delta in self._uncertain.pop(number, ()):
            self._count_changed(storage, -delta)

    def _take_counters(self, number: int, counters: dict[bytes, int]) -> None:
        self._release(number)
        before = from_counters(self._known.get(number, {}))
        after = from_counters(counters)
        self._known[number] = counters
        for storage in {**before, **after}:
            delta = after.get(storage, Delta()) + -before.get(storage, Delta())
            self._count_changed(storage, delta)

    async def commit(
        self, parts: Sequence[tuple[int, Sequence[Mutation]]]
    ) -> list[Sequence[Outcome]]:
        """Commit to several shards, each atomically.

        Returns:
            Outcomes per part, in order.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: at least one shard; others may have applied.
        """
        async with self.turnstile.passing(parts):
            return await self._commit_all(parts)

    async def _commit_all(
        self, parts: Sequence[tuple[int, Sequence[Mutation]]]
    ) -> list[Sequence[Outcome]]:
        await self.ensure(number for number, _ in parts)
        outcomes: list[Sequence[Outcome]] = []
        for answer in await self._commit(parts):
            if isinstance(answer, Exception):
                raise answer
            outcomes.append(answer)
        return outcomes

    @asynccontextmanager
    async def alone(self, number: int) -> AsyncIterator[Mapping[bytes, int]]:
        """Hold back all commits of a shard but those of ``commit_alone``; its counters as stored.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the shard cannot be claimed.
        """
        async with self.turnstile.alone(number):
            await self.ensure((number,))
            async with self._claiming:
                # What is known here was added up from commits; a claim tells what is stored.
                await self._claim([number])
            yield dict(self._known[number])

    async def commit_alone(self, number: int, mutation: Mutation) -> Outcome:
        """Commit as the one who is ``alone`` with the shard. Raises as ``commit`` does."""
        ((outcome,),) = await self._commit_all([(number, [mutation])])
        return outcome

    async def commit_each(
        self, parts: Sequence[tuple[int, Sequence[Mutation]]]
    ) -> list[Sequence[Outcome] | Exception]:
        """As ``commit``, for parts that have nothing to do with each other.

        Returns:
            Per part, in order, its outcomes, or the error that kept it from being committed.
        """
        try:
            async with self.turnstile.passing(parts):
                reached = await self.reach([number for number, _ in parts])
                done = iter(await self._commit([part for part in parts if part[0] in reached]))
        except KvcmError as error:
            return [error for _ in parts]
        away = "shard {} of the index store cannot be reached"
        return [next(done) if n in reached else Unavailable(away.format(n)) for n, _ in parts]

    async def _commit(
        self, parts: Sequence[tuple[int, Sequence[Mutation]]]
    ) -> list[Sequence[Outcome] | Exception]:
        """Commit to claimed shards; the answer of each part."""
        fences = {n: self._fences[n] for n, _ in parts}
        # Answers may come in another order than commits were made: only what was known before
        # a commit was sent tells whether the store went back.
        known = {n: self._commits[n] for n, _ in parts}
        commits = [ShardCommit(self.id(n), fences[n], muts) for n, muts in parts]
        answers: list[Sequence[Outcome] | Exception] = []
        try:
            results = await self._store.commit(commits)
        except Unavailable:
            raise
        except BaseException:
            # Cancelled, too: it may have taken effect.
            for number, fence in fences.items():
                self._doubt(number, fence)
            raise
        for (number, mutations), result in zip(parts, results, strict=True):
            if result.error is not None:
                if isinstance(result.error, OutcomeUnknown | StaleFence | CorruptRecord):
                    self._doubt(number, fences[number])
                if isinstance(result.error, StaleFence) and not result.error.epoch:
                    # The store lost the claim. It began empty, or went back far: the other shards
                    # are asked now, not one by one at the cost of a refused call each.
                    for other, fence in list(self._fences.items()):
                        self._doubt(other, fence)
                answers.append(result.error)
                continue
            has_applied = Outcome.APPLIED in result.outcomes
            if result.commit_number < known[number] + has_applied:
                self._went_back(number, fences[number])
            elif self._counted[number] == fences[number]:
                self._commits[number] = max(self._commits.get(number, 0), result.commit_number)
                self._applied(number, mutations, result.outcomes)
            answers.append(result.outcomes)
        return answers

    def _doubt_all(self, numbers: Iterable[int]) -> None:
        """A new claim of shards that were claimed before may have replaced their fences."""
        for number in numbers:
            if number in self._fences:
                self._doubt(number, self._fences[number])

    def _doubt(self, number: int, fence: Fence) -> None:
        # A commit sent before the latest claim says nothing about that claim.
        if self._fences.get(number) == fence:
            del self._fences[number]
            self._suspect.add(number)

    def _applied(
        self, number: int, mutations: Sequence[Mutation], outcomes: Sequence[Outcome]
    ) -> None:
        changes: dict[bytes, int] = {}
        for mutation, outcome in zip(mutations, outcomes, strict=True):
            if outcome is Outcome.APPLIED:
                for key, change in mutation.counters.items():
                    changes[key] = changes.get(key, 0) + change
        known = self._known[number]
        for key, change in changes.items():
            known[key] = known.get(key, 0) + change
        for storage, delta in from_counters(changes).items():
            self._count_changed(storage, delta)

    @property
    def doubted(self) -> list[int]:
        """Shards whose last outcome is unknown; ``ensure`` clears it up."""
        return sorted(self._suspect)

    @property
    def claimed(self) -> int:
        """Shards claimed now."""
        return len(self._fences)

    def usage(self) -> dict[str, Delta]:
        """Sum of all claimed shards' counters by storage."""
        total: dict[str, Delta] = {}
        for counters in self._known.values():
            for storage, delta in from_counters(counters).items():
                total[storage] = total.get(storage, Delta()) + delta
        return {k: v for k, v in total.items() if v != Delta()}
