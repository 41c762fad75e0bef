"""GetCacheLocation and GetCacheMeta."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvcm.cache import events
from kvcm.cache.api import (
    LookupAnswer,
    LookupRequest,
    MetaAnswer,
    MetaRequest,
    WireForm,
)
from kvcm.cache.base import Context
from kvcm.cache.scan import Scan, Segment, Usable
from kvcm.cache.walk import PrefixWalk
from kvcm.core.errors import InvalidArgument, ReplyTooLarge
from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import BlockStatus, QueryType
from kvcm.metaindex import answers
from kvcm.metaindex.answers import Answers, Selector
from kvcm.metaindex.book import Entry
from kvcm.metaindex.ids import location_id
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import block_sizes
from kvcm.metaindex.readcache import View
from kvcm.metaindex.records import Phase


class Lookup:
    """Read-only use cases. They take no lock."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def lookup(self, request: LookupRequest) -> LookupAnswer:
        """GetCacheLocation (wire.md §4).

        Raises:
            InstanceNotExist: unknown instance.
            InvalidArgument: query type, sw_size, mask or key count.
            ReplyTooLarge: a batch answer above the reply limit.
            Unavailable, OutcomeUnknown, StaleFence: the index store.
        """
        index = self._context.instance(request.instance_id)
        query = request.query
        if query not in (
            QueryType.BATCH_GET,
            QueryType.PREFIX_MATCH,
            QueryType.REVERSE_ROLL_SW_MATCH,
        ):
            raise InvalidArgument(f"query_type {int(query)} is not a query")
        batch = await self._context.keys(index, request)
        asked = 0
        for name in request.spec_names:
            asked |= index.spec_bits.get(name, 0)
        if request.spec_names and not asked:
            asked = answers.NO_SPECS
        selector = index.selector(request.form is WireForm.JSON, asked)
        answer = self._prefix if query == QueryType.PREFIX_MATCH else self._batch
        try:
            answered = await answer(index, request, batch, selector)
        finally:
            index.shared.cache.shrink()
        self._context.admission.note(index, batch)
        return answered

    async def _prefix(
        self, index: InstanceIndex, request: LookupRequest, batch: KeyBatch, selector: Selector
    ) -> LookupAnswer:
        asked = len(batch)
        masked: Sequence[int] = ()
        rest, start = batch, 0
        if request.mask is not None:
            leading = request.mask.leading(asked)
            if leading is None:
                flags = request.mask.flags(asked)
                masked = [k for k, flag in zip(batch.array(), flags, strict=True) if flag]
                rest = batch.select([not flag for flag in flags])
            elif leading:
                start = batch.offset_of(leading)
                masked = range(leading)
        walk = PrefixWalk(
            index,
            rest,
            start,
            selector,
            multi_storage=request.multi_storage,
            room=self._context.settings.reply_bytes_max,
        )
        while not walk.run():
            await walk.fill()
        index.shared.cache.used += len(walk.views)
        self._touch_chain(index, walk.views)
        if masked and not (walk.views and rest is batch):
            keys = batch.array()[: len(masked)] if rest is batch else masked
            await self._touch_masked(index, keys)
        if index.shared.watchers:
            wanted = len(rest) if rest is not batch else asked - len(masked)
            events.looked_up(
                *(index, request, batch, rest, start, wanted, walk.hits),
                unreadable=walk.unreadable,
            )
        return LookupAnswer(answers.closed(walk.pieces, selector.json), walk.hits, asked)

    def _touch_chain(self, index: InstanceIndex, views: Sequence[View]) -> None:
        entries = [v.entry for v in views if v.entry is not None]
        if entries:
            index.book.touch_chain(entries, self._context.now_ms())

    def _touch(self, index: InstanceIndex, views: Sequence[View]) -> None:
        entries = [v.entry for v in views if v.entry is not None]
        if entries:
            index.book.touch(entries, self._context.now_ms())

    async def _touch_masked(self, index: InstanceIndex, keys: Sequence[int]) -> None:
        """Stamp what masked keys use: the last one present, found by bisection, and its ancestors.

        Masked keys lead back to the chain's head, so presence is monotone.
        """
        low, high = 0, len(keys)
        last: Entry | None = None
        while low < high:
            middle = (low + high) // 2
            entry = await self._entry_of(index, keys[middle])
            if entry is None:
                high = middle
            else:
                last, low = entry, middle + 1
        if last is not None:
            index.book.touch((last,), self._context.now_ms())

    async def _entry_of(self, index: InstanceIndex, key: int) -> Entry | None:
        refs = index.rows.get(key)
        if refs is not None:
            return refs[0][0].entry
        for extent_id, _ in (await index.rows_of([key], partial=True))[0]:
            entry = index.book.entries.get(extent_id)
            if entry is not None and entry.phase in (Phase.OPEN, Phase.SETTLED):
                return entry
        return None

    async def _batch(
        self, index: InstanceIndex, request: LookupRequest, batch: KeyBatch, selector: Selector
    ) -> LookupAnswer:
        count = len(batch)
        window = request.sw_size
        reverse = request.query == QueryType.REVERSE_ROLL_SW_MATCH
        if reverse and not 0 <= window <= count:
            raise InvalidArgument(f"sw_size {window} is not within 0 and the {count} keys")
        segments: list[Segment] = []
        if not reverse or window:
            scan = Scan(index, batch.array(), batch.raw(), partial=True)
            await scan.run(0, count, self._shows(index, selector))
            segments = scan.segments
        if reverse:
            segments = _right_most(segments, window)
        names = [s.name for s in index.instance.location_spec_infos]
        miss = answers.placeholder(names, selector.asked, selector.json)
        pieces: list[bytes] = []
        at = hits = 0
        for segment in segments:
            pieces.append(miss * (segment.start - at))
            shown = _shown(segment.view, selector)
            first, last = segment.position, segment.position + segment.length
            pieces.append(shown.data[shown.offsets[first] : shown.offsets[last]])
            at = segment.start + segment.length
            hits += segment.length
        pieces.append(miss * (count - at))
        self._touch(index, list(dict.fromkeys(s.view for s in segments)))
        size = sum(map(len, pieces))
        if size > self._context.settings.reply_bytes_max:
            raise ReplyTooLarge(
                f"the answer of {size} bytes exceeds the reply limit of "
                f"{self._context.settings.reply_bytes_max} bytes; ask for fewer block_keys"
            )
        if index.shared.watchers:
            events.looked_up(index, request, batch, batch, 0, count, hits)
        return LookupAnswer(answers.closed(pieces, selector.json), hits, count)

    def _shows(self, index: InstanceIndex, selector: Selector) -> Usable:
        available = index.shared.storages.available

        def usable(view: View) -> int:
            shown = view.shown(selector)
            return shown.ok if shown is not None and available(view.extent.storage) else 0

        return usable

    async def get_meta(self, request: MetaRequest) -> MetaAnswer:
        """GetCacheMeta: one location and one JSON string for every unmasked key (wire.md §4).

        Raises:
            InstanceNotExist, InvalidArgument, ReplyTooLarge: as ``lookup``.
            Unavailable, OutcomeUnknown, StaleFence: the index store.
        """
        index = self._context.instance(request.instance_id)
        batch = await self._context.keys(index, request)
        keys = batch.array()
        flags = (request.mask or BlockMask(offset=0)).flags(len(keys))
        wanted = [k for k, flag in zip(keys, flags, strict=True) if not flag]
        as_json = request.form is WireForm.JSON
        names = [s.name for s in index.instance.location_spec_infos]
        miss = answers.placeholder(names, 0, as_json)
        rows = await index.rows_of(wanted, partial=True)
        views = await index.views_of({e for row in rows for e, _ in row}, partial=True)
        entries = [view.entry for view in views.values() if view.entry is not None]
        used = index.book.last_uses(entries) if request.detail_level > 0 else {}
        pieces: list[bytes] = []
        metas: list[str] = []
        encoded: dict[bytes, list[bytes]] = {}
        size = 0
        for key, row in zip(wanted, rows, strict=True):
            raw = key.to_bytes(8, "little", signed=True)
            found = [
                (views[e], p)
                for e, p in row
                if e in views and views[e].live >> p & 1 and views[e].key_at(p) == raw
            ]
            found.sort(key=lambda ref: not ref[0].serving >> ref[1] & 1)
            pieces.append(_entry_of(*found[0], as_json, miss, encoded) if found else miss)
            metas.append(_meta(found, request.detail_level, used))
            size += len(pieces[-1]) + len(metas[-1])
        if size > self._context.settings.reply_bytes_max:
            raise ReplyTooLarge(
                f"the answer of {size} bytes exceeds the reply limit of "
                f"{self._context.settings.reply_bytes_max} bytes; ask for fewer block_keys"
            )
        return MetaAnswer(b"".join(answers.closed(pieces, as_json)), metas)


