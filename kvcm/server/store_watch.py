"""Opens the index store, for as long as that takes, and tells whether it answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from kvcm.core.clock import Clock
from kvcm.core.errors import ConfigError, KvcmError, NotReady
from kvcm.metaindex.store import KVStore, ShardId, Table

log = logging.getLogger(__name__)

PERIOD_S = 1.0
_PAUSE_S_FIRST = 0.25
_PAUSE_S_MAX = 4.0
_SAY_EVERY_S = 30.0
_NOBODYS_SHARD = ShardId(b"-", 0)


class StoreWatch:
    """A background loop, and what the manager knows of its index store by it.

    Args:
        changed: called with whether the store answers, each time that this changes.
        opened: called once, when the store is open.
        refused: called once, with why the store can never be opened; the loop is at its end then.
    """

    name = "store"

    def __init__(
        self,
        store: KVStore,
        clock: Clock,
        *,
        changed: Callable[[bool], Awaitable[None]],
        opened: Callable[[], None],
        refused: Callable[[ConfigError], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._changed = changed
        self._opened = opened
        self._refused = refused
        self._is_open = False
        self._failures = 0
        self._away_since = self._said_at = 0.0
        self.is_well = False

    @property
    def period_s(self) -> float:
        """Seconds to the next look: short at first while a store is waited for, then longer."""
        if self._is_open or not self._failures:
            return PERIOD_S
        return float(min(_PAUSE_S_FIRST * 2 ** min(self._failures, 16), _PAUSE_S_MAX))

    async def open(self) -> None:
        """The first try; a store that is away is left to the loop.

        Raises:
            ConfigError: it can never be opened as configured.
        """
        await self._look()

    async def run_once(self, now: float) -> bool:
        """Try to open the store, or see whether it answers; whether it does."""
        try:
            await self._look()
        except ConfigError as error:
            self._refused(error)
        return self.is_well

    async def _look(self) -> None:
        try:
            if self._is_open:
                await self._store.get_many([(_NOBODYS_SHARD, [b"-"])], Table.ROWS)
            else:
                await self._store.open()
        except NotReady as error:
            self._say(error)
            self._failures += 1
            await self._set_well(False)
            return
        self._failures = 0
        if not self._is_open:
            self._is_open = True
            self._opened()
        await self._set_well(True)

    def _say(self, error: KvcmError) -> None:
        now = self._clock.monotonic()
        if not self._failures:
            self._away_since = now
        elif now - self._said_at < _SAY_EVERY_S:
            return
        self._said_at = now
        what = "stopped answering" if self._is_open else "cannot be opened yet"
        log.warning(
            "the index store %s (for %.0f s now); not ready until it answers: %s",
            what,
            now - self._away_since,
            error,
        )

    async def _set_well(self, is_well: bool) -> None:
        if is_well == self.is_well:
            return
        self.is_well = is_well
        if is_well:
            log.info("the index store answers")
        await self._changed(is_well)
