"""RemoveCache, TrimCache, and emptying instances and storages (wire.md §9)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvcm.cache.api import RemoveRequest, TrimRequest
from kvcm.cache.base import Context
from kvcm.core.errors import InvalidArgument, NotReady
from kvcm.core.mask import BlockMask
from kvcm.core.types import TrimStrategy
from kvcm.metaindex import bits
from kvcm.metaindex.book import Entry
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import Decide, InstanceIndex
from kvcm.metaindex.records import Cause, Extent, Phase, State
from kvcm.metaindex.stores.common import Turn

_log = logging.getLogger(__name__)
_LIVE = (Phase.OPEN, Phase.SETTLED)
_KEYS_AT_ONCE = 192
_ENTRIES_A_LOOK = 64
_EXTENTS_AT_ONCE = 128
"""Read, and then committed, together: somebody waits for the answer, so few round trips."""


class Removal:
    """Use cases that take blocks away.

    Args:
        raise_trim: raises an instance's trim number in the registry, by uid; returns the new one.
    """

    def __init__(self, context: Context, raise_trim: Callable[[str], Awaitable[int]]) -> None:
        self._context = context
        self._raise_trim = raise_trim
        self._running: set[asyncio.Task[None]] = set()

    async def remove(self, request: RemoveRequest) -> None:
        """RemoveCache: the unmasked keys stop serving; open ones are cancelled.

        Raises:
            InstanceNotExist, InvalidArgument: the request.
            NotReady: the index store failed; call again.
        """
        index = self._context.instance(request.instance_id)
        batch = await self._context.keys(index, request)
        keys = batch.array()
        flags = (request.mask or BlockMask(offset=0)).flags(len(keys))
        wanted = list(dict.fromkeys(k for k, flag in zip(keys, flags, strict=True) if not flag))
        named: dict[bytes, int] = {}
        for at in range(0, len(wanted), _KEYS_AT_ONCE):
            await self._find(index, wanted[at : at + _KEYS_AT_ONCE], named)
        await _change(
            index,
            list(named),
            lambda extent, state: take_out(index, extent, state, named[extent.extent_id]),
            Reason.REMOVED,
        )

    async def _find(self, index: InstanceIndex, keys: list[int], named: dict[bytes, int]) -> None:
        """Add to ``named`` the positions of keys by extent."""
        rows = await index.rows_of(keys)
        views = await index.views_of({e for row in rows for e, _ in row})
        for key, row in zip(keys, rows, strict=True):
            raw = key.to_bytes(8, "little", signed=True)
            for extent_id, position in row:
                view = views.get(extent_id)
                if view is not None and view.key_at(position) == raw:
                    named[extent_id] = named.get(extent_id, 0) | 1 << position

    async def trim(self, request: TrimRequest) -> None:
        """TrimCache. Everything granted before it is dead when it returns.

        A call that is cancelled goes on to its end all the same.

        Raises:
            InstanceNotExist, InvalidArgument: the request.
            NotReady: the index is not loaded, or its store failed; call again.
        """
        index = self._context.instance(request.instance_id)
        strategy = request.strategy
        if strategy == TrimStrategy.TIMESTAMP:
            begin, end = request.begin_timestamp, request.end_timestamp
            if end <= begin:
                raise InvalidArgument(f"end_timestamp {end} is not after begin_timestamp {begin}")
            await self._to_its_end(self._trim_between(index, begin * 1000, end * 1000))
        elif strategy == TrimStrategy.REMOVE_ALL_CACHE:
            index.raise_trim(await self._raise_trim(index.uid))
        elif strategy == TrimStrategy.REMOVE_ALL_META:
            await self._to_its_end(self._forget_all(index))
        else:
            raise InvalidArgument(f"strategy {int(strategy)} is not a trim strategy")

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("a trim ended early: %s", error)

    async def settled(self) -> None:
        """Wait for trims whose callers are gone."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _trim_between(self, index: InstanceIndex, begin_ms: int, end_ms: int) -> None:
        _require_loaded(index)

        def chosen(entry: Entry) -> bool:
            return entry.phase is Phase.SETTLED and begin_ms <= entry.finished_ms < end_ms

        await _retire(index, await _choose(index, chosen), Reason.TRIMMED)

    async def _forget_all(self, index: InstanceIndex) -> None:
        """TS_REMOVE_ALL_META: records go, the files are left to the repair sweep."""
        _require_loaded(index)
        index.trim_held += 1
        try:
            index.raise_trim(await self._raise_trim(index.uid))
            dead = await _choose(index, lambda entry: entry.trim < index.trim)
            await _retire(index, dead, Reason.TRIMMED, keep_bytes=True)
        finally:
            index.trim_held -= 1

    async def drop_storage(self, storage: str) -> None:
        """Forget all blocks of a storage: they become misses.

        Raises:
            NotReady: the index store failed; call again.
        """
        for index in list(self._context.index.by_uid.values()):
            lost = await _choose(index, lambda entry: entry.storage == storage)
            await _retire(index, lost, Reason.STORAGE)


def _require_loaded(index: InstanceIndex) -> None:
    if not index.loaded:
        raise NotReady("the instance is still being loaded")


async def _choose(index: InstanceIndex, chosen: Callable[[Entry], bool]) -> list[bytes]:
    """The extents that are open or settled, and chosen."""
    turn = Turn(index.clock)
    found: list[bytes] = []
    entries = list(index.book.entries.values())
    for at in range(0, len(entries), _ENTRIES_A_LOOK):
        part = entries[at : at + _ENTRIES_A_LOOK]
        found += [e.extent_id for e in part if e.phase in _LIVE and chosen(e)]
        if turn.is_over():
            await turn.give()
    return found


async def _retire(
    index: InstanceIndex, extent_ids: Sequence[bytes], reason: Reason, *, keep_bytes: bool = False
) -> None:
    """Take all blocks of extents out, whatever they are doing."""
    await _change(
        index,
        extent_ids,
        lambda extent, state: take_out(index, extent, state, bits.ones(extent.count)),
        reason,
        keep_bytes=keep_bytes,
    )


async def _change(
    index: InstanceIndex,
    extent_ids: Sequence[bytes],
    decide: Decide,
    reason: Reason,
    *,
    keep_bytes: bool = False,
) -> None:
    """Raises the first error, once all that could be changed are."""
    answers = await change_many(
        index,
        extent_ids,
        decide,
        keep_bytes=keep_bytes,
        at_once=_EXTENTS_AT_ONCE,
        reason=reason,
    )
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer


def take_out(index: InstanceIndex, extent: Extent, state: State, positions: int) -> State | None:
    """The state without the blocks at ``positions``; None when nothing changes.

    An open extent's blocks are cancelled: its finish answers OK and does not publish them.
    """
    version = index.new_version()
    if state.phase is Phase.OPEN:
        cancelled = state.cancelled | (positions & bits.ones(extent.count))
        if cancelled == bits.ones(extent.count):
            return state.next(version, phase=Phase.ABORTED, cause=Cause.CANCELLED)
        return None if cancelled == state.cancelled else state.next(version, cancelled=cancelled)
    if state.phase is not Phase.SETTLED or not state.serving & positions:
        return None
    serving = state.serving & ~positions
    phase = Phase.SETTLED if serving else Phase.RETIRED
    return state.next(version, phase=phase, serving=serving)
