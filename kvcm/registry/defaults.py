"""What a new registry starts with (wire.md §7)."""

from __future__ import annotations

from kvcm.core.types import (
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    ReclaimPolicy,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)

DEFAULT_STORAGE_ROOT = "/tmp/nfs/"
DEFAULT_STORAGE_NAME = "nfs_01"


def default_storage(root: str = DEFAULT_STORAGE_ROOT) -> StorageConfig:
    """Storage ``nfs_01``: files under ``root``, 8 keys a file."""
    return StorageConfig(
        global_unique_name=DEFAULT_STORAGE_NAME,
        type=StorageType.NFS,
        spec={"root_path": root, "key_count_per_file": 8},
    )


def default_group() -> InstanceGroup:
    """Group ``default``: 30 GB, 10 GB per type, LRU at 0.8, a million keys an instance."""
    types = (StorageType.NFS, StorageType.HF3FS, StorageType.TAIRMEMPOOL)
    return InstanceGroup(
        name="default",
        storage_candidates=(DEFAULT_STORAGE_NAME,),
        global_quota_group_name="default_quota_group",
        max_instance_count=100,
        quota=InstanceGroupQuota(
            capacity=30_000_000_000,
            quota_config=tuple(
                QuotaConfig(storage_type=kind, capacity=10_000_000_000) for kind in types
            ),
        ),
        cache_config=CacheConfig(
            reclaim_strategy=CacheReclaimStrategy(
                reclaim_policy=ReclaimPolicy.LRU,
                trigger_strategy=TriggerStrategy(used_percentage=0.8),
                delay_before_delete_ms=1_000,
            ),
            data_storage_strategy=CachePreferStrategy.PREFER_3FS,
            meta_indexer_config=MetaIndexerConfig(max_key_count=1_000_000, mutex_shard_num=16),
        ),
        version=1,
    )
