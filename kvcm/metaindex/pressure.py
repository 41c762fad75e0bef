"""What writers need and do not find: room that is wanted, and refusals counted by reason.

StartWrite says here what it was refused, the eviction loop reads it; neither knows the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.core.types import StorageType


class Scope(NamedTuple):
    """Where room is wanted: a whole group, its part on a storage type, the key count of one
    instance (``uid``), or a storage over all groups (``group`` empty)."""

    group: str = ""
    storage_type: StorageType | None = None
    uid: str | None = None
    storage: str | None = None


class Want(NamedTuple):
    """Room that a write lacked: bytes, or blocks when the scope has a ``uid``."""

    scope: Scope
    amount: int


@dataclass(slots=True)
class _Waiter:
    fits: Callable[[], bool]
    woken: asyncio.Future[None]


class Pressure:
    """Room that refused writes want, and the event that the eviction loop waits for."""

    def __init__(self) -> None:
        self.wakeup = asyncio.Event()
        self._wanted: dict[Scope, int] = {}
        self._waiters: list[_Waiter] = []

    def want(self, wants: Iterable[Want]) -> None:
        """Arm eviction. Of several writes the largest counts: they may be one that tries again."""
        for scope, amount in wants:
            self._wanted[scope] = max(amount, self._wanted.get(scope, 0))
        self.wakeup.set()

    def wake(self) -> None:
        """A mark was crossed, or limits have changed."""
        self.wakeup.set()

    def take(self) -> dict[Scope, int]:
        """What is wanted, for a round of eviction that begins now."""
        wanted, self._wanted = self._wanted, {}
        self.wakeup.clear()
        return wanted

    def wait(self, fits: Callable[[], bool]) -> asyncio.Future[None]:
        """Ends when room has appeared, or when a round that knew of it is over."""
        waiter = _Waiter(fits, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        return waiter.woken

    def leave(self, woken: asyncio.Future[None]) -> None:
        """Who waited has gone."""
        self._waiters = [w for w in self._waiters if w.woken is not woken]

    def waiters(self) -> tuple[asyncio.Future[None], ...]:
        """Who waits now."""
        return tuple(w.woken for w in self._waiters)

    def progressed(self) -> None:
        """Something was evicted: whoever fits now goes on."""
        for waiter in self._waiters:
            if not waiter.woken.done() and waiter.fits():
                waiter.woken.set_result(None)

    @staticmethod
    def relieved(waiters: Iterable[asyncio.Future[None]]) -> None:
        """A round is over: those who waited for it try what there is."""
        for woken in waiters:
            if not woken.done():
                woken.set_result(None)


class Refusals:
    """Writes that a limit refused whole (``refused``) or cut (``cut``), by who and why."""

    def __init__(self) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        """(group, reason)"""
        self.cut: Counter[tuple[str, str]] = Counter()
        self.instances: Counter[tuple[str, str]] = Counter()
        """(uid, reason), refused and cut; likewise below"""
        self.storages: Counter[tuple[str, str]] = Counter()
        self.types: Counter[tuple[str, StorageType, str]] = Counter()
        """(group, type, reason)"""

    def count(
        self,
        group: str,
        uid: str,
        reason: str,
        *,
        whole: bool,
        storage: str = "",
        storage_type: StorageType = StorageType.UNSPECIFIED,
    ) -> None:
        """One write; ``storage`` is where it would have gone."""
        (self.refused if whole else self.cut)[group, reason] += 1
        self.instances[uid, reason] += 1
        if storage:
            self.storages[storage, reason] += 1
            self.types[group, storage_type, reason] += 1

    def forget(self, uid: str) -> None:
        """An instance is gone; the totals of its group stay."""
        for key in [key for key in self.instances if key[0] == uid]:
            del self.instances[key]
