"""The read cache: extents as lookups use them, with their encoded answers.

Bounded by bytes over all instances. A view leaves the cache before the commit that changes its
extent is sent, and again after it, so that a fill that raced with the commit is dropped too.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from kvcm.core.keys import KeyForm, pack_keys
from kvcm.core.storage import ExtentName
from kvcm.metaindex import answers, bits
from kvcm.metaindex.answers import Answers, Selector
from kvcm.metaindex.book import Entry
from kvcm.metaindex.ports import Addresses
from kvcm.metaindex.records import Extent, Phase, State

_VIEW_BYTES = 700
"""What a view weighs beside its keys and answers; measured in benchmarks/."""

_SHRINK_STEP = 256

Ref = tuple["View", int]


class View:
    """One extent, ready to be compared and answered.

    ``alive`` ends when it leaves the cache. ``gone`` is set when it left because its extent was
    about to change; one that only made room is still right for the request that holds it.

    ``packed`` and ``answers`` are what ``key_bytes`` and ``shown`` keep, the latter for
    ``selector``; None as long as nobody asked. A walk reads them without a call.
    """

    __slots__ = (
        "_covering",
        "_more",
        "_packed_offsets",
        "alive",
        "answers",
        "cache",
        "entry",
        "extent",
        "following",
        "gone",
        "hot",
        "live",
        "owner",
        "packed",
        "row_keys",
        "rows",
        "selector",
        "serving",
        "size",
        "storage",
    )

    def __init__(
        self,
        extent: Extent,
        state: State,
        owner: ExtentName,
        storage: Addresses | None,
        entry: Entry | None,
        cache: ReadCache,
        rows: dict[int, tuple[Ref, ...]],
    ) -> None:
        self.cache = cache
        self.extent = extent
        self.owner = owner
        self.storage = storage
        self.entry = entry
        self.rows = rows
        everything = bits.ones(extent.count)
        settled = state.phase is Phase.SETTLED
        self.serving = state.serving if settled and storage is not None else 0
        is_open = state.phase is Phase.OPEN
        self.live = everything & ~state.cancelled if is_open else self.serving
        self.alive = True
        self.gone = False
        self.hot = False
        self.following: View | None = None
        self.row_keys: list[int] = []
        self.size = _VIEW_BYTES + len(extent.keys)
        self.packed: bytes | None = None
        self._packed_offsets: Sequence[int] = ()
        self.selector: Selector | None = None
        self.answers: Answers | None = None
        self._more: dict[Selector, Answers] | None = None
        self._covering: dict[int, int] = {}

    def key_bytes(self, form: KeyForm) -> tuple[bytes, Sequence[int]]:
        """The keys in a form and the n + 1 offsets of each key in it."""
        if form is KeyForm.RAW:
            return self.extent.keys, range(0, len(self.extent.keys) + 8, 8)
        if self.packed is None:
            return self._set_packed(*pack_keys(self.extent.keys))
        return self.packed, self._packed_offsets

    def _set_packed(self, packed: bytes, offsets: array[int]) -> tuple[bytes, array[int]]:
        self.packed, self._packed_offsets = packed, offsets
        self._grow(len(packed) + 4 * len(offsets))
        return packed, offsets

    def _grow(self, count: int) -> None:
        if self.alive:
            self.size += count
            self.cache.used_bytes += count

    def key_at(self, position: int) -> bytes:
        """The raw 8 bytes of one key."""
        return self.extent.keys[position * 8 : position * 8 + 8]

    def shown(self, selector: Selector) -> Answers | None:
        """Encoded answers whose ``ok`` is limited to serving blocks; None when nothing serves."""
        if self.selector is selector:
            return self.answers
        if not self.serving or self.storage is None:
            return None
        if self._more is not None and selector in self._more:
            return self._more[selector]
        made = answers.build(self.extent, self.serving, self.owner, self.storage, selector)
        self._grow(len(made.data) + 4 * len(made.offsets) + 200)
        if self.selector is None:
            self.selector, self.answers = selector, made
        else:
            self._more = {} if self._more is None else self._more
            self._more[selector] = made
        return made

    def entries(self, as_json: bool) -> list[bytes]:
        """Framed locations of all blocks whatever their state, not kept; [] without storage."""
        if self.storage is None:
            return []
        steps = answers.location_entries(self.extent, self.owner, self.storage, 0, as_json)
        return [entry for step in steps for entry in step]

    def covering(self, needed: int) -> int:
        """Positions that hold a place (open or serving) and carry every spec of ``needed``."""
        found = self._covering.get(needed)
        if found is None:
            found = answers.carrying(self.extent, needed) & self.live
            self._covering[needed] = found
        return found

    def match(self, position: int, form: KeyForm, data: bytes, at: int) -> int:
        """How many keys from ``position`` on equal the request's keys at byte ``at`` of ``data``.

        One memory comparison when all or the whole rest of the request matches.
        """
        keys, offsets = self.key_bytes(form)
        count = len(offsets) - 1
        start = offsets[position]
        mine = keys[start:] if start else keys
        if data.startswith(mine, at):
            return count - position
        if mine.startswith(rest := data[at : at + len(mine)]):
            return _whole_keys(offsets, start + len(rest)) - position
        length = min(len(mine), len(data) - at)
        a = np.frombuffer(mine, dtype=np.uint8, count=length)
        b = np.frombuffer(data, dtype=np.uint8, count=length, offset=at)
        differ = a != b
        first = int(differ.argmax()) if length else 0
        same = first if length and differ[first] else length
        return _whole_keys(offsets, start + same) - position

    def drop(self) -> None:
        """Leave the cache: rows that point here go, hints stop."""
        self.alive = False
        self.following = None
        for key in self.row_keys:
            if any(view is self for view, _ in self.rows.get(key, ())):
                del self.rows[key]
        self.row_keys = []
        self.selector = self.answers = self._more = None
        self.packed = None


def pack_together(views: Iterable[View]) -> None:
    """Make the packed keys of many views: NumPy costs the same for one extent and for dozens."""
    todo = [view for view in views if view.packed is None]
    if not todo:
        return
    packed, offsets = pack_keys(b"".join([view.extent.keys for view in todo]))
    marks = np.frombuffer(offsets, dtype=np.uint32)
    at = 0
    for view in todo:
        end = at + view.extent.count
        own = array("I", (marks[at : end + 1] - marks[at]).tobytes())
        view._set_packed(packed[offsets[at] : offsets[end]], own)
        at = end


def _whole_keys(offsets: Sequence[int], end: int) -> int:
    """How many keys end at or before byte ``end``."""
    low, high = 0, len(offsets) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if offsets[middle] <= end:
            low = middle
        else:
            high = middle - 1
    return low


class ReadCache:
    """Views of all instances, bounded by bytes, with a second chance for those used since."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.used = self.read = 0
        """Extents that prefix lookups went over, and those read from the store; whoever uses them
        counts."""
        self.views: dict[bytes, View] = {}
        self._queue: deque[View] = deque()

    def put(self, view: View) -> None:
        """Add a view, replacing one of the same extent."""
        self.invalidate(view.extent.extent_id)
        self.views[view.extent.extent_id] = view
        self.used_bytes += view.size
        self._queue.append(view)
        self.shrink()

    def link(self, key: int, refs: Sequence[Ref]) -> None:
        """Remember a row whose extents are all cached."""
        refs[0][0].rows[key] = tuple(refs)
        for view, _ in refs:
            view.row_keys.append(key)

    def invalidate(self, extent_id: bytes) -> None:
        """Drop one extent's view."""
        view = self.views.pop(extent_id, None)
        if view is not None:
            view.gone = True
            view.drop()

    def clear_instance(self, rows: dict[int, tuple[Ref, ...]]) -> None:
        """Drop all views of one instance (it was trimmed or removed)."""
        for extent_id in [e for e, v in self.views.items() if v.rows is rows]:
            self.invalidate(extent_id)
        rows.clear()

    def shrink(self) -> None:
        """Make room when the limit is passed, in a bounded step; views also grow while in use."""
        for _ in range(_SHRINK_STEP):
            if self.used_bytes <= self.limit_bytes or not self._queue:
                return
            view = self._queue.popleft()
            if view.alive and view.hot:
                view.hot = False
                self._queue.append(view)
                continue
            self.used_bytes -= view.size
            if view.alive:
                del self.views[view.extent.extent_id]
                view.drop()
