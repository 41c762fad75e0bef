"""The KVStore contract: bytes in tables within shards. A store knows no domain words.

A *shard* is ``(space, number)``: the space is an instance's uid, the number its shard. Everything
of a shard changes in one atomic commit that also checks the fence. Records whose writers compare
carry their version as the first 8 bytes of the value; versions are tokens chosen by the writer, so
a retry that finds its own new version knows that it succeeded before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from kvcm.core.errors import KvcmError

VERSION_BYTES = 8


class Table(IntEnum):
    """Tables of a shard."""

    ROWS = 1
    EXTENTS = 2
    STATES = 3
    DUE = 4
    TRASH = 5


class ShardId(NamedTuple):
    """A shard: the instance's uid (1 to 32 bytes) and a number from 0 to 1,023."""

    space: bytes
    number: int


class Fence(NamedTuple):
    """Who may commit: (leadership epoch, claim number). A higher one excludes all lower ones."""

    epoch: int
    n: int


class Compare(NamedTuple):
    """What a mutation requires of one record before it applies.

    ``expected`` None: the record is absent. Otherwise the record exists and its first
    ``len(expected)`` bytes equal ``expected`` (a version); with ``whole`` the entire value does.
    """

    table: Table
    key: bytes
    expected: bytes | None
    whole: bool = False


class Write(NamedTuple):
    """Put (``value``) or delete (None) one record."""

    table: Table
    key: bytes
    value: bytes | None


PlainWrite = tuple[Table, bytes, bytes | None]
"""A ``Write``, or the same as a plain tuple where there are thousands."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Writes and counter changes that apply together, or not at all when a compare fails.

    Compares look at the shard as the mutations before left it, before this one's own writes. Of two
    writes of one record the later counts. Counters are signed 64-bit sums and may be negative.
    """

    writes: Sequence[PlainWrite] = ()
    compare: Sequence[Compare] = ()
    counters: Mapping[bytes, int] = field(default_factory=dict)


class Outcome(IntEnum):
    """What became of one mutation."""

    APPLIED = 1
    CONFLICT = 2


@dataclass(frozen=True, slots=True)
class ShardCommit:
    """Mutations for one shard, applied in order, atomically, if the fence holds."""

    shard: ShardId
    fence: Fence
    mutations: Sequence[Mutation]


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer to a claim: the last commit number (0 at first) and all counters of the shard."""

    commit_number: int
    counters: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Per shard: one outcome a mutation and the commit number, or the error that refused it all.

    ``error`` is StaleFence, Unavailable (nothing happened) or OutcomeUnknown; CorruptRecord when
    the shard's own meta record does not parse, InvalidArgument when the shard is out of bounds.
    """

    outcomes: Sequence[Outcome] = ()
    commit_number: int = 0
    error: Exception | None = None


Values: TypeAlias = list[bytes | None]
"""Records of one shard, position by position; None = absent."""


def values_of(answers: Sequence[Values | KvcmError]) -> list[Values]:
    """The answers of `KVStore.get_many` for a caller who needs them all.

    Raises:
        Unavailable, CorruptRecord: the first shard that has none.
    """
    values: list[Values] = []
    for answer in answers:
        if isinstance(answer, KvcmError):
            raise answer
        values.append(answer)
    return values


class KVStore(Protocol):
    """What an index store offers. All methods may raise Unavailable; reads need no fence.

    Batches answer position by position. Implementations neither retry nor log nor count.
    """

    read_ahead: int
    """Rows worth fetching per cold read: 1 for an embedded store, more behind a network."""

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        """Values per shard and key, in order; None = absent. One round trip.

        A shard that alone cannot be reached has its Unavailable in place of its values (or
        CorruptRecord, when its table does not read); when none can, the call raises.
        """

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        """Apply each shard's mutations atomically; one result per element, in order.

        A fence lower than the shard's answers StaleFence; an equal one passes; a higher one than
        the claimed one is StaleFence too (claim first), and so is any on a shard that nobody
        claimed or that was dropped. A counter that reaches 0 is dropped. The commit number grows
        with every element that applied a mutation; one of which nothing applied (or that is empty)
        leaves it and only checks the fence. Elements for the same shard run in order.
        """

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        """Raise each shard's fence to ``fence`` (a lower or equal one answers StaleFence).

        One answer per shard, in order: the Claim, or an error as in `CommitResult`.
        """

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        """Per shard a commit number whose commits, and all before, outlive the loss of one server.

        What every replica asked for has; an embedded store has one copy, and answers its latest
        number. 0 for a shard that nobody claimed; Unavailable where too few replicas answered.
        """

    def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """All records of a table in pages; records changed meanwhile may or may not appear."""

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        """Up to ``count`` records picked roughly at random."""

    async def count(self, shard: ShardId, table: Table) -> int:
        """Records of a table."""

    async def drop(self, shard: ShardId) -> None:
        """Remove everything of a shard, fence included. Idempotent."""

    async def spaces(self) -> list[bytes]:
        """Spaces that hold any record or fence."""

    async def open(self) -> None:
        """Connect, or take the lock of an embedded store.

        Raises:
            ConfigError: another process holds the store, or the path cannot be used.
        """

    async def close(self) -> None:
        """Flush and release. Idempotent."""
