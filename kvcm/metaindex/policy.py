"""What makes an extent cold: LRU, LFU and TTL. Pure; the simulator uses the same.

A policy turns what is known of an extent's use into one number, its *score*; the lowest goes first.
Scores of one policy only ever rise, and their order never changes by the mere passing of time, so
nothing has to be re-sorted while nobody asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvcm.core.types import CacheReclaimStrategy, ReclaimPolicy, TtlSince

LFU_HALF_LIFE_TURNOVERS = 0.25
"""A use counts half after the group has written this many times its capacity; chosen by
benchmarks/policies.py."""

_LONG_AGO = 1e15


class Used(Protocol):
    """What a policy looks at. Times are epoch milliseconds; ``heat`` as ``warmed`` makes it."""

    stamp_ms: int
    finished_ms: int
    heat: float


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of a group.

    ``ttl_ms``: age at which TTL lets go by itself, 0 = never. ``since_finish``: the age counts from
    the finish of the write, and not from the last use.
    """

    kind: ReclaimPolicy = ReclaimPolicy.LRU
    ttl_ms: int = 0
    since_finish: bool = False

    @property
    def counts(self) -> bool:
        """Whether every use must be counted in ``heat``."""
        return self.kind is ReclaimPolicy.LFU

    def score(self, used: Used) -> float:
        """What extents are ordered by."""
        if self.kind is ReclaimPolicy.LFU:
            # What was used before uses were counted goes first, the least recently used first.
            return used.heat if used.heat > -math.inf else used.stamp_ms - _LONG_AGO
        return used.finished_ms if self.since_finish else used.stamp_ms


LRU = Policy()


def policy_of(strategy: CacheReclaimStrategy | None) -> Policy:
    """The policy that a group is configured with; LRU when none is (wire.md §1)."""
    kind = strategy.reclaim_policy if strategy is not None else ReclaimPolicy.UNSPECIFIED
    if strategy is None or kind in (ReclaimPolicy.UNSPECIFIED, ReclaimPolicy.LRU):
        return LRU
    if kind is ReclaimPolicy.LFU:
        return Policy(kind)
    since_finish = strategy.ttl_since is TtlSince.FINISH
    return Policy(ReclaimPolicy.TTL, strategy.ttl_seconds * 1000, since_finish)


def warmed(heat: float, age: float) -> float:
    """Heat after one more use at ``age``: log2(2^heat + 2^age).

    A use at age a weighs 2^a, for ever: what ages is the weight of *older* uses beside newer ones,
    so heats of extents that nobody touches keep their order. ``age`` counts half-lives and never
    goes back; -inf is the heat of what was never used.
    """
    low, high = (heat, age) if heat < age else (age, heat)
    # Below 2^-50 of the other it would be lost in the sum anyway.
    return high + math.log2(1.0 + 2.0 ** (low - high)) if high - low < 50.0 else high
