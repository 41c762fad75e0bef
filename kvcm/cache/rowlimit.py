"""A row names a bounded number of locations."""

from __future__ import annotations

from collections.abc import Mapping

from kvcm.cache.removal import take_out
from kvcm.core.limits import ROW_REFS_MAX
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.reading import RowRefs


async def with_room(index: InstanceIndex, refs: Mapping[int, RowRefs]) -> dict[int, RowRefs]:
    """References that rows may keep beside a new one; the oldest of those beyond are given up.

    All of them hold a place that the write at hand cannot use (another subset of specs, a storage
    that is away). A block that no row names would hold its space unseen, so it is removed.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: the store.
    """
    kept: dict[int, RowRefs] = {}
    surplus: dict[bytes, int] = {}
    for position, those in refs.items():
        first = max(0, len(those) - (ROW_REFS_MAX - 1))
        kept[position] = those[first:]
        for extent_id, at in those[:first]:
            surplus[extent_id] = surplus.get(extent_id, 0) | 1 << at
    for extent_id in surplus:
        await index.change(
            extent_id,
            lambda extent, state: take_out(index, extent, state, surplus[extent.extent_id]),
            reason=Reason.CROWDED,
        )
    return kept
