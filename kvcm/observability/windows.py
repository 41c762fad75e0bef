"""Counts and distinct keys of the last 15 minutes, hour and day. Pure.

Time comes in slots of five minutes, which are merged into hours. A window is the current slot and
the whole slots (for the day: hours) before it, so it covers its length and up to one slot or hour
more. What is over is kept compressed; all of the day, at the most keys, takes less than 1 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvcm.core.errors import InvalidArgument
from kvcm.observability import tally
from kvcm.observability.distinct import Distinct
from kvcm.observability.tally import Vector

SLOT_S = 300
SLOTS_PER_HOUR = 12
HOURS = 24
QUARTER, HOUR, DAY = "15m", "1h", "24h"
SECONDS = {QUARTER: 900, HOUR: 3_600, DAY: 86_400}
_SLOTS = {QUARTER: 3, HOUR: SLOTS_PER_HOUR}


@dataclass(frozen=True, slots=True)
class _Past:
    """A slot or an hour that is over."""

    number: int
    counts: Vector
    keys: bytes


class SavedPast(msgspec.Struct, array_like=True):
    """`_Past` in a file."""

    number: int
    counts: bytes
    keys: bytes


class Saved(msgspec.Struct, array_like=True):
    """`Windows` in a file."""

    began_s: float
    slot: SavedPast
    hour: SavedPast
    slots: list[SavedPast]
    hours: list[SavedPast]


class _Sum:
    """What a window holds without the current slot."""

    def __init__(self) -> None:
        self.counts = tally.empty()
        self.keys = Distinct()

    def clear(self) -> None:
        self.counts[:] = 0
        self.keys.clear()

    def add(self, counts: Vector, keys: Distinct) -> None:
        self.counts += counts
        self.keys.merge(keys)


@dataclass(frozen=True, slots=True)
class Window:
    """One window at one moment. ``distinct`` is an estimate, 0.41 % standard error."""

    name: str
    covered_s: float
    counts: Vector
    distinct: float


class Windows:
    """The windows of one instance or group.

    Call ``rotate`` to its end when ``due`` says so, before anything is added.
    """

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.counts = tally.empty()
        """Of the current slot; whoever adds keys counts here, too."""
        self._slot = int(now_s) // SLOT_S
        self._keys = Distinct()
        self._hour = _Sum()
        """The slots of the current hour that are over."""
        self._hour_keys: bytes | None = None
        """Its keys packed, for the file; None when they changed."""
        self._slots: deque[_Past] = deque()
        self._hours: deque[_Past] = deque()
        self._sums = {name: _Sum() for name in SECONDS}
        self._stale = False

    def add(self, keys: Iterable[int]) -> None:
        """Add keys that were asked for, as `kvcm.observability.distinct.integers` gives them."""
        self._keys.add(keys)

    def due(self, now_s: float) -> bool:
        """The current slot is over."""
        return self._stale or int(now_s) // SLOT_S > self._slot

    def is_ahead(self, now_s: float) -> bool:
        """The clock was set back by so much that nothing would end for long: begin anew."""
        return self._slot - int(now_s) // SLOT_S > SLOTS_PER_HOUR

    @property
    def idle(self) -> bool:
        """Nothing in any window."""
        current = int(self.counts[tally.REQUESTS])
        return not current and not self._slots and not self._hours and not self._hour.counts.any()

    def rotate(self, now_s: float) -> Iterator[None]:
        """Close what is over; pauses between steps of less than 2 ms."""
        slot = int(now_s) // SLOT_S
        if slot > self._slot:
            yield from self._close(slot)
        yield from self._sum_up()

    def _close(self, slot: int) -> Iterator[None]:
        hour, ended = slot // SLOTS_PER_HOUR, self._slot // SLOTS_PER_HOUR
        if self.counts.any():
            self._slots.append(_Past(self._slot, self.counts, self._keys.pack()))
            self._hour.add(self.counts, self._keys)
            self._hour_keys = None
            self.counts = tally.empty()
            self._keys.clear()
        self._slot = slot
        self._stale = True
        yield
        if hour != ended:
            if self._hour.counts.any():
                keys = self._hour.keys.pack()
                self._hours.append(_Past(ended, self._hour.counts.copy(), keys))
                self._hour.clear()
                self._hour_keys = None
            yield
        while self._slots and self._slots[0].number < slot - SLOTS_PER_HOUR:
            self._slots.popleft()
        while self._hours and self._hours[0].number < hour - HOURS:
            self._hours.popleft()

    def _sum_up(self) -> Iterator[None]:
        for name, count in _SLOTS.items():
            past = (p for p in self._slots if p.number >= self._slot - count)
            yield from _sum(self._sums[name], past)
        day = self._sums[DAY]
        yield from _sum(day, self._hours)
        day.add(self._hour.counts, self._hour.keys)
        self._stale = False

    def window(self, name: str, now_s: float) -> Window:
        """One of ``SECONDS``."""
        past = self._sums[name]
        distinct = past.keys.count_with(self._keys)
        if name == DAY:
            first_s = (self._slot // SLOTS_PER_HOUR - HOURS) * SLOTS_PER_HOUR * SLOT_S
        else:
            first_s = (self._slot - _SLOTS[name]) * SLOT_S
        covered_s = max(0.0, now_s - max(first_s, self.began_s))
        return Window(name, covered_s, past.counts + self.counts, distinct)

    def save(self) -> Saved:
        """For a file."""
        if self._hour_keys is None:
            self._hour_keys = self._hour.keys.pack()
        return Saved(
            self.began_s,
            SavedPast(self._slot, self.counts.tobytes(), self._keys.pack()),
            SavedPast(0, self._hour.counts.tobytes(), self._hour_keys),
            [SavedPast(p.number, p.counts.tobytes(), p.keys) for p in self._slots],
            [SavedPast(p.number, p.counts.tobytes(), p.keys) for p in self._hours],
        )

    @classmethod
    def load(cls, saved: Saved) -> Windows:
        """What ``save`` made; ``due`` at once.

        Raises:
            InvalidArgument: damaged.
        """
        made = cls(saved.began_s)
        made._slot = saved.slot.number
        made.counts = _counts(saved.slot.counts)
        made._keys = Distinct.unpack(saved.slot.keys)
        made._hour.add(_counts(saved.hour.counts), Distinct.unpack(saved.hour.keys))
        made._slots.extend(_Past(p.number, _counts(p.counts), p.keys) for p in saved.slots)
        made._hours.extend(_Past(p.number, _counts(p.counts), p.keys) for p in saved.hours)
        made._stale = True
        return made


def _sum(into: _Sum, past: Iterator[_Past] | deque[_Past]) -> Iterator[None]:
    into.clear()
    for part in past:
        into.add(part.counts, Distinct.unpack(part.keys))
        yield


def _counts(data: bytes) -> Vector:
    if len(data) != 8 * tally.LENGTH:
        raise InvalidArgument("counts of another length")
    return np.frombuffer(data, dtype="<i8").astype(np.int64)
