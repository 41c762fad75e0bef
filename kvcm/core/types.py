"""Wire enumerations and registry entities (wire.md §1, §2).

Entities are frozen pydantic models; ``extra="allow"`` lets fields that a newer version
stored survive an update by this one. Field names equal the wire's.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class StorageType(IntEnum):
    """ST_* of the wire; PLUGIN is ours: whatever a plug-in serves."""

    UNSPECIFIED = 0
    HF3FS = 1
    MOONCAKE = 2
    TAIRMEMPOOL = 3
    NFS = 4
    VCNS_HF3FS = 5
    PLUGIN = 100


STORAGE_TYPE_NAMES: dict[StorageType, str] = {
    StorageType.HF3FS: "hf3fs",
    StorageType.MOONCAKE: "mooncake",
    StorageType.TAIRMEMPOOL: "pace",
    StorageType.NFS: "file",
    StorageType.VCNS_HF3FS: "vcns_hf3fs",
    StorageType.PLUGIN: "plugin",
}
"""JSON ``type`` in storage_configs, and the URI scheme (wire.md §6); a plug-in's are its name."""

PLUGIN_NAME = "plugin"
"""Key of the plug-in's name in ``StorageConfig.spec``, beside its options."""


class QueryType(IntEnum):
    """QT_* of the wire."""

    UNSPECIFIED = 0
    BATCH_GET = 1
    PREFIX_MATCH = 2
    REVERSE_ROLL_SW_MATCH = 3


class TrimStrategy(IntEnum):
    """TS_* of the wire."""

    UNSPECIFIED = 0
    REMOVE_ALL_CACHE = 1
    REMOVE_ALL_META = 2
    TIMESTAMP = 3


class ReclaimPolicy(IntEnum):
    """POLICY_* of the wire."""

    UNSPECIFIED = 0
    LRU = 1
    LFU = 2
    TTL = 3


class CachePreferStrategy(IntEnum):
    """CPS_* of the wire: odd = only that type, even = that type first."""

    UNSPECIFIED = 0
    ALWAYS_3FS = 1
    PREFER_3FS = 2
    ALWAYS_MOONCAKE = 3
    PREFER_MOONCAKE = 4
    ALWAYS_TAIR_MEMPOOL = 5
    PREFER_TAIR_MEMPOOL = 6
    ALWAYS_VCNS_3FS = 7
    PREFER_VCNS_3FS = 8


class AccountRole(IntEnum):
    """ROLE_* of the wire."""

    USER = 0
    ADMIN = 1


class TtlSince(IntEnum):
    """What POLICY_TTL counts an extent's age from (ours: field 102 of CacheReclaimStrategy)."""

    USE = 0
    FINISH = 1


class AdmissionPolicy(IntEnum):
    """Who may write under pressure (ours: field 103 of CacheReclaimStrategy)."""

    ALL = 0
    TINYLFU = 1


class ReportKind(IntEnum):
    """What a reader met (ours: CEK_* of ReportCacheError)."""

    UNSPECIFIED = 0
    MISSING = 1
    """The bytes are not there, or fewer than there should be."""
    CORRUPT = 2
    """They are there, and wrong."""
    UNREACHABLE = 3
    """The storage did not answer, or with an error."""


class ReportOutcome(IntEnum):
    """What became of a reported block (ours: CEO_* of ReportCacheError)."""

    NOTHING = 0
    """Nothing was reported: its entry names no location."""
    ACCEPTED = 1
    """Missing or corrupt: the block is a miss from now on. Unreachable: noted."""
    STALE = 2
    """The location is not (or not any more) what a lookup answers; ignored."""
    NOT_VERIFIED = 3
    """Reported missing, but it is there with its full size; nothing changed."""
    UNCHECKED = 4
    """Reported missing, and the storage could not be asked; nothing changed."""
    LIMITED = 5
    """More than the instance's reports may do within a minute; nothing changed."""


class BlockStatus(IntEnum):
    """CLS_* of GetCacheMeta (wire.md §4)."""

    NOT_FOUND = 0
    NEW = 1
    WRITING = 2
    SERVING = 3
    DELETING = 4


