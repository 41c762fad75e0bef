"""Limits and watermarks as numbers; what is not set does not limit. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvcm.core.types import (
    CacheReclaimStrategy,
    InstanceGroup,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)

UNLIMITED = 1 << 62
LOW_MARK_POINTS = 0.05
"""Unless told otherwise, eviction goes on to this fraction of the capacity below the mark."""


@dataclass(frozen=True, slots=True)
class Marks:
    """A limit with its watermark, all in bytes (or in blocks, for a key count).

    Above ``high`` eviction takes usage down to ``low``; ``high`` None = no trigger applies, so
    nothing is evicted for room. ``drains``: what is above ``capacity`` goes all the same, which
    happens when the capacity is lowered (wire.md §9).
    """

    capacity: int
    high: int | None = None
    low: int = 0
    drains: bool = True


def marks(
    capacity: int, percentage: float, *, size: int = 0, low: float = 0.0, drains: bool = True
) -> Marks:
    """Marks of one limit.

    Args:
        capacity: the hard limit; UNLIMITED = none, then a percentage means nothing.
        percentage: fraction of the capacity; 0 = unset, above 1 = never.
        size: absolute mark in the same unit; 0 = unset, above the capacity = never. The lower of
            two marks counts.
        low: where eviction stops, a fraction of the capacity. 0, or one above the mark that
            counts, is ``LOW_MARK_POINTS`` below the mark.
    """
    found: list[tuple[int, int]] = []
    floor = math.floor(capacity * low) if capacity < UNLIMITED else 0
    if 0 < percentage <= 1 and capacity < UNLIMITED:
        points = math.floor(capacity * max(0.0, percentage - LOW_MARK_POINTS))
        found.append((math.floor(capacity * percentage), points))
    if 0 < size <= capacity:
        found.append((size, math.floor(size * (1 - LOW_MARK_POINTS))))
    if not found:
        return Marks(capacity, drains=drains)
    high, below = min(found)
    return Marks(capacity, high, floor if 0 < floor <= high else below, drains)


def reclaim_of(group: InstanceGroup) -> CacheReclaimStrategy:
    """The group's reclaim strategy; an empty one when it has none."""
    cache = group.cache_config
    return (cache.reclaim_strategy if cache else None) or CacheReclaimStrategy()


def type_capacity(group: InstanceGroup, storage_type: StorageType) -> int:
    """Bytes a group may hold on a type; a type without an entry has no limit of its own."""
    for entry in group.quota.quota_config if group.quota else ():
        if entry.storage_type == storage_type:
            return entry.capacity
    return UNLIMITED


def group_capacity(group: InstanceGroup) -> int:
    """Bytes a group may hold; a group without a quota message has no limit."""
    return group.quota.capacity if group.quota is not None else UNLIMITED


def key_limit(group: InstanceGroup) -> int:
    """Locations an instance of the group may hold; 0 in the config is no limit."""
    config = group.cache_config.meta_indexer_config if group.cache_config else None
    return config.max_key_count if config and config.max_key_count > 0 else UNLIMITED


def storage_capacity(config: StorageConfig | None) -> int:
    """Bytes that all groups together may hold on a storage, trash included."""
    return config.capacity_bytes if config and config.capacity_bytes > 0 else UNLIMITED


def group_marks(group: InstanceGroup) -> Marks:
    """Of the group's capacity; the only one that ``used_size`` counts for."""
    reclaim = reclaim_of(group)
    trigger = reclaim.trigger_strategy or TriggerStrategy()
    return marks(
        group_capacity(group),
        trigger.used_percentage,
        size=trigger.used_size,
        low=reclaim.low_percentage,
    )


def type_marks(group: InstanceGroup, storage_type: StorageType) -> Marks:
    """Of the group's capacity on a storage type."""
    return _percent(group, type_capacity(group, storage_type))


def key_marks(group: InstanceGroup) -> Marks:
    """Of the blocks of one instance."""
    return _percent(group, key_limit(group))


def _percent(group: InstanceGroup, capacity: int) -> Marks:
    reclaim = reclaim_of(group)
    trigger = reclaim.trigger_strategy or TriggerStrategy()
    return marks(capacity, trigger.used_percentage, low=reclaim.low_percentage)


def storage_marks(config: StorageConfig | None) -> Marks:
    """Of a storage over all groups. Without a high mark nothing is ever evicted for it."""
    if config is None:
        return Marks(UNLIMITED, drains=False)
    capacity, high, low = storage_capacity(config), config.high_percentage, config.low_percentage
    return marks(capacity, high, low=low, drains=False)


def never_evicts(group: InstanceGroup) -> bool:
    """A quota, but nothing says when to evict: full means refused (field case R36)."""
    if group.quota is None:
        return False
    trigger = reclaim_of(group).trigger_strategy
    return trigger is None or not (trigger.used_percentage or trigger.used_size)
