"""Limits of a group as numbers; what is not set does not limit."""

from __future__ import annotations

from kvcm.core.types import InstanceGroup, StorageType

UNLIMITED = 1 << 62


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
