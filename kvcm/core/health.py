"""Health of a storage, as its probes and its readers tell it. Pure: nothing is measured here."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum

from kvcm.core import limits


class HealthState(IntEnum):
    """Whether a storage is used. A suspect one still is, until a second probe decides."""

    AVAILABLE = 0
    SUSPECT = 1
    UNAVAILABLE = 2


@dataclass(frozen=True, slots=True)
class Health:
    """A state, and the probes in a row that speak against it."""

    state: HealthState = HealthState.AVAILABLE
    against: int = 0

    @property
    def usable(self) -> bool:
        """Lookups name its blocks and writes may go to it."""
        return self.state is not HealthState.UNAVAILABLE


AVAILABLE = Health()
UNAVAILABLE = Health(HealthState.UNAVAILABLE)
OPENED = Health(HealthState.UNAVAILABLE, limits.PROBE_SUCCESSES_MIN - 1)
"""One good probe makes it available."""


def succeeded(health: Health) -> Health:
    """After a good probe; one that flaps stays away."""
    if health.usable or health.against + 1 >= limits.PROBE_SUCCESSES_MIN:
        return AVAILABLE
    return Health(HealthState.UNAVAILABLE, health.against + 1)


def failed(health: Health, *, hung: bool = False) -> Health:
    """After a failed probe; one that hung past its deadline counts for all that are needed."""
    if hung or not health.usable or health.against + 1 >= limits.PROBE_FAILURES_MAX:
        return UNAVAILABLE
    return Health(HealthState.SUSPECT, health.against + 1)


@dataclass(slots=True)
class Breaker:
    """Keeps a storage out of use that several readers cannot read, whatever its probes say.

    Readers are counted, not blocks: one host that lost its own mount condemns nothing. Each time
    it opens again soon after it closed it stays open for twice as long. Times in seconds of one
    monotonic clock.
    """

    open_until: float = 0.0
    _held_s: float = 0.0
    _seen: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Readers and when each last complained, the earliest first."""

    def is_open(self, now: float) -> bool:
        """Whether the storage is to be left alone."""
        return now < self.open_until

    def complain(self, reader: str, now: float) -> bool:
        """A reader could not read there; whether that opens the breaker.

        Complaints while it is open do not count: they are about reads begun before.
        """
        if self.is_open(now):
            return False
        self._seen.pop(reader, None)
        self._seen[reader] = now
        while now - next(iter(self._seen.values())) > limits.BREAKER_WINDOW_S:
            self._seen.popitem(last=False)
        if len(self._seen) < limits.BREAKER_READERS:
            return False
        self._seen.clear()
        again = now - self.open_until <= limits.BREAKER_OPEN_S_MAX and self._held_s > 0
        self._held_s = (
            min(2 * self._held_s, limits.BREAKER_OPEN_S_MAX) if again else limits.BREAKER_OPEN_S
        )
        self.open_until = now + self._held_s
        return True
