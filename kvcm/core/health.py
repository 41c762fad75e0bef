"""Health of a storage as its probes tell it. Pure: nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

FAILURES_MAX = 2
"""So many failed probes in a row make a storage unavailable; fewer make it suspect."""
SUCCESSES_MIN = 2
"""So many good probes in a row bring an unavailable storage back: one that flaps stays away."""


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


def succeeded(health: Health) -> Health:
    """After a good probe."""
    if health.usable or health.against + 1 >= SUCCESSES_MIN:
        return AVAILABLE
    return Health(HealthState.UNAVAILABLE, health.against + 1)


def failed(health: Health, *, hung: bool = False) -> Health:
    """After a failed probe; one that hung past its deadline counts for all that are needed."""
    if hung or not health.usable or health.against + 1 >= FAILURES_MAX:
        return UNAVAILABLE
    return Health(HealthState.SUSPECT, health.against + 1)
