"""The eviction order of a group: the coldest extents first, and never one that others build on.

Only *leaves* are given out: extents on which no living extent builds. When the last child of an
extent has gone, it becomes a leaf itself. So eviction alone never cuts a chain in the middle,
whatever the policy says (design.md §5, §9 invariant 6). Extents that build on each other in a
circle (a gap that was refilled on both sides) are one *unit*: they go together.

Leaves lie in heaps, one per instance, storage, and set of storages that their ancestors lie on. A
touch changes no heap. What comes up with a score it no longer has is pushed again, a bounded number
of times a call: ``behind`` says that a call ended there, and calling again goes on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvcm.core.limits import EVICTION_UNIT_EXTENTS_MAX, ORDER_STEPS_MAX
from kvcm.metaindex.entry import (
    IDLE,
    OUT,
    Entry,
    adopt,
    children_of,
    components,
    cycle_through,
    disown,
    with_ancestors,
)
from kvcm.metaindex.policy import LFU_HALF_LIFE_TURNOVERS, LRU, Policy, warmed

Place = tuple[str, int]
"""Name and type of a storage."""
_NOWHERE: frozenset[Place] = frozenset()
_NOTHING: frozenset[Entry] = frozenset()
_FIRST = -IDLE
"""Score of what no chain leads to."""
_ANNOUNCED_MAX = 255
_LEFT_OVER_MIN = 1024

Item = tuple[float, Entry]


@dataclass(slots=True, eq=False)
class Shelf:
    """Leaves of one instance on one storage; ``below`` is where else their ancestors lie.

    An item of a heap counts while its entry is still ``queued`` with that score. ``old`` is what a
    clean-up has still to go through; its scores are the policy's unless ``strange``. ``aside`` was
    given out, ``skipped`` was passed over at the caller's wish; both come back.
    """

    uid: str
    place: Place
    below: frozenset[Place]
    heap: list[Item] = field(default_factory=list)
    old: list[Item] = field(default_factory=list)
    strange: bool = False
    aside: list[Entry] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)
    left_over: int = 0
    members: int = 0


@dataclass(frozen=True, slots=True)
class Scope:
    """Which extents count; None = all."""

    uid: str | None = None
    storage_type: int | None = None
    storage: str | None = None

    def holds(self, place: Place) -> bool:
        """Whether extents at a place are in scope, by storage and type."""
        return (self.storage is None or self.storage == place[0]) and (
            self.storage_type is None or self.storage_type == place[1]
        )

    def holds_ancestor_of(self, entry: Entry) -> bool:
        """Whether something that ``entry`` builds on is in scope."""
        seen: set[Entry] = set()
        stack = [entry]
        while stack:
            for parent in stack.pop().parents:
                if parent not in seen:
                    if self.holds((parent.storage, parent.storage_type)):
                        return True
                    seen.add(parent)
                    stack.append(parent)
        return False


class EvictionOrder:
    """The settled extents of a group, and how all living ones build on each other.

    Attributes:
        behind: the last call ended because its work was used up, not because nothing was left.
        steps: heap operations so far.
    """

    def __init__(self, policy: Policy = LRU) -> None:
        self.policy = policy
        self.behind = False
        self.steps = 0
        self._shelves: dict[tuple[str, Place, frozenset[Place]], Shelf] = {}
        self._units: dict[Entry, tuple[Entry, ...]] = {}
        self._bereaved: deque[Entry] = deque()
        self._count = 0
        self.age = 0.0
        self._per_half_life = IDLE

    def __len__(self) -> int:
        return self._count

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, Entry) and entry.queued is not OUT

    # ---- who builds on whom ------------------------------------------------------------------

    def link(self, entry: Entry, parents: Iterable[Entry] = ()) -> None:
        """A living extent and what it is known to build on; nothing builds on it yet, or only
        extents that are linked later."""
        found = [p for p in dict.fromkeys(parents) if p is not entry]
        kept = tuple(p for p in found if p.alive)
        entry.orphan = len(kept) < len(found)
        for parent in kept:
            adopt(parent, entry)
        entry.parents = kept
        self._place(entry)

    def join(self, child: Entry, parent: Entry) -> None:
        """``child`` turns out to build on ``parent`` too: a gap before it was filled again."""
        if child is parent or not child.alive or not parent.alive:
            return
        child.orphan = False
        if parent in child.parents:
            return
        circle = cycle_through(child, parent)
        if len(circle) > EVICTION_UNIT_EXTENTS_MAX:
            return
        adopt(parent, child)
        child.parents = (*(p for p in child.parents if p.alive), parent)
        self._bind(circle)
        self._place(child)
        self._ready(child)

    def leave(self, entry: Entry) -> None:
        """An extent is no more. What builds on it, if anything, is an orphan."""
        unit = self._units.get(entry, ())
        for member in unit:
            del self._units[member]
        shelf = entry.shelf
        if shelf is not None:
            self._unqueue(entry, OUT)
            self._off(shelf)
        entry.shelf = None
        parents, entry.parents = entry.parents, ()
        for parent in parents:
            disown(parent, entry)
        self._bereaved.extend(children_of(entry))
        entry.children = None
        rest = [m for m in unit if m is not entry]
        for group in components(rest):
            self._bind(group)
        for other in (*parents, *rest):
            self._ready(other)

    def _bind(self, circle: list[Entry]) -> None:
        unit = tuple(sorted(circle))
        for member in unit:
            self._units[member] = unit

    def _place(self, entry: Entry) -> None:
        """Find the shelf of an entry, and of all that build on it if it changes."""
        todo = [entry]
        while todo:
            entry = todo.pop()
            below = _NOWHERE
            for parent in entry.parents:
                if parent.storage != entry.storage:
                    below |= {(parent.storage, parent.storage_type)}
                if parent.shelf is not None and parent.shelf.below:
                    below |= parent.shelf.below
            if self._shelve(entry, below):
                todo.extend(children_of(entry))

    def _shelve(self, entry: Entry, below: frozenset[Place]) -> bool:
        place = (entry.storage, entry.storage_type)
        if place in below:
            below -= {place}
        key = (entry.uid, place, below)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(*key)
        old = entry.shelf
        if old is shelf:
            return False
        shelf.members += 1
        if old is not None:
            if entry.queued is not OUT:
                self._unqueue(entry, IDLE)
            self._off(old)
        entry.shelf = shelf
        self._ready(entry)
        return True

    def _off(self, shelf: Shelf) -> None:
        shelf.members -= 1
        if not shelf.members:
            self._shelves.pop((shelf.uid, shelf.place, shelf.below), None)

    # ---- who is in the order -----------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """A linked extent may be evicted from now on."""
        if entry.queued is OUT:
            entry.queued = IDLE
            self._count += 1
        self._ready(entry)

    def remove(self, entry: Entry) -> None:
        """It may not; what builds on it still does."""
        self._unqueue(entry, OUT)

    def release(self, entry: Entry) -> None:
        """Its last pin is gone."""
        self._ready(entry)

    def _unqueue(self, entry: Entry, state: float | None) -> None:
        if entry.queued is OUT:
            return
        if entry.queued != IDLE and entry.shelf is not None:
            entry.shelf.left_over += 1
        if state is OUT:
            self._count -= 1
        entry.queued = state

    def _ready(self, entry: Entry) -> None:
        """Queue an entry if it can be evicted and is not queued."""
        unit = self._units.get(entry) if self._units else None
        if unit is not None:
            entry = unit[0]
        if entry.queued == IDLE and self._free(entry):
            self._push(entry)

    def _free(self, entry: Entry) -> bool:
        unit = self._units.get(entry) if self._units else None
        if unit is None:
            return entry.children is None and not entry.pins
        return unit[0] is entry and all(
            m.queued is not OUT and not m.pins and all(c in unit for c in children_of(m))
            for m in unit
        )

    def _push(self, entry: Entry) -> None:
        assert entry.shelf is not None
        score = entry.queued = self._score(entry)
        self.steps += 1
        heapq.heappush(entry.shelf.heap, (score, entry))

    def _score(self, entry: Entry) -> float:
        if self._units and entry in self._units:
            return max(_FIRST if m.orphan else self.policy.score(m) for m in self._units[entry])
        return _FIRST if entry.orphan else self.policy.score(entry)

    # ---- policy ------------------------------------------------------------------------------

    def touch(self, entries: Iterable[Entry], stamp_ms: int, *, write: bool = False) -> None:
        """Entries were used at ``stamp_ms``. No heap is touched.

        Args:
            write: by a StartWrite. Of a lookup and the write that follows it one counts.
        """
        counts, age = self.policy.counts, self.age
        for entry in entries:
            if stamp_ms > entry.stamp_ms:
                entry.stamp_ms = stamp_ms
            if not counts:
                continue
            if write and entry.announced:
                entry.announced -= 1
                continue
            entry.heat = warmed(entry.heat, age)
            if not write and entry.announced < _ANNOUNCED_MAX:
                entry.announced += 1

    def resize(self, capacity: int) -> None:
        """What the group can hold, in the unit of ``granted``; LFU ages by it. Until it is known
        nothing ages."""
        self._per_half_life = capacity * LFU_HALF_LIFE_TURNOVERS if capacity > 0 else IDLE

    def granted(self, amount: int) -> None:
        """So much was granted: LFU's clock goes on."""
        self.age += amount / self._per_half_life

    def set_policy(self, policy: Policy) -> None:
        """Order by another policy. Nothing to do when it is the same; otherwise the leaves are
        sorted anew in the background, and victims come from those that are, meanwhile."""
        if policy == self.policy:
            return
        self.policy = policy
        for shelf in self._shelves.values():
            shelf.old, shelf.heap = [*shelf.old, *shelf.heap] if shelf.old else shelf.heap, []
            shelf.strange = True

    # ---- the coldest -------------------------------------------------------------------------

    def coldest(
        self,
        limit: int,
        *,
        uid: str | None = None,
        storage_type: int | None = None,
        storage: str | None = None,
        skip: Container[Entry] = _NOTHING,
    ) -> list[Entry]:
        """The coldest extents within a scope that can go now, coldest first.

        All are settled leaves, unpinned and not ``leaving``; a unit is given out whole, deepest
        first, even beyond ``limit``. Where deeper extents outside the scope stand on everything in
        it, those come, the coldest first. What was given out is given out again by the next call
        unless it has left.

        Args:
            skip: entries to pass over, for the rest of the round (until ``refresh``).
        """
        scope = Scope(uid, storage_type, storage)
        shelves = [s for s in self._shelves.values() if uid is None or s.uid == uid]
        return self._within(scope, shelves, limit, skip)

    def _within(
        self, scope: Scope, shelves: list[Shelf], limit: int, skip: Container[Entry]
    ) -> list[Entry]:
        left = self._begin()
        out = self._take([s for s in shelves if scope.holds(s.place)], limit, left, skip=skip)
        if out or self.behind:
            return out
        beyond = [s for s in shelves if not scope.holds(s.place) and any(map(scope.holds, s.below))]
        return self._take(beyond, limit, left, skip=skip, above=scope)

    def together(self, entry: Entry, other: Entry) -> bool:
        """Whether both are of one unit, which must not be cut."""
        return entry in self._units and other in self._units[entry]

    def peek(self) -> Entry | None:
        """The next victim; None when there is none."""
        return next(iter(self.coldest(1)), None)

    def expired(self, now_ms: int, limit: int) -> list[Entry]:
        """Extents that are too old for policy TTL and can go now, as ``coldest`` gives them."""
        if not self.policy.ttl_ms:
            self.behind = False
            return []
        oldest = now_ms - self.policy.ttl_ms
        return self._take(list(self._shelves.values()), limit, self._begin(), until=oldest)

    def refresh(self, limit: int) -> None:
        """Background work of about ``limit`` heap operations, so that ``coldest`` has little to
        catch up with after a long time without eviction."""
        limit = min(limit, ORDER_STEPS_MAX)
        left = self._begin(limit)
        for shelf in self._shelves.values():
            while shelf.skipped and left:
                left -= 1
                self._ready(shelf.skipped.pop())
        self._take(list(self._shelves.values()), limit, left)

    def _begin(self, budget: int = ORDER_STEPS_MAX) -> int:
        """What every call starts with; returns the steps left of its budget."""
        self.behind = False
        for _ in range(min(len(self._bereaved), budget)):
            budget -= 1
            self._mourn(self._bereaved.popleft())
        for shelf in self._shelves.values():
            if shelf.left_over > max(_LEFT_OVER_MIN, len(shelf.heap) // 2) and not shelf.old:
                shelf.old, shelf.heap, shelf.left_over = shelf.heap, [], 0
            budget -= self._clean(shelf, budget)
        return budget

    def catch_up(self, entries: Iterable[Entry]) -> None:
        """Of extents that left, tell these children now; the others are told in the background."""
        if self._bereaved:
            for entry in entries:
                self._mourn(entry)

    def _mourn(self, child: Entry) -> None:
        parents = tuple(p for p in child.parents if p.alive)
        if len(parents) == len(child.parents):
            return
        child.parents = parents
        child.orphan = True
        if child.queued is not OUT and child.queued != IDLE:
            self._unqueue(child, IDLE)
            self._ready(child)

    def _clean(self, shelf: Shelf, budget: int) -> int:
        """Move what counts from ``old`` to the heap. The tail of a heap can go without sorting."""
        done = 0
        while shelf.old and done < budget:
            done += 1
            score, entry = shelf.old.pop()
            if entry.queued == score and entry.shelf is shelf:
                entry.queued = IDLE
                self._ready(entry)
        if not shelf.old:
            shelf.strange = False
        return done

    def _take(
        self,
        shelves: list[Shelf],
        limit: int,
        budget: int,
        *,
        until: float = IDLE,
        skip: Container[Entry] = _NOTHING,
        above: Scope | None = None,
    ) -> list[Entry]:
        """Merge the shelves' heaps from their cold ends."""
        for shelf in shelves:
            aside, shelf.aside = shelf.aside, []
            for entry in aside:
                self._ready(entry)
        heaps = [(shelf, shelf.heap) for shelf in shelves]
        heaps += [(shelf, shelf.old) for shelf in shelves if not shelf.strange]
        heads = [(heap[0], n, shelf, heap) for n, (shelf, heap) in enumerate(heaps) if heap]
        heapq.heapify(heads)
        out: list[Entry] = []
        while heads and len(out) < limit:
            _, number, shelf, heap = heads[0]
            item = heap[0]
            if item[0] > until:
                break
            if budget <= 0:
                self.behind = True
                break
            budget -= 1
            self.steps += 1
            self._examine(item, shelf, heap, out, until, skip, above)
            if heap:
                heapq.heapreplace(heads, (heap[0], number, shelf, heap))
            else:
                heapq.heappop(heads)
        return out

    def _examine(
        self,
        item: Item,
        shelf: Shelf,
        heap: list[Item],
        out: list[Entry],
        until: float,
        skip: Container[Entry],
        above: Scope | None,
    ) -> None:
        """Take the coldest item of a heap, push it again, or let it go."""
        pushed, entry = item
        if entry.queued != pushed or entry.shelf is not shelf:
            heapq.heappop(heap)
            shelf.left_over -= 1
            return
        score = self._score(entry)
        if score > pushed:
            entry.queued = score
            heapq.heapreplace(heap, (score, entry))
            return
        heapq.heappop(heap)
        entry.queued = IDLE
        if not self._free(entry):
            return
        unit = self._units.get(entry, (entry,))
        if any(m in skip for m in unit):
            shelf.skipped.append(entry)
            return
        if above is not None and not above.holds_ancestor_of(entry):
            # What it stood on has been removed: it belongs on another shelf.
            everything = with_ancestors((entry,))
            self._shelve(entry, frozenset((e.storage, e.storage_type) for e in everything))
            return
        shelf.aside.append(entry)
        if any(m.leaving for m in unit) or (
            until < IDLE and any(self.policy.score(m) > until for m in unit)
        ):
            return
        out += unit
