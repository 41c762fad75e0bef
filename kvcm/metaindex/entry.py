"""One extent in the leader's memory, and the links between extents.

An extent *builds on* the extents that hold the block just before each of its runs: those are its
parents. A child lives while it is open or settled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.records import Extent, State

if TYPE_CHECKING:
    from kvcm.metaindex.order import Shelf

OUT = None
"""``Entry.queued`` of what is not in the eviction order."""
IDLE = float("inf")
"""``Entry.queued`` of what is in the order but in no heap."""


@lru_cache(maxsize=4096)
def one_of(held: Delta) -> Delta:
    """One object for all extents that hold as much: few sizes are common."""
    return held


class Entry:
    """One extent in memory. ``held`` is its share of the ledger (without trash).

    ``opened`` is set while it is open: the record itself, so that a finish reads nothing.
    ``leaving`` hides it from StartWrite while its eviction is under way. ``pins`` counts the
    sessions that need it. ``depth`` is the highest index in a request at which one of its runs
    begins. ``children`` are those alive: one, or a set of several.

    ``announced`` counts lookups whose write has not come (yet): it is part of the same use.

    ``orphan``: a parent was taken out from under it, so no chain leads to it until a request is
    seen that does.
    """

    __slots__ = (
        "announced",
        "children",
        "deadline",
        "depth",
        "extent_id",
        "finished_ms",
        "heat",
        "held",
        "keep_until",
        "leaving",
        "opened",
        "orphan",
        "parents",
        "phase",
        "pinned",
        "pins",
        "queued",
        "shelf",
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
        # Decoded anew with every record; one string for all of them.
        self.storage = sys.intern(extent.storage)
        self.storage_type = extent.storage_type
        self.trim = extent.trim
        self.depth = max((run.depth for run in extent.runs), default=0)
        self.phase = state.phase
        self.stamp_ms = state.stamp_ms
        self.finished_ms = state.finished_ms
        self.heat = -IDLE
        self.announced = 0
        self.held = one_of(held)
        self.parents: tuple[Entry, ...] = ()
        self.children: Entry | set[Entry] | None = None
        self.orphan = False
        self.pinned: tuple[Entry, ...] = ()
        self.pins = 0
        self.leaving = False
        self.stamped = False
        self.queued: float | None = OUT
        self.shelf: Shelf | None = None
        self.deadline = 0.0
        self.keep_until = 0.0
        self.opened: Extent | None = None
        self.state: State | None = None

    def __lt__(self, other: Entry) -> bool:
        """Which of two equally cold ones goes first: the deeper, then the older."""
        if self.depth != other.depth:
            return self.depth > other.depth
        return self.extent_id < other.extent_id

    @property
    def alive(self) -> bool:
        """Whether blocks of it are served or being written, and others may build on it."""
        return self.shelf is not None


def adopt(parent: Entry, child: Entry) -> None:
    """``child`` builds on ``parent``."""
    children = parent.children
    if children is None:
        parent.children = child
    elif isinstance(children, set):
        children.add(child)
    elif children is not child:
        parent.children = {children, child}


def disown(parent: Entry, child: Entry) -> None:
    """``child`` is no more."""
    children = parent.children
    if children is child:
        parent.children = None
    elif isinstance(children, set):
        children.discard(child)
        if len(children) == 1:
            parent.children = children.pop()


def children_of(entry: Entry) -> Iterable[Entry]:
    """Living extents that build on it."""
    children = entry.children
    if children is None:
        return ()
    return children if isinstance(children, set) else (children,)


def with_ancestors(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries and all they build on, each once."""
    seen = set(entries)
    stack = list(seen)
    while stack:
        entry = stack.pop()
        yield entry
        for parent in entry.parents:
            if parent not in seen:
                seen.add(parent)
                stack.append(parent)


def cycle_through(child: Entry, parent: Entry) -> list[Entry]:
    """Everything on a way from ``parent`` up to ``child``, which is about to build on it; empty
    when there is none."""
    above = set(with_ancestors((parent,)))
    if child not in above:
        return []
    found = {child}
    stack = [child]
    while stack:
        for below in children_of(stack.pop()):
            if below in above and below not in found:
                found.add(below)
                stack.append(below)
    return list(found)


def components(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Groups of two and more entries that build on each other in a circle, within ``entries``."""
    left = set(entries)
    groups: list[list[Entry]] = []
    for entry in list(left):
        if entry not in left:
            continue
        up = _reach(entry, left, up=True)
        both = up & _reach(entry, left, up=False)
        left -= both
        if len(both) > 1:
            groups.append(list(both))
    return groups


def _reach(entry: Entry, within: set[Entry], *, up: bool) -> set[Entry]:
    found = {entry}
    stack = [entry]
    while stack:
        at = stack.pop()
        for other in at.parents if up else children_of(at):
            if other in within and other not in found:
                found.add(other)
                stack.append(other)
    return found
