"""Prefix match by walking extents (design.md §6).

Per extent: one row look-up, one memory comparison, one slice of the encoded answer. An extent
remembers which one followed it last time; when the request's bytes go on with that one's keys, even
the row look-up is saved, since equal keys in a serving extent are a hit by definition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcm.core.keys import KeyBatch, KeyForm
from kvcm.metaindex import bits
from kvcm.metaindex.answers import Answers, Selector
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.readcache import Ref, View, pack_together

_READ_AHEAD_GROWTH = 16
_READ_AHEAD_MAX = 4096
_PROBES_PER_EXTENT = 2
_PROBE_STRIDE_MIN = 4
_PROBE_STRIDE_MAX = 64
_PROBE_SPAN = 8192


class PrefixWalk:
    """One prefix lookup over ``batch`` from byte ``at`` of its data on.

    ``run`` goes as far as the cache reaches; ``fill`` then reads what is missing.

    Attributes:
        pieces: encoded locations, in order.
        hits: matched keys.
        views: the extents walked, in order.
    """

    __slots__ = (
        "_ahead",
        "_available",
        "_ended_at",
        "_found",
        "_full",
        "_generation",
        "_heads",
        "_probed_to",
        "_values",
        "at",
        "batch",
        "hits",
        "index",
        "multi_storage",
        "pieces",
        "room",
        "selector",
        "storage",
        "views",
    )

    def __init__(
        self,
        index: InstanceIndex,
        batch: KeyBatch,
        at: int,
        selector: Selector,
        *,
        multi_storage: bool,
        room: int,
    ) -> None:
        self.index = index
        self.batch = batch
        self.at = at
        self.selector = selector
        self.multi_storage = multi_storage
        self.room = room
        self.pieces: list[bytes] = []
        self.views: list[View] = []
        self.hits = 0
        self.storage: str | None = None
        self._available: dict[str, bool] = {}
        self._generation = 0
        self._values: dict[int, bytes | None] = {}
        self._found: Mapping[bytes, View] = {}
        self._ahead = index.shared.store.read_ahead
        self._heads: dict[bytes, Ref] = {}
        self._probed_to = 0
        self._full = False
        self._ended_at: Sequence[Ref] = ()

    def run(self) -> bool:
        """Walk on; True when the lookup is complete, False when ``fill`` must read first."""
        rows = self.index.rows
        end = len(self.batch.data)
        previous = self.views[-1] if self.views else None
        while self.at < end:
            if previous is not None:
                previous = self._follow(previous)
                if self.at >= end:
                    break
            key = self.batch.key_at(self.at)
            refs: Sequence[Ref] | None = rows.get(key)
            is_guess = refs is None and key not in self._values
            if refs is None:
                refs = self._head(key) if is_guess else self._resolve(key)
            found = self._take(refs)
            if found is None:
                self._ended_at = refs
                return self._full or not is_guess
            if previous is not None and previous is not found:
                previous.following = found
            previous = found
        return True

    @property
    def unreadable(self) -> bool:
        """It ended at a block that is on storages that cannot be read, and nowhere else."""
        if self._full:
            return False
        available = self.index.shared.storages.available
        held = [v.extent.storage for v, at in self._ended_at if not v.gone and v.serving >> at & 1]
        return bool(held) and not any(map(available, held))

    def _follow(self, previous: View) -> View:
        """Walk on from hint to hint as far as the request goes on with whole extents; returns the
        last one. Hot: a lookup spends most of its own time here."""
        data, selector, storage = self.batch.data, self.selector, self.storage
        packed = self.batch.form is KeyForm.PACKED
        at, room, hits = self.at, self.room, self.hits
        pieces, views = self.pieces, self.views
        while (view := previous.following) is not None and view.alive:
            keys = view.packed if packed else view.extent.keys
            if keys is None or not data.startswith(keys, at) or view.extent.storage != storage:
                break
            shown = view.answers if view.selector is selector else view.shown(selector)
            if shown is None or not shown.whole or len(shown.data) > room:
                break
            pieces.append(shown.data)
            room -= len(shown.data)
            hits += shown.count
            at += len(keys)
            views.append(view)
            view.hot = True
            previous = view
        self.at, self.room, self.hits = at, room, hits
        return previous

    def _take(self, refs: Sequence[Ref]) -> View | None:
        """Answer from the first usable reference; None ends the walk."""
        for view, position in refs:
            shown = view.shown(self.selector) if not view.gone else None
            if shown is None or not shown.ok >> position & 1 or not self._readable(view):
                continue
            count = view.match(position, self.batch.form, self.batch.data, self.at)
            if not shown.whole:
                count = min(count, bits.run_from(shown.ok, position))
            if count <= 0:
                continue
            return self._append(view, shown, position, count)
        return None

    def _readable(self, view: View) -> bool:
        name = view.extent.storage
        if self.storage is not None and not self.multi_storage:
            return name == self.storage
        found = self._available.get(name)
        if found is None:
            found = self._available[name] = self.index.shared.storages.available(name)
        return found

    def _append(self, view: View, shown: Answers, position: int, count: int) -> View | None:
        offsets = shown.offsets
        start = offsets[position]
        size = offsets[position + count] - start
        cut = self._full = size > self.room
        while size > self.room:
            count -= 1
            size = offsets[position + count] - start
        if count <= 0:
            return None
        self.storage = view.extent.storage
        self.pieces.append(shown.data[start : start + size])
        self.room -= size
        self.hits += count
        key_offsets = view.key_bytes(self.batch.form)[1]
        self.at += key_offsets[position + count] - key_offsets[position]
        self.views.append(view)
        view.hot = True
        return None if cut else view

    async def fill(self) -> None:
        """Read the row at ``at``, and rows ahead of it, with their extents.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        index = self.index
        keys = self._keys_to_read()
        self._generation = index.row_generation
        values = await index.row_values(keys, partial=True)
        extents = index.extents_in(values)
        # The walk only goes forward: what was read before is not needed again.
        found = self._found = await index.views_of(extents, partial=True)
        self._values = dict(zip(keys, values, strict=True))
        if self.batch.form is KeyForm.PACKED:
            pack_together(found.values())
        self._heads = {
            view.key_at(run.start): (view, run.start)
            for view in found.values()
            for run in view.extent.runs
        }
        if found:
            index.stretch = min(view.extent.count for view in found.values())

    def _keys_to_read(self) -> Sequence[int]:
        """The key at ``at`` and some behind it: in growing chunks, or one in so many.

        Only rows at the ends of extents matter, and equal keys need no row (see above). So where
        the extents read last were long, two rows each tell which ones follow.
        """
        if self._ahead <= 1:
            return [self.batch.key_at(self.at)]
        start = self.batch.index_at(self.at)
        stride = min(self.index.stretch // _PROBES_PER_EXTENT, _PROBE_STRIDE_MAX)
        if stride >= _PROBE_STRIDE_MIN and start >= self._probed_to:
            self._probed_to = start + _PROBE_SPAN
            return self.batch.some(start, self._probed_to, stride)
        ahead = self._ahead
        self._ahead = min(ahead * _READ_AHEAD_GROWTH, _READ_AHEAD_MAX)
        return self.batch.some(start, start + ahead)

    def _head(self, key: int) -> Sequence[Ref]:
        """Where a key begins a run of an extent that was read, though its row was not."""
        head = self._heads.get(key.to_bytes(8, "little", signed=True))
        return () if head is None else (head,)

    def _resolve(self, key: int) -> Sequence[Ref]:
        """The usable references of a row that was read: once an extent, not once a key."""
        row = self.index.refs_of(self._values[key])
        usable = [(self._found[e], p) for e, p in row if e in self._found]
        if usable:
            self.index.link(key, usable, self._generation)
        return usable
