"""Where a write goes, and how much of it the limits let through. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvcm.core.limits import BLOCKS_PER_EXTENT_MAX, RAMP_S
from kvcm.core.quota import UNLIMITED
from kvcm.core.types import CachePreferStrategy, StorageType

_PREFERRED = {
    1: StorageType.HF3FS,
    3: StorageType.MOONCAKE,
    5: StorageType.TAIRMEMPOOL,
    7: StorageType.VCNS_HF3FS,
}
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A storage that could take the write, in bytes.

    ``type_room``: left of the group's quota for its type; ``own_room``: left of its own capacity;
    ``disk_free``: free on the storage itself, None when it does not tell. ``age_s``: seconds since
    it came back, infinite when it was never away.
    """

    name: str
    type: StorageType
    type_room: int = UNLIMITED
    own_room: int = UNLIMITED
    disk_free: int | None = None
    age_s: float = math.inf

    @property
    def room(self) -> int:
        """What the limits let it take."""
        return min(self.type_room, self.own_room)

    @property
    def free(self) -> int | None:
        """What it has free to fill, whoever fills it; None when nobody knows."""
        if self.disk_free is not None:
            return min(self.disk_free, self.own_room)
        return self.own_room if self.own_room < UNLIMITED // 2 else None


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves: bytes, or blocks when ``in_blocks``. ``reason`` names the limit."""

    reason: str
    left: int
    in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """How many leading blocks fit, and the limit that cut the rest ("" = none did). ``short``: all
    limits that do not leave room for everything."""

    count: int
    reason: str
    short: tuple[str, ...] = ()


def choose(
    candidates: Sequence[Candidate],
    strategy: CachePreferStrategy,
    needed: int,
    turn: float,
    near: str = "",
) -> Candidate | None:
    """The storage for a write of ``needed`` bytes; None when the strategy allows none.

    Candidates with room for everything come first, then those that only lack free bytes (quotas
    and eviction own the limits, and free bytes are as old as the last probe), then those with the
    most room. Of these the strategy's type is taken (ALWAYS_x: it alone), else the type of the
    first candidate. Within the type ``turn`` decides, in proportion to free space.

    Args:
        turn: in [0, 1). Spread evenly over many calls, each storage gets its share (`shares`).
        near: the storage that is taken if it is one of the best, whatever its turn; "" = none.
    """
    preferred = _PREFERRED.get(strategy - 1 + strategy % 2)
    only = strategy % 2 == 1
    usable = [c for c in candidates if not only or c.type == preferred]
    if len(usable) < 2:
        return usable[0] if usable else None
    best = [c for c in usable if c.room >= needed]
    if best:
        best = [c for c in best if c.disk_free is None or c.disk_free >= needed] or best
    else:
        most = max(c.room for c in usable)
        best = [c for c in usable if c.room == most]
    types = {c.type for c in best}
    if len(types) > 1:
        first = preferred if preferred in types else next(c.type for c in usable if c.type in types)
        best = [c for c in best if c.type == first]
    if len(best) == 1:
        return best[0]
    if close := [c for c in best if c.name == near]:
        return close[0]
    ends = list(accumulate(shares(best)))
    return best[min(bisect_right(ends, turn * ends[-1]), len(best) - 1)]


def shares(candidates: Sequence[Candidate]) -> list[float]:
    """Which fraction of the writes each is to get: in proportion to its free bytes.

    One whose free bytes nobody knows counts as the mean of the others. One that came back lately
    gets no more than if it were (1 + age / RAMP_S) times as free as the mean of the others, so at
    first its fair share at most: a storage that comes back empty is not flooded.
    """
    free = [c.free for c in candidates]
    known = [f for f in free if f is not None]
    mean = sum(known) // len(known) if known else 1
    weights = [max(1, mean if f is None else f) for f in free]
    total = sum(weights)
    if all(c.age_s == math.inf for c in candidates):
        return [weight / total for weight in weights]
    others = len(candidates) - 1
    caps = [1 / (1 + others / (1 + max(0.0, c.age_s) / RAMP_S)) for c in candidates]
    # What a cap takes from one goes to the others, so whoever exceeds his cap most comes first.
    # The caps add up to 1 or more, so nothing is left over.
    left = 1.0
    result = [0.0] * len(candidates)
    for i in sorted(range(len(candidates)), key=lambda i: caps[i] / weights[i]):
        result[i] = min(caps[i], left * weights[i] / total)
        left -= result[i]
        total -= weights[i]
    return result


def next_turn(turn: float) -> float:
    """The turn after this one: steps of the golden ratio spread evenly, however many are made."""
    return (turn + _GOLDEN) % 1.0


def grant(sizes: Sequence[int], rooms: Sequence[Room]) -> Grant:
    """How many leading blocks of the given sizes (bytes) fit under all limits.

    Of limits that cut at the same block the first of ``rooms`` is the reason.
    """
    fitting = [
        (room.reason, _count(sizes, room.left) if room.in_blocks else _fitting(sizes, room.left))
        for room in rooms
    ]
    fitting.append(("EXTENT_SIZE", _count(sizes, BLOCKS_PER_EXTENT_MAX)))
    reason, count = min(fitting, key=lambda limit: limit[1])
    short = tuple(name for name, fits in fitting if fits < len(sizes))
    return Grant(count, "" if count == len(sizes) else reason, short)


def _count(sizes: Sequence[int], room: int) -> int:
    return max(0, min(len(sizes), room))


def _fitting(sizes: Sequence[int], room: int) -> int:
    if room >= UNLIMITED // 2 or sum(sizes) <= room:
        return len(sizes)
    count = 0
    for total in accumulate(sizes):
        if total > room:
            break
        count += 1
    return count
