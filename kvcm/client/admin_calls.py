"""The calls of AdminService (wire.md §2, §7, §9), in the manner of `kvcm.client.calls`.

What one manager answers about itself (get_metrics, check_health, get_manager_cluster_info,
leader_demote, the elector's and the logger's settings) comes from the address that answered last
as leader, else the first that answers: give a client one address to ask one manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from google.protobuf.message import Message

from kvcm._pb import admin_pb2 as pb
from kvcm.client import calls
from kvcm.client.call import ADMIN_SERVICE, Call, Method, build, describe_function, nothing
from kvcm.client.entities import group_message, instance_group, storage_config, storage_message
from kvcm.client.types import ClusterInfo, Health, InstanceInfo, Metric, MetricsSnapshot
from kvcm.core.types import Account, AccountRole, InstanceGroup, StorageConfig, StorageStatus

P = ParamSpec("P")
T = TypeVar("T")


def _change(name: str) -> Method:
    return Method(ADMIN_SERVICE, name, pb.CommonResponse, False)


def _read(name: str, reply: type[Message]) -> Method:
    return Method(ADMIN_SERVICE, name, reply, True)


_ADD_STORAGE = _change("AddStorage")
_ENABLE_STORAGE = _change("EnableStorage")
_DISABLE_STORAGE = _change("DisableStorage")
_REMOVE_STORAGE = _change("RemoveStorage")
_UPDATE_STORAGE = _change("UpdateStorage")
_LIST_STORAGE = _read("ListStorage", pb.ListStorageResponse)
_CREATE_GROUP = _change("CreateInstanceGroup")
_UPDATE_GROUP = _change("UpdateInstanceGroup")
_REMOVE_GROUP = _change("RemoveInstanceGroup")
_GET_GROUP = _read("GetInstanceGroup", pb.GetInstanceGroupResponse)
_GET_META = _read("GetCacheMeta", pb.GetCacheMetaResponse)
_REMOVE_CACHE = _change("RemoveCache")
_REGISTER = Method(ADMIN_SERVICE, "RegisterInstance", pb.CommonResponse, True)
_REMOVE_INSTANCE = _change("RemoveInstance")
_GET_INSTANCE = _read("GetInstanceInfo", pb.GetInstanceInfoResponse)
_LIST_INSTANCE = _read("ListInstanceInfo", pb.ListInstanceInfoResponse)
_ADD_ACCOUNT = _change("AddAccount")
_DELETE_ACCOUNT = _change("DeleteAccount")
_LIST_ACCOUNT = _read("ListAccount", pb.ListAccountResponse)
_GEN_SNAPSHOT = _read("GenConfigSnapshot", pb.ConfigSnapShotResponse)
_LOAD_SNAPSHOT = _change("LoadConfigSnapshot")
_GET_METRICS = _read("GetMetrics", pb.GetMetricsResponse)
_CHECK_HEALTH = _read("CheckHealth", pb.CheckHealthResponse)
_CLUSTER_INFO = _read("GetManagerClusterInfo", pb.GetManagerClusterInfoResponse)
_LEADER_DEMOTE = _change("LeaderDemote")
_GET_ELECTOR = _read("GetLeaderElectorConfig", pb.GetLeaderElectorConfigResponse)
_UPDATE_ELECTOR = _change("UpdateLeaderElectorConfig")
_UPDATE_LOGGER = _change("UpdateLogger")


def add_storage(
    storage: StorageConfig, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Add a storage.

    Raises:
        DuplicateEntity: the name is taken.
        Unsupported: the manager was built without its type.
    """
    request = build(pb.AddStorageRequest, trace_id=trace_id, storage=storage_message(storage))
    return Call(_ADD_STORAGE, request, nothing, timeout)