def _entry_of(
    view: View, position: int, as_json: bool, miss: bytes, encoded: dict[bytes, list[bytes]]
) -> bytes:
    """One block's entry; ``encoded`` keeps its extent's for the other keys of the request."""
    extent_id = view.extent.extent_id
    if extent_id not in encoded:
        encoded[extent_id] = view.entries(as_json)
    entries = encoded[extent_id]
    return entries[position] if entries else miss


def _shown(view: View, selector: Selector) -> Answers:
    shown = view.shown(selector)
    if shown is None:
        raise ReplyTooLarge("the extent changed while the answer was built; ask again")
    return shown


def _right_most(segments: Sequence[Segment], window: int) -> list[Segment]:
    """The right-most ``window`` consecutive found keys, as segments; empty when there is none."""
    chain: list[Segment] = []
    length = 0
    for segment in reversed(segments):
        if chain and segment.start + segment.length != chain[-1].start:
            chain, length = [], 0
        chain.append(segment)
        length += segment.length
        if length >= window:
            break
    if not chain or length < window:
        return []
    chain.reverse()
    # The window is right-most, so what is too much stands at the left.
    extra = length - window
    first = chain[0]
    chain[0] = Segment(
        first.start + extra, first.length - extra, first.view, first.position + extra
    )
    return chain