class Entity(BaseModel):
    """Base of registry entities: immutable; unknown stored fields are kept.

    ``additions`` are fields of ours that older clients do not know: an update that was not given
    one keeps what is stored (wire.md §9). Pydantic's ``model_fields_set`` tells.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    additions: ClassVar[frozenset[str]] = frozenset()


class StorageConfig(Entity):
    """One storage. ``spec`` holds the fields of the wire's oneof member for ``type``; for PLUGIN
    its options, all of them text, and as ``plugin`` the plug-in's name.

    ``capacity_bytes`` is what all groups together may hold there, trash included; 0 = unlimited.
    Above ``high_percentage`` of it (a fraction; 0 = never) eviction goes on down to
    ``low_percentage`` (0 = 5 points below).
    """

    additions = frozenset({"capacity_bytes", "high_percentage", "low_percentage"})

    global_unique_name: str
    type: StorageType
    spec: dict[str, Any] = {}
    check_storage_available_when_open: bool = False
    enabled: bool = True
    capacity_bytes: int = 0
    high_percentage: float = 0.0
    low_percentage: float = 0.0

    @property
    def type_name(self) -> str:
        """JSON ``type`` in storage_configs, and the scheme of its URIs; empty when it has none."""
        if self.type is StorageType.PLUGIN:
            return str(self.spec.get(PLUGIN_NAME, ""))
        return STORAGE_TYPE_NAMES.get(self.type, "")


class StorageStatus(StorageConfig):
    """A storage as listed; ``unavailable_reason`` is empty while it can be used. ``health``:
    available, suspect or unavailable, as its probes and readers tell; empty from a manager that
    does not say. ``unwritable_reason``: why it takes no writes though it can be read."""

    unavailable_reason: str = ""
    health: str = ""
    unwritable_reason: str = ""


class QuotaConfig(Entity):
    """Capacity in bytes for one storage type inside a group."""

    storage_type: StorageType
    capacity: int


class InstanceGroupQuota(Entity):
    """Capacity in bytes of a group, whole and per storage type."""

    capacity: int = 0
    quota_config: tuple[QuotaConfig, ...] = ()


class TriggerStrategy(Entity):
    """Watermark: bytes and fraction of the capacity; above 1 = never by this trigger."""

    used_size: int = 0
    used_percentage: float = 0.0


class CacheReclaimStrategy(Entity):
    """When and how a group's space is reclaimed.

    ``low_percentage``: where eviction stops, a fraction of the capacity; 0 = 5 points below the
    mark that was crossed. ``ttl_seconds`` and ``ttl_since`` serve POLICY_TTL; 0 = none is too old.
    ``reclaim_step_size`` (bytes) and ``reclaim_step_percentage`` (of the limit) bound one round.
    """

    additions = frozenset({"low_percentage", "ttl_seconds", "ttl_since", "admission"})

    storage_unique_name: str = ""
    reclaim_policy: ReclaimPolicy = ReclaimPolicy.UNSPECIFIED
    trigger_strategy: TriggerStrategy | None = None
    trigger_period_seconds: int = 0
    reclaim_step_size: int = 0
    reclaim_step_percentage: int = 0
    delay_before_delete_ms: int = 0
    low_percentage: float = 0.0
    ttl_seconds: int = 0
    ttl_since: TtlSince = TtlSince.USE
    admission: AdmissionPolicy = AdmissionPolicy.ALL


class MetaStorageBackendConfig(Entity):
    """Kept and shown; the server's own index settings decide (wire.md §9)."""

    storage_type: str = ""
    storage_uri: str = ""


class MetaCachePolicyConfig(Entity):
    """Kept and shown; the server's own cache settings decide (wire.md §9)."""

    capacity: int = 0
    type: str = ""
    cache_shard_bits: int = 0
    high_pri_pool_ratio: float = 0.0


class MetaIndexerConfig(Entity):
    """Index limits of each instance of a group."""

    max_key_count: int = 0
    mutex_shard_num: int = 0
    batch_key_size: int = 0
    meta_storage_backend_config: MetaStorageBackendConfig | None = None
    meta_cache_policy_config: MetaCachePolicyConfig | None = None


class CacheConfig(Entity):
    """Reclaim, placement and index settings of a group."""

    reclaim_strategy: CacheReclaimStrategy | None = None
    data_storage_strategy: CachePreferStrategy = CachePreferStrategy.UNSPECIFIED
    meta_indexer_config: MetaIndexerConfig | None = None


class InstanceGroup(Entity):
    """A team or model family: owns quota, watermarks, candidates, policies."""

    name: str
    storage_candidates: tuple[str, ...] = ()
    global_quota_group_name: str = ""
    max_instance_count: int = 0
    quota: InstanceGroupQuota | None = None
    cache_config: CacheConfig | None = None
    user_data: str = ""
    version: int = 0


class LocationSpecInfo(Entity):
    """A named part of a block and its size in bytes."""

    name: str
    size: int


class LocationSpecGroup(Entity):
    """A named set of specs."""

    name: str
    spec_names: tuple[str, ...] = ()


class ModelDeployment(Entity):
    """Identity of what computes the cache."""

    model_name: str = ""
    dtype: str = ""
    use_mla: bool = False
    tp_size: int = 0
    dp_size: int = 0
    lora_name: str = ""
    pp_size: int = 0
    extra: str = ""
    user_data: str = ""


class Instance(Entity):
    """One model deployment. ``uid`` is fresh at every registration; it keys records and files.

    ``shard_count`` is a power of two fixed at registration. Extents whose trim number is below
    ``trim`` are dead. ``closing`` instances refuse every commit and are freed in the background.
    """

    instance_id: str
    instance_group: str
    block_size: int
    location_spec_infos: tuple[LocationSpecInfo, ...] = ()
    location_spec_groups: tuple[LocationSpecGroup, ...] = ()
    model_deployment: ModelDeployment | None = None
    uid: str = ""
    shard_count: int = 16
    trim: int = 0
    closing: bool = False
    registered_at: float = 0.0


class Account(Entity):
    """An account as shown: never the password."""

    user_name: str
    role: AccountRole = AccountRole.USER
