"""So many within any minute, counted from the first."""

from __future__ import annotations

PERIOD_S = 60.0


class Allowance:
    """Gives out up to ``limit`` within a period; the next one begins with what is taken after it.

    Times are monotonic seconds, given by the caller.
    """

    def __init__(self, limit: int, period_s: float = PERIOD_S) -> None:
        self._limit = limit
        self._period_s = period_s
        self._since = 0.0
        self._taken = 0

    def take(self, wanted: int, now: float) -> int:
        """How many of ``wanted`` are allowed."""
        if not self._taken or now >= self._since + self._period_s:
            self._since, self._taken = now, 0
        allowed = min(wanted, self._limit - self._taken)
        self._taken += allowed
        return allowed

    def give_back(self, count: int) -> None:
        """``count`` of those taken were not used."""
        self._taken = max(0, self._taken - count)
