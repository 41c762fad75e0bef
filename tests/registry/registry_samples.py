"""Entities that the registry's tests start from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from kvcm.core.types import (
    CacheConfig,
    CacheReclaimStrategy,
    Instance,
    InstanceGroup,
    LocationSpecGroup,
    LocationSpecInfo,
    MetaIndexerConfig,
    ModelDeployment,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)
from kvcm.registry.registry import Registry

OpenRegistry = Callable[..., Awaitable[Registry]]
NewUrl = Callable[[], str]
"""Makes URLs of empty databases."""


def storage(name: str = "nfs_01", root: str = "/tmp/nfs/", **fields: Any) -> StorageConfig:
    spec = {"root_path": root, "key_count_per_file": 8}
    return StorageConfig.model_validate(
        {"global_unique_name": name, "type": StorageType.NFS, "spec": spec} | fields
    )


def group(name: str = "team", **fields: Any) -> InstanceGroup:
    return InstanceGroup.model_validate({"name": name, "version": 1} | fields)


def group_with_indexer(**fields: Any) -> InstanceGroup:
    return group(cache_config=CacheConfig(meta_indexer_config=MetaIndexerConfig(**fields)))


def group_with_trigger(**fields: Any) -> InstanceGroup:
    reclaim = CacheReclaimStrategy(trigger_strategy=TriggerStrategy(**fields))
    return group(cache_config=CacheConfig(reclaim_strategy=reclaim))


def instance(instance_id: str = "model-a", **fields: Any) -> Instance:
    values: dict[str, Any] = {
        "instance_id": instance_id,
        "instance_group": "team",
        "block_size": 16,
        "location_spec_infos": (
            LocationSpecInfo(name="tp0", size=1024),
            LocationSpecInfo(name="tp1", size=1024),
        ),
        "location_spec_groups": (
            LocationSpecGroup(name="all", spec_names=("tp0", "tp1")),
            LocationSpecGroup(name="first", spec_names=("tp0",)),
        ),
        "model_deployment": ModelDeployment(model_name="m", dtype="bf16", tp_size=2, extra="e"),
    }
    return Instance.model_validate(values | fields)
