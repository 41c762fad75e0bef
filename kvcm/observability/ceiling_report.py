"""The ceiling beside the measured hit rate, and what stands between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvcm.observability import tally
from kvcm.observability.distinct import STANDARD_ERROR
from kvcm.observability.tally import CAUSES, Cause
from kvcm.observability.windows import Window

UNKNOWN = "unknown"
"""Cause of misses of which none was in the sample."""
CAUSE_NAMES = (*(cause.value for cause in CAUSES), UNKNOWN)
AGE_NAMES = ("1m", "10m", "1h", "6h", "24h")
"""Blocks evicted less than so long ago, each class without the one before."""
_BLOCKS_MIN = 1_000
_GAP_MIN = 0.02
_MOST = 0.9
_POLICY_SHARE = 0.1
_SPACE_FACTOR_MAX = 4
_DOUBLED_SHARE_MIN = 0.25


class Help(StrEnum):
    """What would raise the hit rate."""

    UNKNOWN = "unknown"
    NOTHING = "nothing"
    MORE_SPACE = "more_space"
    OTHER_POLICY = "other_policy"
    ELSEWHERE = "elsewhere"
    """Neither: the storages, or those who write."""


@dataclass(frozen=True, slots=True)
class Advice:
    """In one line."""

    help: Help
    text: str


@dataclass(frozen=True, slots=True)
class SpaceStep:
    """With so many bytes more, so many blocks more would have been hits (estimated)."""

    more_bytes: int
    hits: int


@dataclass(frozen=True, slots=True)
class WindowReport:
    """One window of an instance or group.

    Attributes:
        window: "15m", "1h" or "24h".
        covered_s: what it covers really; less after a first start.
        blocks: asked for by prefix lookups, without those the client said it has; ``hits`` of them
            were answered. Both exact.
        distinct, ceiling, standard_error: U and (N - U) / N, estimated, and the latter's error.
        misses: all of ``blocks - hits`` by cause; their sum is exact, the split is exact when
            ``is_exact``, else an estimate from ``sampled`` misses.
        evicted_ages: of the evicted among the misses, by how long ago.
        space: cumulative, ascending.
    """

    window: str
    covered_s: float
    requests: int
    blocks: int
    hits: int
    distinct: float
    ceiling: float
    standard_error: float
    misses: Mapping[str, int]
    sampled: int
    evicted_ages: Mapping[str, int]
    space: tuple[SpaceStep, ...]
    advice: Advice

    @property
    def hit_rate(self) -> float:
        """Block-weighted; 0 without blocks."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def gap(self) -> float:
        """What a cache without limits, empty at the window's beginning, would have hit more; below
        0 when the real one had blocks from before."""
        return self.ceiling - self.hit_rate

    @property
    def most_space(self) -> SpaceStep | None:
        """The least space that brings back most of what was evicted and missed."""
        return _most(self.space)

    @property
    def is_exact(self) -> bool:
        """Every miss was looked at."""
        return self.sampled == self.blocks - self.hits


@dataclass(frozen=True, slots=True)
class ScopeReport:
    """All windows of an instance or of a group (then ``instance`` is empty)."""

    group: str
    instance: str
    windows: tuple[WindowReport, ...]


@dataclass(frozen=True, slots=True)
class CeilingReport:
    """Everything at one moment.

    Attributes:
        at_s: epoch seconds.
        since_s: epoch seconds since when requests are counted; 0 without any.
        sample_weight: keys that one in the sample stands for.
        uncounted: requests that were not counted because too many waited.
        instances_without: instances that count in their group only.
    """

    at_s: float = 0.0
    since_s: float = 0.0
    scopes: tuple[ScopeReport, ...] = ()
    sample_weight: int = 1
    uncounted: int = 0
    instances_without: int = 0


def report(window: Window, capacity: int | None) -> WindowReport:
    """What a window says.

    Args:
        capacity: bytes that its group may hold; None = no limit.
    """
    counts = window.counts
    requests, blocks, hits, sampled = counts[: tally.SAMPLED + 1].tolist()
    missed = blocks - hits
    split = dict(zip(CAUSES, tally.shared_out(missed, tally.causes_of(counts)), strict=True))
    evicted = split[Cause.EVICTED]
    misses = {cause.value: split[cause] for cause in CAUSES}
    misses[UNKNOWN] = missed - sum(split.values())
    distinct = min(window.distinct, float(blocks))
    ceiling = (blocks - distinct) / blocks if blocks else 0.0
    space = _space(counts, evicted)
    ages = tally.shared_out(evicted, tally.ages_of(counts))
    return WindowReport(
        window=window.name,
        covered_s=window.covered_s,
        requests=requests,
        blocks=blocks,
        hits=hits,
        distinct=distinct,
        ceiling=ceiling,
        standard_error=(1 - ceiling) * STANDARD_ERROR if blocks else 0.0,
        misses=misses,
        sampled=sampled,
        evicted_ages=dict(zip(AGE_NAMES, ages, strict=True)),
        space=space,
        advice=advise(blocks, misses, space, capacity),
    )


