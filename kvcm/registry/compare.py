"""Comparing and merging entities, and numbers fixed at registration. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

from kvcm.core import limits
from kvcm.core.types import (
    Entity,
    Instance,
    InstanceGroup,
    ModelDeployment,
    QuotaConfig,
    StorageConfig,
)
from kvcm.registry.validate import STORAGE_SPEC_FIELDS

E = TypeVar("E", bound=Entity)


def differing_fields(stored: Instance, wanted: Instance) -> list[str]:
    """Wire names of the fields in which a registration differs from the stored instance.

    ``user_data`` does not count, nor does the order of specs, of groups and of names in a group;
    an absent ``model_deployment`` equals an empty one (wire.md §7).
    """
    stored_identity, wanted_identity = _identity(stored), _identity(wanted)
    names = [*stored_identity, *(n for n in wanted_identity if n not in stored_identity)]
    return [n for n in names if stored_identity.get(n) != wanted_identity.get(n)]


def merge_unknown(old: E, new: E) -> E:
    """``new`` with what ``old`` holds beyond the protocol and ``new`` was not given.

    So an update by a client that does not know an addition keeps it (wire.md §9). Parts that
    ``new`` leaves out as a whole take their additions with them.
    """
    have = new.model_extra or {}
    updates = {k: v for k, v in (old.model_extra or {}).items() if k not in have}
    unnamed = new.additions - new.model_fields_set
    for name in type(new).model_fields:
        if name in unnamed:
            if getattr(old, name) != getattr(new, name):
                updates[name] = getattr(old, name)
            continue
        before, after = getattr(old, name), getattr(new, name)
        merged = _merge_field(before, after)
        if merged is not after:
            updates[name] = merged
    if isinstance(new, StorageConfig) and isinstance(old, StorageConfig) and old.type is new.type:
        known = STORAGE_SPEC_FIELDS.get(new.type, {})
        kept = {k: v for k, v in old.spec.items() if k not in known and k not in new.spec}
        if kept:
            updates["spec"] = {**new.spec, **kept}
    return new.model_copy(update=updates) if updates else new


def shard_count(group: InstanceGroup, shards_max: int) -> int:
    """Shards of a new instance's index (design §3): a power of two, 16 up to ``shards_max``."""
    config = group.cache_config.meta_indexer_config if group.cache_config else None
    if config is None:
        return limits.SHARDS_MIN
    by_keys = -(-config.max_key_count // limits.KEYS_PER_SHARD)
    wanted = max(config.mutex_shard_num, by_keys, limits.SHARDS_MIN)
    return min(1 << (wanted - 1).bit_length(), shards_max)


def _identity(instance: Instance) -> dict[str, Any]:
    deployment = (instance.model_deployment or ModelDeployment()).model_dump(exclude={"user_data"})
    return {
        "instance_group": instance.instance_group,
        "block_size": instance.block_size,
        "model_deployment": deployment,
        "location_spec_infos": {
            info.name: info.model_dump() for info in instance.location_spec_infos
        },
        "location_spec_groups": {
            group.name: {**group.model_dump(), "spec_names": frozenset(group.spec_names)}
            for group in instance.location_spec_groups
        },
        **(instance.model_extra or {}),
    }


def _merge_field(before: Any, after: Any) -> Any:
    if isinstance(after, Entity) and type(before) is type(after):
        return merge_unknown(before, after)
    if isinstance(after, tuple) and after and isinstance(after[0], QuotaConfig):
        by_type = {entry.storage_type: entry for entry in before}
        merged = tuple(
            merge_unknown(by_type[entry.storage_type], entry)
            if entry.storage_type in by_type
            else entry
            for entry in after
        )
        return after if all(a is b for a, b in zip(merged, after, strict=True)) else merged
    return after
