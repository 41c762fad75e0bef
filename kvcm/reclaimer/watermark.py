"""How much a group must give back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvcm.core.quota import group_capacity, key_limit
from kvcm.core.types import InstanceGroup, StorageType, TriggerStrategy
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
        capacity: hard limit of the scope. What is above it goes in any case: that happens when the
            limit is lowered (wire.md §9: it drains by reclaim).
        percentage: fraction of the capacity; 0 = unset, above 1 = never.
        size: absolute mark in the same unit; 0 = unset.
    """
    marks = [(capacity, capacity)]
    if 0 < percentage <= 1:
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
    trigger = (reclaim.trigger_strategy if reclaim else None) or TriggerStrategy()
    percentage = trigger.used_percentage
    used = ledger.group(group.name).counted
    amount = over(used, group_capacity(group), percentage, trigger.used_size)
    if amount:
        yield Excess(amount)
    for entry in group.quota.quota_config if group.quota else ():
        used = ledger.group_type(group.name, entry.storage_type).counted
        amount = over(used, entry.capacity, percentage)
        if amount:
            yield Excess(amount, storage_type=entry.storage_type)
    for uid in uids:
        amount = over(ledger.instance(uid).blocks, key_limit(group), percentage)
        if amount:
            yield Excess(amount, uid=uid, in_blocks=True)
