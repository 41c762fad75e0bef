"""Names, numbers and types of the wire, held against the descriptors.

The tables are wire.md §1 and §2 in their own notation. A change of an existing line breaks
clients that are in production; what we add has numbers from 100 up.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcm._pb import admin_pb2, meta_pb2

ENUMS_SHARED = """
ErrorCode: UNSPECIFIED 0, OK 1, UNSUPPORTED 2, INTERNAL_ERROR 3, SERVICE_NOT_READY 4, INVALID_ARGUMENT 5,
  DUPLICATE_ENTITY 6, REACH_MAX_ENTITY_CAPACITY 7, INSTANCE_NOT_EXIST 8, SERVER_NOT_LEADER 9, IO_ERROR 20,
  UNKNOWN_ERROR 100, ERROR_MAX 65535.
StorageType: ST_UNSPECIFIED 0, ST_3FS 1, ST_MOONCAKE 2, ST_TAIRMEMPOOL 3, ST_NFS 4, ST_VCNS_3FS 5, ST_PLUGIN 100.
"""
ENUMS_META = """
QueryType: QT_UNSPECIFIED 0, QT_BATCH_GET 1, QT_PREFIX_MATCH 2, QT_REVERSE_ROLL_SW_MATCH 3.
TrimStrategy: TS_UNSPECIFIED 0, TS_REMOVE_ALL_CACHE 1, TS_REMOVE_ALL_META 2, TS_TIMESTAMP 3.
CacheErrorKind: CEK_UNSPECIFIED 0, CEK_MISSING 1, CEK_CORRUPT 2, CEK_UNREACHABLE 3.
CacheErrorOutcome: CEO_NOTHING 0, CEO_ACCEPTED 1, CEO_STALE 2, CEO_NOT_VERIFIED 3, CEO_UNCHECKED 4, CEO_LIMITED 5.
"""
ENUMS_ADMIN = """
ReclaimPolicy: POLICY_UNSPECIFIED 0, POLICY_LRU 1, POLICY_LFU 2, POLICY_TTL 3.
CachePreferStrategy: CPS_UNSPECIFIED 0, CPS_ALWAYS_3FS 1, CPS_PREFER_3FS 2, CPS_ALWAYS_MOONCAKE 3,
  CPS_PREFER_MOONCAKE 4, CPS_ALWAYS_TAIR_MEMPOOL 5, CPS_PREFER_TAIR_MEMPOOL 6, CPS_ALWAYS_VCNS_3FS 7, CPS_PREFER_VCNS_3FS 8.
