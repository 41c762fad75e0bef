"""RemoveCache, TrimCache, and emptying instances and storages (wire.md §9)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvcm.cache.api import RemoveRequest, TrimRequest
from kvcm.cache.base import Context
from kvcm.core.errors import InvalidArgument, NotReady
from kvcm.core.mask import BlockMask
from kvcm.core.types import TrimStrategy
from kvcm.metaindex import bits
from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Cause, Extent, Phase, State


class Removal:
    """Use cases that take blocks away.

    Args:
        raise_trim: raises an instance's trim number in the registry, by uid; returns the new one.
    """

    def __init__(self, context: Context, raise_trim: Callable[[str], Awaitable[int]]) -> None:
        self._context = context
        self._raise_trim = raise_trim

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
        wanted = [k for k, flag in zip(keys, flags, strict=True) if not flag]
        rows = await index.rows_of(wanted)
        views = await index.views_of({e for row in rows for e, _ in row})
        named: dict[bytes, int] = {}
        for key, row in zip(wanted, rows, strict=True):
            raw = key.to_bytes(8, "little", signed=True)
            for extent_id, position in row:
                view = views.get(extent_id)
                if view is not None and view.key_at(position) == raw:
                    named[extent_id] = named.get(extent_id, 0) | 1 << position
        for extent_id, positions in named.items():
            await index.change(
                extent_id,
                lambda extent, state, gone=positions: take_out(index, extent, state, gone),  # type: ignore[misc]
            )

    async def trim(self, request: TrimRequest) -> None:
        """TrimCache. Everything granted before it is dead when it returns.

        Raises:
            InstanceNotExist, InvalidArgument: the request.
            NotReady: the index is not loaded, or its store failed; call again.
        """
        index = self._context.instance(request.instance_id)
        strategy = request.strategy
        if strategy == TrimStrategy.TIMESTAMP:
            await self._trim_between(index, request.begin_timestamp, request.end_timestamp)
        elif strategy in (TrimStrategy.REMOVE_ALL_CACHE, TrimStrategy.REMOVE_ALL_META):
            index.raise_trim(await self._raise_trim(index.uid))
            if strategy == TrimStrategy.REMOVE_ALL_META:
                await self._forget_all(index)
        else:
            raise InvalidArgument(f"strategy {int(strategy)} is not a trim strategy")

    async def _trim_between(self, index: InstanceIndex, begin: int, end: int) -> None:
        if end <= begin:
            raise InvalidArgument(f"end_timestamp {end} is not after begin_timestamp {begin}")
        if not index.loaded:
            raise NotReady("the instance is still being loaded")
        for entry in list(index.book.entries.values()):
            if entry.phase is Phase.SETTLED and begin * 1000 <= entry.finished_ms < end * 1000:
                await self.retire(index, entry)

    async def _forget_all(self, index: InstanceIndex) -> None:
        """TS_REMOVE_ALL_META: records go, the files are left to the repair sweep."""
        if not index.loaded:
            raise NotReady("the instance is still being loaded")
        for entry in list(index.book.entries.values()):
            if entry.trim < index.trim:
                await self.retire(index, entry, keep_bytes=True)

    async def retire(self, index: InstanceIndex, entry: Entry, *, keep_bytes: bool = False) -> None:
        """Take all blocks of one extent out, whatever it is doing."""
        await index.change(
            entry.extent_id,
            lambda extent, state: take_out(index, extent, state, bits.ones(extent.count)),
            keep_bytes=keep_bytes,
        )


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
