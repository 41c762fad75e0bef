"""What the stores share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, StaleFence
from kvcm.core.limits import SHARDS_MAX, SPACE_BYTES_MAX, STEP_S_MAX
from kvcm.metaindex.store import Fence, ShardId

T = TypeVar("T")


class Turn:
    """Tells when a piece of work has held the event loop long enough: half of STEP_S_MAX, which
    leaves room for what it does between two looks.
    """

    __slots__ = ("_clock", "_end")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end = clock.monotonic() + STEP_S_MAX / 2

    def is_over(self) -> bool:
        """Whether to `give` now."""
        return self._clock.monotonic() > self._end

    async def give(self) -> None:
        """Let the other tasks run; the next turn begins."""
        await asyncio.sleep(0)
        self._end = self._clock.monotonic() + STEP_S_MAX / 2


def check_shard(shard: ShardId) -> None:
    """Raise InvalidArgument when the space's length or the number is out of bounds."""
    if not 1 <= len(shard.space) <= SPACE_BYTES_MAX:
        raise InvalidArgument(
            f"a space has 1 to {SPACE_BYTES_MAX} bytes, not {len(shard.space)}: {shard.space!r}"
        )
    if not 0 <= shard.number < SHARDS_MAX:
        raise InvalidArgument(f"a shard's number is 0 to {SHARDS_MAX - 1}, not {shard.number}")


def stale(shard: ShardId, fence: Fence, held: Fence | None) -> StaleFence:
    """The refusal of ``fence``; ``held`` is the shard's, None when nobody claimed it."""
    where = f"shard {shard.number} of space {shard.space.hex()}"
    if held is None:
        return StaleFence(f"{where} is not claimed; refused fence {tuple(fence)}")
    return StaleFence(
        f"{where} is claimed with fence {tuple(held)}; refused fence {tuple(fence)}",
        epoch=held.epoch,
    )


def matches(value: bytes | None, expected: bytes | None, whole: bool) -> bool:
    """Whether a record's value is what a `Compare` asks for."""
    if value is None or expected is None:
        return value is expected
    return value == expected if whole else value.startswith(expected)


def add_counters(counters: dict[bytes, int], deltas: Mapping[bytes, int]) -> None:
    """Add deltas in place; a counter that reaches 0 goes."""
    for name, delta in deltas.items():
        total = counters.get(name, 0) + delta
        if total:
            counters[name] = total
        else:
            counters.pop(name, None)


def below(limit: int, clock: Clock) -> int:
    """A random number from 0 to ``limit`` - 1, ``limit`` at most 2^64."""
    return int.from_bytes(clock.random_bytes(16), "big") % limit


def pick(items: list[T], count: int, clock: Clock) -> list[T]:
    """``count`` random items, or all; reorders ``items``."""
    count = max(0, min(count, len(items)))
    for i in range(count):
        j = i + below(len(items) - i, clock)
        items[i], items[j] = items[j], items[i]
    return items[:count]
