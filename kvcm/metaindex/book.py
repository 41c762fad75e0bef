"""The leader's table of extents: who exists, how recently used, and what builds on what.

The settled ones stand in the eviction order of their group (``order.py``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from kvcm.metaindex.entry import Entry, children_of, with_ancestors
from kvcm.metaindex.ledger import ZERO
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.records import Phase, Run, Use

__all__ = ["Book", "Entry"]


class Book:
    """Entries of one instance by extent id; ``order`` is the group's, shared by its instances.

    A use of an extent is a use of all it builds on. Where only the time of the last use matters
    (all policies but LFU) that is not written down at once: nothing but a leaf is ever evicted, so
    an extent takes over the stamp of what built on it when that leaves. A touch thus costs the
    same however long the chain is; ``last_uses`` says what it will come to.

    ``over`` are the retired and aborted ones, kept for repeated finishes; ``dirty`` those whose
    stamp is not stored yet; ``unlinked`` those that were read from the store and whose parents, by
    their runs, and followers are still to be found. What is unlinked is not evicted. ``learned``
    are parents that only requests showed, by extent id; they are stored beside the stamp.
    """

    def __init__(self, order: EvictionOrder) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.order = order
        self.dirty: dict[Entry, None] = {}
        self.over: dict[bytes, Entry] = {}
        self.open_count = 0
        self.unlinked: dict[Entry, tuple[Sequence[Run], Sequence[bytes]]] = {}
        self.learned: dict[Entry, tuple[bytes, ...]] = {}
        self._deadlines: list[tuple[float, bytes]] = []

    def add(self, entry: Entry, parents: Iterable[Entry] = ()) -> None:
        """Add or replace an entry that builds on ``parents``."""
        self._enter(entry, parents)
        self.order.touch((entry,), entry.stamp_ms, write=True)
        if entry.phase is Phase.SETTLED:
            self.order.add(entry)

    def add_unlinked(
        self,
        entry: Entry,
        runs: Sequence[Run],
        followers: Sequence[bytes] = (),
        learned: tuple[bytes, ...] = (),
    ) -> None:
        """Add or replace an entry that was read from the store; its links are found later."""
        self._enter(entry)
        if entry.alive:
            self.unlinked[entry] = runs, followers
            if learned:
                self.learned[entry] = learned

    def _enter(self, entry: Entry, parents: Iterable[Entry] = ()) -> None:
        self.forget(entry.extent_id)
        self.entries[entry.extent_id] = entry
        if entry.phase is Phase.OPEN:
            self.open_count += 1
        elif entry.phase is not Phase.SETTLED:
            self.over[entry.extent_id] = entry
            return
        self.order.link(entry, parents)

    def follow(self, entry: Entry, followers: Iterable[bytes]) -> None:
        """``entry`` fills a gap before the extents ``followers``."""
        for extent_id in followers:
            follower = self.entries.get(extent_id)
            if follower is not None:
                self.order.join(follower, entry)

    def settle(self, entry: Entry, stamp_ms: int) -> None:
        """An open entry now serves, from ``stamp_ms`` on."""
        self.open_count -= 1
        entry.stamp_ms = max(entry.stamp_ms, stamp_ms)
        self._to_store((entry,))
        if entry not in self.unlinked:
            self.order.add(entry)

    def link_up(self, entry: Entry) -> None:
        """Find the parents of an unlinked entry."""
        if entry not in self.unlinked:
            return
        names = dict.fromkeys(run.parent for run in self.unlinked[entry][0] if run.parent)
        parents = [p for p in map(self.entries.get, names) if p is not None]
        self.order.link(entry, parents)
        if len(parents) < len(names):
            entry.orphan = True
        for extent_id in self.learned.get(entry, ()):
            parent = self.entries.get(extent_id)
            if parent is not None:
                self.order.join(entry, parent)
        self.order.age = max(self.order.age, entry.heat)

    def follow_up(self, entry: Entry) -> None:
        """All have their parents: whose gap did this one fill?"""
        if entry in self.unlinked:
            self.follow(entry, self.unlinked[entry][1])

    def admit(self, entry: Entry) -> None:
        """All that were read are linked: this one may be evicted from now on."""
        if self.unlinked.pop(entry, None) is not None and entry.phase is Phase.SETTLED:
            self.order.add(entry)

    def leave(self, entry: Entry, was: Phase) -> None:
        """Take an entry that is now retired or aborted out of the order; it stays known."""
        self.over[entry.extent_id] = entry
        self._clear(entry, was)

    def _clear(self, entry: Entry, was: Phase) -> None:
        if was is Phase.OPEN:
            self.open_count -= 1
        self._hand_on(entry)
        self.order.leave(entry)
        self.unlinked.pop(entry, None)
        self.learned.pop(entry, None)
        self.dirty.pop(entry, None)
        self.unpin(entry)
        entry.opened = None
        entry.state = None
        entry.held = ZERO

    def _hand_on(self, entry: Entry) -> None:
        """An entry leaves: what it builds on was used when it was."""
        for parent in entry.parents:
            if parent.stamp_ms < entry.stamp_ms:
                parent.stamp_ms = entry.stamp_ms
                self._to_store((parent,))

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

    def overdue_count(self, now: float) -> int:
        """How many open entries wait for `overdue`."""
        heap, count, at = self._deadlines, 0, [0]
        while at:
            i = at.pop()
            if i < len(heap) and heap[i][0] <= now:
                entry = self.entries.get(heap[i][1])
                count += entry is not None and entry.phase is Phase.OPEN
                at += (2 * i + 1, 2 * i + 2)
        return count

    def touch(self, entries: Iterable[Entry], stamp_ms: int, *, write: bool = False) -> None:
        """Entries, and with them all they build on, were used; ``write``: by a StartWrite."""
        used = list(with_ancestors(entries)) if self.order.policy.counts else entries
        self.order.touch(used, stamp_ms, write=write)
        self._to_store(used)

    def touch_chain(self, entries: Sequence[Entry], stamp_ms: int, *, write: bool = False) -> None:
        """Entries that follow each other in a request, and all they build on, were used.

        What has been reached from the one before it builds on that, whatever else it builds on: an
        orphan, or one that was written when another copy was found there. (Between what a write
        finds may be gaps; it tells of those that it fills.)
        """
        self.order.catch_up(entries)
        tips: list[Entry] = []
        last: Entry | None = None
        for entry in entries:
            if last is not None:
                if entry.orphan or not (write or entry is last or last in entry.parents):
                    self._learn(entry, last)
                if last not in entry.parents:
                    tips.append(last)
            last = entry
        if last is not None:
            self.touch([*tips, last], stamp_ms, write=write)

    def _learn(self, child: Entry, parent: Entry) -> None:
        self.order.join(child, parent)
        if parent in child.parents:
            known = [e for e in self.learned.get(child, ()) if e in self.entries]
            self.learned[child] = (*known, parent.extent_id)
            self._to_store((child,))

    def use_of(self, entry: Entry) -> Use:
        """What is stored of an entry's use."""
        return Use(entry.stamp_ms, entry.heat, self.learned.get(entry, ()))

    def last_uses(self, entries: Iterable[Entry]) -> dict[Entry, int]:
        """When each entry or anything that builds on it was last used, epoch milliseconds."""
        known: dict[Entry, int] = {}
        # The deepest first: those above find the answer of a whole branch there.
        for entry in sorted(set(entries), key=lambda e: e.depth, reverse=True):
            newest, seen, stack = 0, {entry}, [entry]
            while stack:
                at = stack.pop()
                newest = max(newest, known.get(at, at.stamp_ms))
                if at not in known:
                    below = [c for c in children_of(at) if c not in seen]
                    seen.update(below)
                    stack += below
            known[entry] = newest
        return known

    def _to_store(self, entries: Iterable[Entry]) -> None:
        dirty = self.dirty
        for entry in entries:
            if not entry.stamped:
                entry.stamped = True
                dirty[entry] = None

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
