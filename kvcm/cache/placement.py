"""Where a write goes, and how much of it the limits let through. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvcm.core.limits import BLOCKS_PER_EXTENT_MAX
from kvcm.core.quota import UNLIMITED
from kvcm.core.types import CachePreferStrategy, StorageType

_PREFERRED = {
    1: StorageType.HF3FS,
    3: StorageType.MOONCAKE,
    5: StorageType.TAIRMEMPOOL,
    7: StorageType.VCNS_HF3FS,
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A storage that could take the write. ``type_room``: bytes left of the group's quota for its
    type; ``own_room``: bytes left of its own capacity."""

    name: str
    type: StorageType
    used: int
    type_room: int
    own_room: int

    @property
    def room(self) -> int:
        """Bytes it can take."""
        return min(self.type_room, self.own_room)


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
    candidates: Sequence[Candidate], strategy: CachePreferStrategy, needed: int
) -> Candidate | None:
    """The storage for a write of ``needed`` bytes.

    Candidates of the strategy's type come first (ALWAYS_x: they alone); within a type the least
    used one. The first with room for everything wins, else the one with the most room.
    """
    preferred = _PREFERRED.get(strategy - 1 + strategy % 2)
    only = strategy % 2 == 1
    usable = [c for c in candidates if not only or c.type == preferred]
    if not usable:
        return None
    first_seen = {c.type: -i for i, c in reversed(list(enumerate(usable)))}
    ordered = sorted(usable, key=lambda c: (c.type != preferred, -first_seen[c.type], c.used))
    for candidate in ordered:
        if candidate.room >= needed:
            return candidate
    return max(ordered, key=lambda c: c.room)


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