AccountRole: ROLE_USER 0, ROLE_ADMIN 1.
TtlSince: TTL_SINCE_USE 0, TTL_SINCE_FINISH 1.
AdmissionPolicy: ADMISSION_ALL 0, ADMISSION_TINYLFU 1.
"""

# Fields without a type are strings, as trace_id:1 is throughout the page.
MESSAGES_SHARED = """
Status{code:1 ErrorCode, message:2 s, reason:100 s}
CommonResponse{header:1 CommonResponseHeader}
LocationSpec{name:1 s, uri:2 s}
CacheLocation{type:1 StorageType, spec_size:2 i32, location_specs:3 rep LocationSpec}
LocationSpecInfo{name:1 s, size:2 i64}
LocationSpecGroup{name:1 s, spec_names:2 rep s}
BoolMasksType{values:1 rep bool}
BlockMask{oneof info {offset:1 i32, bool_masks:2 BoolMasksType}}
ModelDeployment{model_name:1 s, dtype:2 s, use_mla:3 bool, tp_size:4 i32, dp_size:5 i32, lora_name:6 s, pp_size:7 i32, extra:8 s, user_data:9 s}
InstanceInfo{quota_group_name:1 s, instance_group_name:2 s, instance_id:3 s, block_size:4 i32, location_spec_infos:5 rep LocationSpecInfo, model_deployment:6 ModelDeployment, location_spec_groups:7 rep LocationSpecGroup}
LocalStorageSpec{}
ThreeFSStorageSpec{cluster_name:1 s, mountpoint:2 s, root_dir:3 s, key_count_per_file:4 i32, touch_file_when_create:5 bool}
VcnsThreeFSStorageSpec{cluster_name:1 s, mountpoint:2 s, root_dir:3 s, key_count_per_file:4 i32, touch_file_when_create:5 bool, remote_host:6 s, remote_port:7 i32, meta_storage_uri:8 s}
MooncakeStorageSpec{local_hostname:1 s, metadata_connstring:2 s, protocol:3 s, rdma_device:4 s, master_service_entry:5 s}
TairMemPoolStorageSpec{domain:1 s, timeout:2 i32, enable_vipserver:3 bool}
NfsStorageSpec{root_path:1 s, key_count_per_file:2 i32}
PluginStorageSpec{name:1 s, options:2 rep PluginOption}
PluginOption{name:1 s, value:2 s}
RegisterInstanceRequest{trace_id:1 s, instance_group:2 s, instance_id:3 s, block_size:4 i32, location_spec_infos:5 rep LocationSpecInfo, model_deployment:6 ModelDeployment, location_spec_groups:7 rep LocationSpecGroup}
GetInstanceInfoRequest{trace_id:1, instance_id:2}
GetCacheMetaRequest{trace_id:1, instance_id:2, block_keys:3 rep i64, token_ids:4 rep i64, block_mask:5 BlockMask, detail_level:6 i32}
GetCacheMetaResponse{header:1 CommonResponseHeader, locations:2 rep CacheLocation, metas:3 rep s}
RemoveCacheRequest{trace_id:1, instance_id:2, block_keys:3 rep i64, token_ids:4 rep i64, block_mask:5 BlockMask}
"""
MESSAGES_META = """
CommonResponseHeader{status:1 Status, request_id:2 s, tracer_result:3 s}
StorageConfig{global_unique_name:1 s, oneof storage_spec{local:2 LocalStorageSpec, threefs:3 ThreeFSStorageSpec, mooncake:4 MooncakeStorageSpec, tair_mem_pool:5 TairMemPoolStorageSpec, nfs:6 NfsStorageSpec, vcnsthreefs:7 ThreeFSStorageSpec, plugin:107 PluginStorageSpec}, check_storage_available_when_open:8 bool, disabled:100 bool, unavailable_reason:101 s, capacity_bytes:102 opt i64, high_percentage:103 opt double, low_percentage:104 opt double, health:105 s, unwritable_reason:106 s}
RegisterInstanceResponse{header:1 CommonResponseHeader, storage_configs:2 s}
GetInstanceInfoResponse{header:1 CommonResponseHeader, instance_group:2 s, instance_info:3 InstanceInfo}
GetCacheLocationRequest{trace_id:1, instance_id:2, query_type:3 QueryType, block_keys:4 rep i64, token_ids:5 rep i64, block_mask:6 BlockMask, sw_size:7 i32, location_spec_names:8 rep s, features:100 u32}
GetCacheLocationResponse{header:1 CommonResponseHeader, locations:2 rep CacheLocation}
StartWriteCacheRequest{trace_id:1, instance_id:2, block_keys:3 rep i64, token_ids:4 rep i64, location_spec_group_names:5 rep s, write_timeout_seconds:6 i32, features:100 u32}
StartWriteCacheResponse{header:1 CommonResponseHeader, write_session_id:2 s, block_mask:3 BlockMask, locations:4 rep CacheLocation}
FinishWriteCacheRequest{trace_id:1, instance_id:2, write_session_id:3 s, success_blocks:4 BlockMask, locations:5 rep CacheLocation}
TrimCacheRequest{trace_id:1, instance_id:2, strategy:3 TrimStrategy, begin_timestamp:4 i32, end_timestamp:5 i32}
ReportCacheErrorRequest{trace_id:1, instance_id:2, block_keys:3 rep i64, token_ids:4 rep i64, locations:5 rep CacheLocation, kinds:6 rep CacheErrorKind, reader:7 s}
ReportCacheErrorResponse{header:1 CommonResponseHeader, outcomes:2 rep CacheErrorOutcome, accepted:3 i32, stale:4 i32, not_verified:5 i32, unchecked:6 i32, limited:7 i32}
"""
MESSAGES_ADMIN = """
CommonResponseHeader{status:1 Status, request_id:2 s}
StorageConfig{global_unique_name:1 s, oneof storage_spec{local:2 LocalStorageSpec, threefs:3 ThreeFSStorageSpec, mooncake:4 MooncakeStorageSpec, tair_mem_pool:5 TairMemPoolStorageSpec, nfs:6 NfsStorageSpec, vcnsthreefs:7 VcnsThreeFSStorageSpec, plugin:107 PluginStorageSpec}, check_storage_available_when_open:8 bool, disabled:100 bool, unavailable_reason:101 s, capacity_bytes:102 opt i64, high_percentage:103 opt double, low_percentage:104 opt double, health:105 s, unwritable_reason:106 s}
AddStorageRequest{trace_id:1, storage:2 StorageConfig}
EnableStorageRequest{trace_id:1, storage_unique_name:2}
DisableStorageRequest{trace_id:1, storage_unique_name:2}
RemoveStorageRequest{trace_id:1, storage_unique_name:2, force:100 bool}
UpdateStorageRequest{trace_id:1, storage:2 StorageConfig, force_update:3 bool}
ListStorageRequest{trace_id:1}
ListStorageResponse{header:1 CommonResponseHeader, storage:2 rep StorageConfig}
TriggerStrategy{used_size:1 i64, used_percentage:2 double}
QuotaConfig{storage_type:1 StorageType, capacity:2 i64}
InstanceGroupQuota{capacity:1 i64, quota_config:2 rep QuotaConfig}
CacheReclaimStrategy{storage_unique_name:1 s, reclaim_policy:2 ReclaimPolicy, trigger_strategy:3 TriggerStrategy, trigger_period_seconds:4 i32, reclaim_step_size:5 i32, reclaim_step_percentage:6 i32, delay_before_delete_ms:7 i32, low_percentage:100 opt double, ttl_seconds:101 opt i64, ttl_since:102 opt TtlSince, admission:103 opt AdmissionPolicy}
MetaStorageBackendConfig{storage_type:1 s, storage_uri:2 s}
MetaCachePolicyConfig{capacity:1 i64, type:2 s, cache_shard_bits:3 i32, high_pri_pool_ratio:4 double}
MetaIndexerConfig{max_key_count:1 i64, mutex_shard_num:2 i64, batch_key_size:3 i64, meta_storage_backend_config:4 MetaStorageBackendConfig, meta_cache_policy_config:5 MetaCachePolicyConfig}
CacheConfig{reclaim_strategy:1 CacheReclaimStrategy, data_storage_strategy:2 CachePreferStrategy, meta_indexer_config:3 MetaIndexerConfig}
InstanceGroup{name:1 s, storage_candidates:2 rep s, global_quota_group_name:3 s, max_instance_count:4 i64, quota:5 InstanceGroupQuota, cache_config:6 CacheConfig, user_data:7 s, version:8 i64}
CreateInstanceGroupRequest{trace_id:1, instance_group:2 InstanceGroup}
UpdateInstanceGroupRequest{trace_id:1, instance_group:2 InstanceGroup, current_version:3 i64}
RemoveInstanceGroupRequest{trace_id:1, name:2, force:100 bool}
GetInstanceGroupRequest{trace_id:1, name:2}
GetInstanceGroupResponse{header:1 CommonResponseHeader, instance_group:2 InstanceGroup}
RemoveInstanceRequest{trace_id:1, instance_group:2 s, instance_id:3 s}
GetInstanceInfoResponse{header:1 CommonResponseHeader, instance_info:2 InstanceInfo}
ListInstanceInfoRequest{trace_id:1, instance_group_name:2 s}
ListInstanceInfoResponse{header:1 CommonResponseHeader, instance_info:2 rep InstanceInfo}
Account{user_name:1 s, role:2 AccountRole}
AddAccountRequest{trace_id:1, user_name:2, password:3, role:4 AccountRole}
DeleteAccountRequest{trace_id:1, user_name:2}
ListAccountRequest{trace_id:1}
ListAccountResponse{header:1 CommonResponseHeader, accounts:2 rep Account}
GenConfigSnapshotRequest{trace_id:1}
ConfigSnapShotResponse{header:1 CommonResponseHeader, config_snapshot:2 s}
LoadConfigSnapshotRequest{trace_id:1, config_snapshot:2 s}
GetMetricsRequest{trace_id:1}
GetMetricsResponse{header:1 CommonResponseHeader, timestamp:2 i64, metrics:3 rep MetricsData, extra_data:4 s}
MetricsData{metric_name:1 s, metric_value:2 MetricValue, metric_tags:3 rep MetricsTag}
MetricValue{oneof value {int_value:1 i64, float_value:2 double, string_value:3 s}}
MetricsTag{tag_key:1 s, tag_value:2 s}
CheckHealthRequest{trace_id:1}
CheckHealthResponse{header:1 CommonResponseHeader, is_leader:2 bool, is_health:3 bool, elector_last_loop_time_ms:4 i64}
GetManagerClusterInfoRequest{trace_id:1}
GetManagerClusterInfoResponse{header:1 CommonResponseHeader, info_updated_time:2 i64, self_leader_expiration_time:3 i64, self_node_id:4 s, leader_node_id:5 s}
LeaderDemoteRequest{trace_id:1}
GetLeaderElectorConfigRequest{trace_id:1}
GetLeaderElectorConfigResponse{header:1 CommonResponseHeader, campaign_delay_time_ms:2 i64}
UpdateLeaderElectorConfigRequest{trace_id:1, campaign_delay_time_ms:2 i64}
UpdateLoggerRequest{trace_id:1, module_name:2 s, log_level:3 s}
"""

META_METHODS = """
RegisterInstance RegisterInstanceResponse, GetInstanceInfo GetInstanceInfoResponse,
GetCacheLocation GetCacheLocationResponse, GetCacheMeta GetCacheMetaResponse,
StartWriteCache StartWriteCacheResponse, FinishWriteCache CommonResponse,
RemoveCache CommonResponse, TrimCache CommonResponse,
ReportCacheError ReportCacheErrorResponse
"""
ADMIN_METHODS = """
AddStorage CommonResponse, EnableStorage CommonResponse, DisableStorage CommonResponse,
RemoveStorage CommonResponse, UpdateStorage CommonResponse, ListStorage ListStorageResponse,
CreateInstanceGroup CommonResponse, UpdateInstanceGroup CommonResponse,
RemoveInstanceGroup CommonResponse, GetInstanceGroup GetInstanceGroupResponse,
GetCacheMeta GetCacheMetaResponse, RemoveCache CommonResponse, RegisterInstance CommonResponse,
RemoveInstance CommonResponse, GetInstanceInfo GetInstanceInfoResponse,
ListInstanceInfo ListInstanceInfoResponse, AddAccount CommonResponse,
DeleteAccount CommonResponse, ListAccount ListAccountResponse,
GenConfigSnapshot ConfigSnapShotResponse, LoadConfigSnapshot CommonResponse,
GetMetrics GetMetricsResponse, CheckHealth CheckHealthResponse,
GetManagerClusterInfo GetManagerClusterInfoResponse, LeaderDemote CommonResponse,
GetLeaderElectorConfig GetLeaderElectorConfigResponse,
UpdateLeaderElectorConfig CommonResponse, UpdateLogger CommonResponse
"""

SCALARS = {
    "s": "TYPE_STRING",
    "i32": "TYPE_INT32",
    "i64": "TYPE_INT64",
    "u32": "TYPE_UINT32",
    "bool": "TYPE_BOOL",
    "double": "TYPE_DOUBLE",
}

# (name, number, type, repeated, oneof)
Field = tuple[str, int, str, bool, str]


def read_enums(page: str) -> dict[str, dict[str, int]]:
    enums = {}
    for name, values in re.findall(r"(\w+): ([^.]*)\.", page):
        pairs = [value.split() for value in values.split(",")]
        enums[name] = {label: int(number) for label, number in pairs}
    return enums


def read_messages(page: str) -> dict[str, set[Field]]:
    messages = {}
    for line in page.split("\n"):
        if not line:
            continue
        name, _, body = line[:-1].partition("{")
        fields: set[Field] = set()
        for oneof, inner in re.findall(r"oneof (\w+) ?\{([^}]*)\}", body):
            fields |= {read_field(text, oneof) for text in inner.split(",")}
        plain = re.sub(r"oneof \w+ ?\{[^}]*\}", "", body)
        fields |= {read_field(text, "") for text in plain.split(",") if text.strip()}
        messages[name] = fields
    return messages


def read_field(text: str, oneof: str) -> Field:
    head, *rest = text.split()
    name, number = head.split(":")
    kind = rest[-1] if rest else "s"
    if rest[:1] == ["opt"]:
        # Presence of a scalar is a oneof of its own in the descriptor.
        oneof = f"_{name}"
    return name, int(number), SCALARS.get(kind, kind), rest[:1] == ["rep"], oneof


def described_messages(module: Any) -> dict[str, set[Field]]:
    return {
        name: {described_field(field) for field in message.fields}
        for name, message in module.DESCRIPTOR.message_types_by_name.items()
    }


def described_field(field: Any) -> Field:
    kinds = {getattr(field, name): name for name in SCALARS.values()}
    named = field.message_type or field.enum_type
    kind = named.name if named is not None else kinds[field.type]
    oneof = field.containing_oneof.name if field.containing_oneof is not None else ""
    return field.name, field.number, kind, field.is_repeated, oneof


PACKAGES = [
    pytest.param(meta_pb2, ENUMS_SHARED + ENUMS_META, MESSAGES_SHARED + MESSAGES_META, id="meta"),
    pytest.param(
        admin_pb2, ENUMS_SHARED + ENUMS_ADMIN, MESSAGES_SHARED + MESSAGES_ADMIN, id="admin"
    ),
]


@pytest.mark.parametrize(("module", "enums", "messages"), PACKAGES)
def test_the_wire_is_what_production_clients_speak(module: Any, enums: str, messages: str) -> None:
    described = {
        name: {label: value.number for label, value in enum.values_by_name.items()}
        for name, enum in module.DESCRIPTOR.enum_types_by_name.items()
    }
    assert described == read_enums(enums)
    expected = read_messages(messages)
    actual = described_messages(module)
    assert actual.keys() == expected.keys()
    for name, fields in expected.items():
        assert actual[name] == fields, name


@pytest.mark.parametrize(
    ("module", "service", "methods"),
    [(meta_pb2, "MetaService", META_METHODS), (admin_pb2, "AdminService", ADMIN_METHODS)],
)
def test_the_methods_are_what_production_clients_call(
    module: Any, service: str, methods: str
) -> None:
    package = module.DESCRIPTOR.package
    assert package == f"kv_cache_manager.proto.{service.removesuffix('Service').lower()}"
    expected = {}
    for entry in methods.split(","):
        name, answer = entry.split()
        expected[name] = (f"{package}.{name}Request", f"{package}.{answer}")
    described = module.DESCRIPTOR.services_by_name[service].methods_by_name
    assert {
        name: (method.input_type.full_name, method.output_type.full_name)
        for name, method in described.items()
    } == expected


@pytest.mark.parametrize("module", [meta_pb2, admin_pb2])
def test_only_messages_and_oneof_members_have_presence(module: Any) -> None:
    for message in module.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            expected = not field.is_repeated and (
                field.message_type is not None or field.containing_oneof is not None
            )
            assert field.has_presence == expected, field.full_name
