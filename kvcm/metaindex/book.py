"""The leader's table of extents: who exists, how recently used, and what builds on what.

The settled ones stand in the eviction order of their group (``order.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from kvcm.metaindex.entry import Entry, with_ancestors
from kvcm.metaindex.ledger import ZERO
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.records import Phase, Run

__all__ = ["Book", "Entry"]


class Book:
    """Entries of one instance by extent id; ``order`` is the group's, shared by its instances.

    ``over`` are the retired and aborted ones, kept for repeated finishes; ``dirty`` those whose
    stamp is not stored yet; ``unlinked`` those that were read from the store and whose parents, by
    their ``runs``, are still to be found. What is unlinked is not evicted.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.order = order
        self.dirty: dict[Entry, None] = {}
        self.over: dict[bytes, Entry] = {}
        self.open_count = 0
        self.unlinked: dict[Entry, Sequence[Run]] = {}
        self._deadlines: list[tuple[float, bytes]] = []

    def add(
        self, entry: Entry, parents: Iterable[Entry] = (), *, runs: Sequence[Run] | None = None
    ) -> None:
        """Add or replace an entry that builds on ``parents``; with ``runs`` it is linked later."""
        self.forget(entry.extent_id)
        self.entries[entry.extent_id] = entry
        if entry.phase not in (Phase.OPEN, Phase.SETTLED):
            self.over[entry.extent_id] = entry
            return
        if entry.phase is Phase.OPEN:
            self.open_count += 1
        self.order.link(entry, parents)
        if runs is not None:
            self.unlinked[entry] = runs
        elif entry.phase is Phase.SETTLED:
            self.order.add(entry)

    def settle(self, entry: Entry, stamp_ms: int) -> None:
        """An open entry now serves, from ``stamp_ms`` on: that renews what it builds on."""
        self.open_count -= 1
        for used in with_ancestors((entry,)):
            self._stamp(used, stamp_ms)
        if entry not in self.unlinked:
            self.order.add(entry)

    def link_up(self, entry: Entry) -> None:
        """Find the parents of an unlinked entry. A parent is at least as young as its child."""
        runs = self.unlinked.get(entry)
        if runs is None:
            return
        names = dict.fromkeys(run.parent for run in runs if run.parent is not None)
        parents = [p for p in map(self.entries.get, names) if p is not None]
        self.order.link(entry, parents)
        if len(parents) < len(names):
            entry.orphan = True
        self._renew(entry)

    def admit(self, entry: Entry) -> None:
        """All that were read are linked: this one may be evicted from now on."""
        if self.unlinked.pop(entry, None) is not None and entry.phase is Phase.SETTLED:
            self.order.add(entry)

    def _renew(self, entry: Entry) -> None:
        stack = [entry]
        while stack:
            entry = stack.pop()
            for parent in entry.parents:
                if parent.stamp_ms < entry.stamp_ms:
                    parent.stamp_ms = entry.stamp_ms
                    stack.append(parent)

    def leave(self, entry: Entry, was: Phase) -> None:
        """Take an entry that is now retired or aborted out of the order; it stays known."""
        self.over[entry.extent_id] = entry
        self._clear(entry, was)

    def _clear(self, entry: Entry, was: Phase) -> None:
        if was is Phase.OPEN:
            self.open_count -= 1
        self.order.leave(entry)
        self.unlinked.pop(entry, None)
        self.dirty.pop(entry, None)
        self.unpin(entry)
        entry.opened = None
        entry.state = None
        entry.held = ZERO

    def forget(self, extent_id: bytes) -> None:
        """Drop an entry for good."""
        entry = self.entries.pop(extent_id, None)
        if entry is not None:
            self.over.pop(extent_id, None)
            self._clear(entry, entry.phase)

    def expect(self, entry: Entry, deadline: float) -> None:
        """An open entry times out at ``deadline`` (monotonic seconds)."""
        entry.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, entry.extent_id))

    def overdue(self, now: float, limit: int) -> list[Entry]:
        """Up to ``limit`` open entries whose deadline has passed; they are not returned again
        unless ``expect`` is called anew."""
        out: list[Entry] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(out) < limit:
            _, extent_id = heapq.heappop(self._deadlines)
            entry = self.entries.get(extent_id)
            if entry is not None and entry.phase is Phase.OPEN:
                out.append(entry)
        return out

    def touch(self, entries: Iterable[Entry], stamp_ms: int) -> None:
        """Stamp entries and all their ancestors as just used."""
        for entry in with_ancestors(entries):
            self._stamp(entry, stamp_ms)

    def touch_chain(self, entries: Sequence[Entry], stamp_ms: int) -> None:
        """Stamp entries that follow each other in a request, and all their ancestors.

        An orphan among them has been reached from the one before it: it builds on that.
        """
        for i in range(1, len(entries)):
            if entries[i].orphan:
                self.order.join(entries[i], entries[i - 1])
        self.touch(entries, stamp_ms)

    def _stamp(self, entry: Entry, stamp_ms: int) -> None:
        if stamp_ms > entry.stamp_ms:
            entry.stamp_ms = stamp_ms
        if not entry.stamped:
            entry.stamped = True
            self.dirty[entry] = None

    def hold(self, entries: Iterable[Entry]) -> None:
        """Keep entries, and so what they build on, from eviction until ``release``."""
        for entry in entries:
            entry.pins += 1

    def release(self, entries: Iterable[Entry]) -> None:
        """The end of a ``hold``."""
        for entry in entries:
            entry.pins -= 1
            if not entry.pins:
                self.order.release(entry)

    def pin(self, entry: Entry, among: Iterable[Entry]) -> None:
        """Hold ``among`` until ``entry``'s session ends."""
        entry.pinned = tuple(among)
        self.hold(entry.pinned)

    def unpin(self, entry: Entry) -> None:
        """End of a session: what it pinned may go again."""
        pinned, entry.pinned = entry.pinned, ()
        self.release(pinned)