def _space(counts: tally.Vector, evicted: int) -> tuple[SpaceStep, ...]:
    steps: list[SpaceStep] = []
    total = 0
    for number, share in enumerate(tally.shared_out(evicted, tally.needs_of(counts))):
        if share:
            total += share
            steps.append(SpaceStep(tally.need_bytes(number), total))
    return tuple(steps)


def advise(
    blocks: int, misses: Mapping[str, int], space: tuple[SpaceStep, ...], capacity: int | None
) -> Advice:
    """The largest of what is between the hit rate and its best, and what could be done about it."""
    if blocks < _BLOCKS_MIN:
        return Advice(Help.UNKNOWN, f"too few blocks yet ({blocks:,} of {_BLOCKS_MIN:,})")
    avoidable = {name: count for name, count in misses.items() if name not in (Cause.NEW, UNKNOWN)}
    name = max(avoidable, key=lambda cause: avoidable[cause])
    lost = avoidable[name] / blocks
    if sum(avoidable.values()) / blocks < _GAP_MIN:
        if misses[UNKNOWN] / blocks >= _GAP_MIN:
            return Advice(Help.UNKNOWN, "none of the misses is in the sample yet")
        return Advice(Help.NOTHING, "nothing helps: what is missed was never asked for before")
    if name == Cause.EVICTED:
        return _space_advice(lost, space, capacity)
    help_, text = _ADVICE[Cause(name)]
    return Advice(help_, f"{text} ({lost:.1%} of blocks)")


_ADVICE: Mapping[Cause, tuple[Help, str]] = {
    Cause.NEVER_WRITTEN: (
        Help.ELSEWHERE,
        "neither space nor policy helps: blocks are asked for again that no engine writes",
    ),
    Cause.REFUSED_QUOTA: (
        Help.MORE_SPACE,
        "more space: writes are refused; raise the quota, or set a watermark so that it evicts",
    ),
    Cause.REFUSED_ADMISSION: (
        Help.OTHER_POLICY,
        "other policy: admission keeps out blocks that are asked for again",
    ),
    Cause.STORAGE_UNAVAILABLE: (
        Help.ELSEWHERE,
        "neither space nor policy helps: a storage cannot be read or written",
    ),
    Cause.UNFINISHED: (
        Help.ELSEWHERE,
        "neither space nor policy helps: writes come too late, fail, or run into their time-out",
    ),
    Cause.REMOVED: (
        Help.ELSEWHERE,
        "neither space nor policy helps: blocks are removed, trimmed, lost, or past their ttl",
    ),
    Cause.UNREACHABLE: (
        Help.OTHER_POLICY,
        "other policy: blocks are there, but not reached: behind others that are not there, on a "
        "second storage, or above the reply limit",
    ),
}


def _space_advice(lost: float, space: tuple[SpaceStep, ...], capacity: int | None) -> Advice:
    most = _most(space)
    assert most is not None, "what was evicted has a place among the needs"
    gain = lost * most.hits / space[-1].hits
    needed = f"about {_gib(most.more_bytes)} more would have made {gain:.1%} of blocks hits"
    if capacity and most.more_bytes > capacity:
        doubled = max((s.hits for s in space if s.more_bytes <= capacity), default=0)
        share = doubled / space[-1].hits
        if share >= _DOUBLED_SHARE_MIN:
            return Advice(
                Help.MORE_SPACE,
                f"more space: twice the capacity would have made {lost * share:.1%} of blocks "
                f"hits, {needed}",
            )
        if most.more_bytes > _SPACE_FACTOR_MAX * capacity:
            return Advice(
                Help.OTHER_POLICY,
                f"other policy: {needed}, more than {_SPACE_FACTOR_MAX} times the capacity",
            )
    if capacity and most.more_bytes < _POLICY_SHARE * capacity:
        return Advice(
            Help.MORE_SPACE,
            f"more space, or another policy: {needed}, below {_POLICY_SHARE:.0%} of the capacity",
        )
    return Advice(Help.MORE_SPACE, f"more space: {needed}")


def _most(space: tuple[SpaceStep, ...]) -> SpaceStep | None:
    return next((step for step in space if step.hits >= _MOST * space[-1].hits), None)


def _gib(size: int) -> str:
    gib = size / 2**30
    if gib < 1:
        return f"{size / 2**20:.0f} MiB"
    return f"{gib:.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"
