"""Which of a batch of keys have a place, in order, misses included (raw form)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcm.core.keys import KeyForm
from kvcm.metaindex import bits
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.readcache import Ref, View
from kvcm.metaindex.reading import RowRefs
from kvcm.metaindex.records import Phase

_CHUNK_FIRST = 64
_CHUNK_GROWTH = 4
_CHUNK_MAX = 2048
_FAR_CHUNK_GROWTH = 128
_FAR_CHUNK_MAX = 8192
"""Behind a network a round trip costs more than rows that were not needed."""


class Segment(NamedTuple):
    """Keys [start, start + length) of the request lie at ``position`` on of ``view``."""

    start: int
    length: int
    view: View
    position: int


Usable = Callable[[View], int]
"""Positions of a view that count, as a bit set."""


class Scan:
    """Scan stretches of a batch of keys; results accumulate.

    Attributes:
        segments: what was found, in request order.
        others: for keys that were not found, the references of their rows that still hold a place.
        former: for keys that were not found, where a living extent held them before.

    With ``partial``, what lies in shards that cannot be reached counts as not found.
    """

    def __init__(
        self, index: InstanceIndex, keys: array[int], raw: bytes, *, partial: bool = False
    ) -> None:
        self.index = index
        self._partial = partial
        self.keys = keys
        self.raw = raw
        self.segments: list[Segment] = []
        self.others: dict[int, RowRefs] = {}
        self.former: dict[int, Segment] = {}
        self._values: dict[int, bytes | None] = {}
        self._found: dict[bytes, View] = {}
        self._chunk = _CHUNK_FIRST

    async def run(self, start: int, end: int, usable: Usable) -> None:
        """Scan keys [start, end).

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store.
        """
        rows, keys = self.index.rows, self.keys
        i = start
        while i < end:
            found: Sequence[Ref] | None = rows.get(keys[i])
            if found is None:
                if keys[i] not in self._values:
                    i += await self._fill(i, end)
                    continue
                found = self._resolve(keys[i])
            i += self._take(i, end, found, usable) if found else 1

    def _take(self, i: int, end: int, refs: Sequence[Ref], usable: Usable) -> int:
        for view, position in refs:
            ok = usable(view) if not view.gone else 0
            if not ok >> position & 1:
                continue
            count = min(view.match(position, KeyForm.RAW, self.raw, 8 * i), end - i)
            count = min(count, bits.run_from(ok, position))
            if count > 0:
                view.hot = True
                self.segments.append(Segment(i, count, view, position))
                return count
        key = self.raw[8 * i : 8 * i + 8]
        holders = [(v, p) for v, p in refs if v.key_at(p) == key]
        kept = [(v.extent.extent_id, p) for v, p in holders if v.live >> p & 1]
        if len(kept) < len(holders):
            self.former[i] = next(Segment(i, 1, v, p) for v, p in holders if not v.live >> p & 1)
        if kept:
            self.others[i] = kept
        return 1

    async def _fill(self, i: int, end: int) -> int:
        """Read rows from key ``i`` on; returns how many of the first keys have none."""
        keys = self.keys[i : min(i + self._chunk, end)]
        if self.index.shared.store.read_ahead > 1:
            self._chunk = min(self._chunk * _FAR_CHUNK_GROWTH, _FAR_CHUNK_MAX)
        else:
            self._chunk = min(self._chunk * _CHUNK_GROWTH, _CHUNK_MAX)
        generation = self.index.row_generation
        values = await self.index.row_values(keys, partial=self._partial)
        missing = next((n for n, value in enumerate(values) if value is not None), len(values))
        if missing == len(values):
            return missing
        extents = self.index.extents_in(values)
        self._found.update(await self.index.views_of(extents, partial=self._partial))
        self._values.update(zip(keys, values, strict=True))
        first = self._resolve(keys[0])
        if first:
            self.index.link(keys[0], first, generation)
        return missing

    def _resolve(self, key: int) -> Sequence[Ref]:
        """The usable references of a row that was read."""
        value = self._values[key]
        if value is None:
            return ()
        return [(self._found[e], p) for e, p in self.index.refs_of(value) if e in self._found]

    def intact(self) -> bool:
        """Whether nothing that was found has gone, or is being evicted, since."""
        return all(
            not s.view.gone
            and s.view.entry is not None
            and s.view.entry.phase in (Phase.OPEN, Phase.SETTLED)
            and not s.view.entry.leaving
            for s in self.segments
        )

    def missing(self, start: int, end: int) -> list[int]:
        """Indexes in [start, end) that no segment covers, ascending."""
        out: list[int] = []
        i = start
        for segment in self.segments:
            if segment.start + segment.length <= start:
                continue
            out += range(i, min(segment.start, end))
            i = max(i, segment.start + segment.length)
        out += range(i, end)
        return out
