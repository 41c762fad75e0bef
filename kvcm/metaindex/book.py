"""The leader's table of extents: who exists, how recently used, and what builds on what.

Per group, settled extents stand in the order in which eviction takes them: least recently used
first and, within one use, the deepest first. A touch moves an extent and all its ancestors, deepest
first, so a child always stands before its parents and eviction never cuts a chain in the middle.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvcm.metaindex.ledger import ZERO, Delta
from kvcm.metaindex.records import Extent, Phase, Run, State


class Entry:
    """One extent in memory. ``held`` is its share of the ledger (without trash).

    ``opened`` is set while it is open: the record itself, so that a finish reads nothing.
    ``runs`` is set between loading and linking only. ``leaving`` hides it from StartWrite while its
    eviction is under way.
    """

    __slots__ = (
        "deadline",
        "extent_id",
        "finished_ms",
        "held",
        "keep_until",
        "leaving",
        "opened",
        "parents",
        "phase",
        "pinned",
        "pins",
        "runs",
        "stamp_ms",
        "stamped",
        "state",
        "storage",
        "storage_type",
        "trim",
        "uid",
    )

    def __init__(self, uid: str, extent: Extent, state: State, held: Delta) -> None:
        self.uid = uid
        self.extent_id = extent.extent_id
        self.storage = extent.storage
        self.storage_type = extent.storage_type
        self.trim = extent.trim
        self.phase = state.phase
        self.stamp_ms = state.stamp_ms
        self.finished_ms = state.finished_ms
        self.held = held
        self.parents: tuple[Entry, ...] = ()
        self.pinned: tuple[Entry, ...] = ()
        self.pins = 0
        self.leaving = False
        self.stamped = False
        self.deadline = 0.0
        self.keep_until = 0.0
        self.opened: Extent | None = None
        self.state: State | None = None
        self.runs: tuple[Run, ...] | None = None


class Book:
    """Entries of one instance by extent id; ``order`` is the group's, shared by its instances.

    ``over`` are the retired and aborted ones, kept for repeated finishes; ``dirty`` those whose
    stamp is not stored yet.
    """

    def __init__(self, order: OrderedDict[Entry, None]) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.order = order
        self.dirty: dict[Entry, None] = {}
        self.over: dict[bytes, Entry] = {}
        self.open_count = 0
        self._deadlines: list[tuple[float, bytes]] = []

    def add(self, entry: Entry) -> None:
        """Add or replace an entry; a settled one becomes the most recently used."""
        self.forget(entry.extent_id)
        self.entries[entry.extent_id] = entry
        if entry.phase is Phase.SETTLED:
            self.order[entry] = None
        elif entry.phase is Phase.OPEN:
            self.open_count += 1
        else:
            self.over[entry.extent_id] = entry

    def settle(self, entry: Entry) -> None:
        """An open entry now serves: it joins the order before its ancestors."""
        self.open_count -= 1
        self.order[entry] = None
        self.touch((entry,), entry.stamp_ms)

    def leave(self, entry: Entry, was: Phase) -> None:
        """Take an entry that is now retired or aborted out of the order; it stays known."""
        self.over[entry.extent_id] = entry
        self._clear(entry, was)

    def _clear(self, entry: Entry, was: Phase) -> None:
        if was is Phase.OPEN:
            self.open_count -= 1
        self.order.pop(entry, None)
        self.dirty.pop(entry, None)
        for parent in entry.pinned:
            parent.pins -= 1
        entry.pinned = ()
        entry.parents = ()
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
        """Stamp entries (given from root to deepest) and all their ancestors as just used."""
        order = self.order
        chain = list(entries)
        for entry in reversed(chain):
            if entry in order:
                order.move_to_end(entry)
            self._stamp(entry, stamp_ms)
        for entry in with_ancestors(chain):
            if entry in order:
                order.move_to_end(entry)
            self._stamp(entry, stamp_ms)

    def _stamp(self, entry: Entry, stamp_ms: int) -> None:
        entry.stamp_ms = stamp_ms
        if not entry.stamped:
            entry.stamped = True
            self.dirty[entry] = None

    def pin(self, entry: Entry, among: Iterable[Entry]) -> None:
        """Keep ``among`` and their ancestors from eviction until ``entry``'s session ends."""
        base = list(among)
        held = tuple(dict.fromkeys([*base, *with_ancestors(base)]))
        for other in held:
            other.pins += 1
        entry.pinned = held

    def unpin(self, entry: Entry) -> None:
        """End of a session: what it pinned may go again."""
        for other in entry.pinned:
            other.pins -= 1
        entry.pinned = ()


def with_ancestors(entries: list[Entry]) -> Iterator[Entry]:
    """Ancestors of ``entries`` that are not among them, children before parents.

    A parent is yielded after every one of its children in the set, so that a caller who moves each
    to the end of the order keeps parents behind their children.
    """
    inside = set(entries)
    todo = [p for e in entries for p in e.parents if p not in inside]
    if not todo:
        return
    waiting: dict[Entry, int] = {}
    stack = list(dict.fromkeys(todo))
    found = set(stack)
    while stack:
        entry = stack.pop()
        for parent in entry.parents:
            if parent in inside:
                continue
            waiting[parent] = waiting.get(parent, 0) + 1
            if parent not in found:
                found.add(parent)
                stack.append(parent)
    ready = [e for e in found if not waiting.get(e)]
    while ready:
        entry = ready.pop()
        found.discard(entry)
        yield entry
        for parent in entry.parents:
            if parent in waiting:
                waiting[parent] -= 1
                if not waiting[parent]:
                    ready.append(parent)
    # A cycle of extents (a gap refilled on both sides) has no order; its members go together.
    yield from found