def enable_storage(
    storage_unique_name: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Let a storage take writes and answer lookups again."""
    request = build(
        pb.EnableStorageRequest, trace_id=trace_id, storage_unique_name=storage_unique_name
    )
    return Call(_ENABLE_STORAGE, request, nothing, timeout)


def disable_storage(
    storage_unique_name: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Take a storage out of service; its blocks are misses until it is enabled."""
    request = build(
        pb.DisableStorageRequest, trace_id=trace_id, storage_unique_name=storage_unique_name
    )
    return Call(_DISABLE_STORAGE, request, nothing, timeout)


def remove_storage(
    storage_unique_name: str,
    *,
    force: bool = False,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Remove a storage; with ``force`` although blocks live there, which become misses."""
    request = build(
        pb.RemoveStorageRequest,
        trace_id=trace_id,
        storage_unique_name=storage_unique_name,
        force=force,
    )
    return Call(_REMOVE_STORAGE, request, nothing, timeout)


def update_storage(
    storage: StorageConfig,
    *,
    force_update: bool = False,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Change a storage; ``force_update`` allows a new path although blocks live there."""
    request = build(
        pb.UpdateStorageRequest,
        trace_id=trace_id,
        storage=storage_message(storage),
        force_update=force_update,
    )
    return Call(_UPDATE_STORAGE, request, nothing, timeout)


def list_storage(
    *, trace_id: str = "", timeout: float | None = None
) -> Call[tuple[StorageStatus, ...]]:
    """All storages."""
    request = build(pb.ListStorageRequest, trace_id=trace_id)
    return Call(
        _LIST_STORAGE, request, lambda reply: tuple(map(storage_config, reply.storage)), timeout
    )


def create_instance_group(
    instance_group: InstanceGroup, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Create a group; DuplicateEntity when the name is taken."""
    request = build(
        pb.CreateInstanceGroupRequest,
        trace_id=trace_id,
        instance_group=group_message(instance_group),
    )
    return Call(_CREATE_GROUP, request, nothing, timeout)


def update_instance_group(
    instance_group: InstanceGroup,
    current_version: int,
    *,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Replace a group's settings.

    Args:
        instance_group: its ``version`` must be above ``current_version``.
        current_version: the version the change is based on.

    Raises:
        VersionConflict: the group changed since.
    """
    request = build(
        pb.UpdateInstanceGroupRequest,
        trace_id=trace_id,
        instance_group=group_message(instance_group),
        current_version=current_version,
    )
    return Call(_UPDATE_GROUP, request, nothing, timeout)


def remove_instance_group(
    name: str, *, force: bool = False, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Remove a group; with ``force`` its instances too."""
    request = build(pb.RemoveInstanceGroupRequest, trace_id=trace_id, name=name, force=force)
    return Call(_REMOVE_GROUP, request, nothing, timeout)


def get_instance_group(
    name: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[InstanceGroup]:
    """A group as stored."""
    request = build(pb.GetInstanceGroupRequest, trace_id=trace_id, name=name)
    return Call(_GET_GROUP, request, lambda reply: instance_group(reply.instance_group), timeout)


def remove_instance(
    instance_id: str,
    *,
    instance_group: str = "",
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Remove an instance and, in the background, all its blocks."""
    request = build(
        pb.RemoveInstanceRequest,
        trace_id=trace_id,
        instance_group=instance_group,
        instance_id=instance_id,
    )
    return Call(_REMOVE_INSTANCE, request, nothing, timeout)


def get_instance_info(
    instance_id: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[InstanceInfo]:
    """One instance; InstanceNotExist when there is none."""
    request = build(pb.GetInstanceInfoRequest, trace_id=trace_id, instance_id=instance_id)
    return Call(
        _GET_INSTANCE, request, lambda reply: calls.instance_info(reply.instance_info), timeout
    )


def list_instance_info(
    instance_group_name: str = "", *, trace_id: str = "", timeout: float | None = None
) -> Call[tuple[InstanceInfo, ...]]:
    """The instances of a group, or of all; empty for a group that is not there."""
    request = build(
        pb.ListInstanceInfoRequest, trace_id=trace_id, instance_group_name=instance_group_name
    )
    return Call(
        _LIST_INSTANCE,
        request,
        lambda reply: tuple(map(calls.instance_info, reply.instance_info)),
        timeout,
    )


def add_account(
    user_name: str,
    password: str,
    role: AccountRole = AccountRole.USER,
    *,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Add an account; DuplicateEntity when the name is taken."""
    request = build(
        pb.AddAccountRequest,
        trace_id=trace_id,
        user_name=user_name,
        password=password,
        role=int(role),
    )
    return Call(_ADD_ACCOUNT, request, nothing, timeout)


def delete_account(
    user_name: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Delete an account."""
    request = build(pb.DeleteAccountRequest, trace_id=trace_id, user_name=user_name)
    return Call(_DELETE_ACCOUNT, request, nothing, timeout)


def list_account(*, trace_id: str = "", timeout: float | None = None) -> Call[tuple[Account, ...]]:
    """All accounts, without their passwords."""
    request = build(pb.ListAccountRequest, trace_id=trace_id)
    return Call(_LIST_ACCOUNT, request, _accounts, timeout)


def gen_config_snapshot(*, trace_id: str = "", timeout: float | None = None) -> Call[str]:
    """The whole registry as a JSON text."""
    request = build(pb.GenConfigSnapshotRequest, trace_id=trace_id)
    return Call(_GEN_SNAPSHOT, request, lambda reply: str(reply.config_snapshot), timeout)


def load_config_snapshot(
    config_snapshot: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Replace the registry; refused when an instance that holds blocks would be dropped."""
    request = build(
        pb.LoadConfigSnapshotRequest, trace_id=trace_id, config_snapshot=config_snapshot
    )
    return Call(_LOAD_SNAPSHOT, request, nothing, timeout)


def get_metrics(*, trace_id: str = "", timeout: float | None = None) -> Call[MetricsSnapshot]:
    """The manager's metrics at this moment."""
    request = build(pb.GetMetricsRequest, trace_id=trace_id)
    return Call(_GET_METRICS, request, _metrics, timeout)


def check_health(*, trace_id: str = "", timeout: float | None = None) -> Call[Health]:
    """Whether the manager is well and whether it leads."""
    request = build(pb.CheckHealthRequest, trace_id=trace_id)
    return Call(
        _CHECK_HEALTH,
        request,
        lambda reply: Health(reply.is_leader, reply.is_health, reply.elector_last_loop_time_ms),
        timeout,
    )


def get_manager_cluster_info(
    *, trace_id: str = "", timeout: float | None = None
) -> Call[ClusterInfo]:
    """Who the manager is and who leads."""
    request = build(pb.GetManagerClusterInfoRequest, trace_id=trace_id)
    return Call(_CLUSTER_INFO, request, _cluster_info, timeout)


def leader_demote(*, trace_id: str = "", timeout: float | None = None) -> Call[None]:
    """Make the manager give up leading."""
    return Call(_LEADER_DEMOTE, build(pb.LeaderDemoteRequest, trace_id=trace_id), nothing, timeout)


def get_leader_elector_config(*, trace_id: str = "", timeout: float | None = None) -> Call[int]:
    """Milliseconds for which a demoted manager stays out of elections."""
    request = build(pb.GetLeaderElectorConfigRequest, trace_id=trace_id)
    return Call(_GET_ELECTOR, request, lambda reply: int(reply.campaign_delay_time_ms), timeout)


def update_leader_elector_config(
    campaign_delay_time_ms: int, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Set what `get_leader_elector_config` tells."""
    request = build(
        pb.UpdateLeaderElectorConfigRequest,
        trace_id=trace_id,
        campaign_delay_time_ms=campaign_delay_time_ms,
    )
    return Call(_UPDATE_ELECTOR, request, nothing, timeout)


def update_logger(
    module_name: str, log_level: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[None]:
    """Set the log level of a module ("" = all) at run time."""
    request = build(
        pb.UpdateLoggerRequest, trace_id=trace_id, module_name=module_name, log_level=log_level
    )
    return Call(_UPDATE_LOGGER, request, nothing, timeout)


def _through_admin(builder: Callable[P, Call[T]], method: Method) -> Callable[P, Call[T]]:
    """The same call through AdminService, whose message numbers are equal."""

    def through_admin(*args: P.args, **kwargs: P.kwargs) -> Call[T]:
        return replace(builder(*args, **kwargs), method=method)

    return describe_function(through_admin, builder)


def _register_through_admin(builder: Callable[P, Call[Any]]) -> Callable[P, Call[None]]:
    """RegisterInstance answers nothing here."""

    def register_instance(*args: P.args, **kwargs: P.kwargs) -> Call[None]:
        call = builder(*args, **kwargs)
        return Call(_REGISTER, call.request, nothing, call.timeout)

    return describe_function(register_instance, builder)


get_cache_meta = _through_admin(calls.get_cache_meta, _GET_META)
remove_cache = _through_admin(calls.remove_cache, _REMOVE_CACHE)
register_instance = _register_through_admin(calls.register_instance)


def _accounts(reply: pb.ListAccountResponse) -> tuple[Account, ...]:
    return tuple(
        Account(user_name=account.user_name, role=AccountRole(account.role))
        for account in reply.accounts
    )


def _metrics(reply: pb.GetMetricsResponse) -> MetricsSnapshot:
    return MetricsSnapshot(
        reply.timestamp,
        tuple(
            Metric(
                metric.metric_name,
                getattr(metric.metric_value, metric.metric_value.WhichOneof("value") or "", None),
                {tag.tag_key: tag.tag_value for tag in metric.metric_tags},
            )
            for metric in reply.metrics
        ),
        reply.extra_data,
    )


def _cluster_info(reply: pb.GetManagerClusterInfoResponse) -> ClusterInfo:
    return ClusterInfo(
        reply.info_updated_time,
        reply.self_leader_expiration_time,
        reply.self_node_id,
        reply.leader_node_id,
    )
