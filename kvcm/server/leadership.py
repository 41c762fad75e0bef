"""Leadership of a single node: always the leader, unless it was told to step down for a while."""

from __future__ import annotations

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, NotLeader

ELECTION_PERIOD_MS = 1_000
"""A node that stepped down sits out at least one election."""
CAMPAIGN_DELAY_MS_MAX = 24 * 3_600 * 1_000


class Leadership:
    """Who leads. With one node that is this one, but for the time after ``demote``."""

    def __init__(self, clock: Clock, node_id: str) -> None:
        self._clock = clock
        self._demoted_at = self._out_until = float("-inf")
        self.node_id = node_id
        self.campaign_delay_ms = 0

    @property
    def is_leader(self) -> bool:
        """Whether this node leads now."""
        return self._clock.monotonic() >= self._out_until

    def require(self) -> None:
        """Raises NotLeader when this node does not lead."""
        if not self.is_leader:
            raise NotLeader("this node is not the leader, and no leader is known")

    def demote(self) -> None:
        """Step down now; elected again after the campaign delay, one election at least."""
        self._demoted_at = self._clock.monotonic()
        self._stay_out()

    def _stay_out(self) -> None:
        delay_ms = max(self.campaign_delay_ms, ELECTION_PERIOD_MS)
        self._out_until = self._demoted_at + delay_ms / 1_000

    def set_campaign_delay(self, delay_ms: int) -> None:
        """Milliseconds that this node stays out after ``demote``; counts for a stay under way too.

        Raises:
            InvalidArgument: negative, or above a day.
        """
        if not 0 <= delay_ms <= CAMPAIGN_DELAY_MS_MAX:
            raise InvalidArgument(
                f"campaign_delay_time_ms is {delay_ms}, not within 0 to {CAMPAIGN_DELAY_MS_MAX}"
            )
        self.campaign_delay_ms = delay_ms
        if not self.is_leader:
            self._stay_out()