def _meta(found: Sequence[tuple[View, int]], detail: int, used: Mapping[Entry, int]) -> str:
    if not found:
        return '{"status":"CLS_NOT_FOUND"}'
    view, position = found[0]
    shown = {"id": location_id(view.extent.extent_id, position), "status": _status(view, position)}
    if detail <= 0:
        return json.dumps(shown, separators=(",", ":"))
    full = {**shown, **_details(view, position, used)}
    full["locations"] = [
        {
            "id": location_id(v.extent.extent_id, p),
            "status": _status(v, p),
            **_details(v, p, used),
        }
        for v, p in found
    ]
    return json.dumps(full, separators=(",", ":"), ensure_ascii=False)


def _status(view: View, position: int) -> str:
    serving = view.serving >> position & 1
    return f"CLS_{(BlockStatus.SERVING if serving else BlockStatus.WRITING).name}"


def _details(view: View, position: int, used: Mapping[Entry, int]) -> dict[str, object]:
    extent, entry = view.extent, view.entry
    subset = extent.subset_of[position] if extent.subset_of else 0
    return {
        "size": block_sizes(extent)[subset],
        "create_time_ms": extent.started_ms,
        "finish_time_ms": entry.finished_ms if entry else 0,
        "last_access_time_ms": used[entry] if entry else 0,
        "storage": extent.storage,
    }
