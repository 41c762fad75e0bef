"""How much a group must give back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvcm.core.types import InstanceGroup, StorageType
from kvcm.metaindex.ledger import Ledger

LOW_MARK_POINTS = 0.05
"""Eviction goes on until usage is this fraction of the capacity below the mark."""


@dataclass(frozen=True, slots=True)
class Excess:
    """What must go: ``amount`` bytes (or blocks, for a key count) within a scope.

    ``storage_type`` and ``uid`` narrow it to a storage type or an instance.
    """

    amount: int
    storage_type: StorageType | None = None
    uid: str | None = None
    in_blocks: bool = False


def over(used: int, capacity: int, percentage: float, size: int = 0) -> int:
    """How much of ``used`` must go, 0 when no mark is crossed.

    Args:
        capacity: hard limit of the scope; 0 or less = no percentage mark.
        percentage: fraction of the capacity; 0 = unset, above 1 = never.
        size: absolute mark in the same unit; 0 = unset.
    """
    marks: list[tuple[int, int]] = []
    if 0 < percentage <= 1 and capacity > 0:
        high = math.floor(capacity * percentage)
        low = math.floor(capacity * max(0.0, percentage - LOW_MARK_POINTS))
        marks.append((high, low))
    if size > 0:
        marks.append((size, math.floor(size * (1 - LOW_MARK_POINTS))))
    return max((used - low for high, low in marks if used > high), default=0)


def excesses(group: InstanceGroup, uids: list[str], ledger: Ledger) -> Iterator[Excess]:
    """The marks that a group crosses: whole group, per type, keys of each instance.

    Each is measured when it is asked for, so that what was evicted for one counts for the next.
    """
    cache = group.cache_config
    reclaim = cache.reclaim_strategy if cache else None
    trigger = reclaim.trigger_strategy if reclaim else None
    if trigger is None:
        return
    percentage = trigger.used_percentage
    capacity = group.quota.capacity if group.quota else 0
    used = ledger.group(group.name).counted
    # A hard limit lowered below the usage drains like a crossed mark.
    amount = over(used, capacity, percentage, trigger.used_size)
    if amount:
        yield Excess(amount)
    for entry in group.quota.quota_config if group.quota else ():
        used = ledger.group_type(group.name, entry.storage_type).counted
        amount = over(used, entry.capacity, percentage)
        if amount:
            yield Excess(amount, storage_type=entry.storage_type)
    config = cache.meta_indexer_config if cache else None
    limit = config.max_key_count if config else 0
    for uid in uids:
        amount = over(ledger.instance(uid).blocks, limit, percentage)
        if amount:
            yield Excess(amount, uid=uid, in_blocks=True)
