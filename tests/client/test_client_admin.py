"""AdminService through the admin clients, over both transports."""

from __future__ import annotations

from typing import Any

import pytest

from kvcm._pb import admin_pb2
from kvcm.client import admin_calls, calls, sync
from kvcm.client.aio import AsyncAdminClient, AsyncClient
from kvcm.core.errors import InvalidArgument, VersionConflict
from kvcm.core.types import (
    Account,
    AccountRole,
    CacheConfig,
    CachePreferStrategy,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    ReclaimPolicy,
    StorageConfig,
    StorageStatus,
    StorageType,
    TriggerStrategy,
)
from tests.client.conftest import Connect, Driver, Serve
from tests.client.stand_in import StandIn

NFS = StorageConfig(
    global_unique_name="nfs_01",
    type=StorageType.NFS,
    spec={"root_path": "/tmp/nfs/", "key_count_per_file": 8},
    check_storage_available_when_open=True,
)
GROUP = InstanceGroup(
    name="g",
    storage_candidates=("nfs_01", "b"),
    global_quota_group_name="q",
    max_instance_count=2**40,
    quota=InstanceGroupQuota(
        capacity=2**62,
        quota_config=(QuotaConfig(storage_type=StorageType.NFS, capacity=2**61),),
    ),
    cache_config=CacheConfig(
        reclaim_strategy=CacheReclaimStrategy(
            reclaim_policy=ReclaimPolicy.LRU,
            trigger_strategy=TriggerStrategy(used_percentage=0.8),
            delay_before_delete_ms=1000,
        ),
        data_storage_strategy=CachePreferStrategy.PREFER_3FS,
        meta_indexer_config=MetaIndexerConfig(max_key_count=10**6, mutex_shard_num=16),
    ),
    user_data="u",
    version=3,
)


@pytest.fixture
def manager() -> StandIn:
    return StandIn(admin_pb2)


@pytest.fixture
def driver(manager: StandIn, serve: Serve, connect: Connect) -> Driver:
    return connect(serve(manager).address, admin=True)


def test_every_rpc_has_a_method_in_both_kinds_of_client() -> None:
    meta, admin = {m.name for m in calls.METHODS}, set()
    for name in dir(admin_calls):
        if name.startswith("_") and isinstance(getattr(admin_calls, name), calls.Method):
            admin.add(getattr(admin_calls, name).name)
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    assert admin == {method.name for method in service.methods}
    for names, kinds in (
        (meta, (sync.Client, AsyncClient)),
        (admin, (sync.AdminClient, AsyncAdminClient)),
    ):
        for name in names:
            snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
            for kind in kinds:
                assert getattr(kind, snake).__doc__, (kind, snake)


async def test_storages_go_there_and_come_back(manager: StandIn, driver: Driver) -> None:
    await driver.call("add_storage", NFS)
    await driver.call("update_storage", NFS, force_update=True)
    (added,), (updated,) = manager.asked("AddStorage"), manager.asked("UpdateStorage")
    assert added.storage == updated.storage
    assert updated.force_update
    assert added.storage.nfs.root_path == "/tmp/nfs/"
    added.storage.disabled = True
    added.storage.unavailable_reason = "root is gone"
    added.storage.health = "unavailable"
    added.storage.unwritable_reason = "it is full"
    manager.answers("ListStorage", storage=[added.storage])
    (listed,) = await driver.call("list_storage")
    shown = {**NFS.model_dump(), "enabled": False, "unavailable_reason": "root is gone"}
    shown |= {"health": "unavailable", "unwritable_reason": "it is full"}
    assert listed == StorageStatus(**shown)


@pytest.mark.parametrize(
    ("kind", "field", "spec"),
    [
        (StorageType.HF3FS, "threefs", {"mountpoint": "/m", "touch_file_when_create": True}),
        (StorageType.MOONCAKE, "mooncake", {"master_service_entry": "e"}),
        (StorageType.TAIRMEMPOOL, "tair_mem_pool", {"timeout": 5}),
        (StorageType.VCNS_HF3FS, "vcnsthreefs", {"remote_port": 7}),
        (StorageType.NFS, "nfs", {}),
    ],
)
async def test_each_storage_type_has_its_member(
    manager: StandIn, driver: Driver, kind: StorageType, field: str, spec: dict[str, Any]
) -> None:
    config = StorageConfig(global_unique_name="s", type=kind, spec=spec)
    await driver.call("add_storage", config)
    (request,) = manager.asked("AddStorage")
    assert request.storage.WhichOneof("storage_spec") == field
    manager.answers("ListStorage", storage=[request.storage])
    (listed,) = await driver.call("list_storage")
    assert listed.type is kind
    assert {name: listed.spec[name] for name in spec} == spec


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (NFS.model_copy(update={"type": StorageType.UNSPECIFIED}), "type"),
        (NFS.model_copy(update={"spec": {"root_pth": "/x"}}), "root_pth"),
        (NFS.model_copy(update={"spec": {"key_count_per_file": 2**31}}), "key_count_per_file"),
    ],
)
async def test_a_wrong_storage_is_refused_by_name_and_never_sent(
    manager: StandIn, driver: Driver, config: StorageConfig, named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        await driver.call("add_storage", config)
    assert manager.requests == []


async def test_storages_are_named(manager: StandIn, driver: Driver) -> None:
    await driver.call("enable_storage", "s")
    await driver.call("disable_storage", "s")
    await driver.call("remove_storage", "s", force=True)
    for method in ("EnableStorage", "DisableStorage", "RemoveStorage"):
        assert manager.asked(method)[0].storage_unique_name == "s"
    assert manager.asked("RemoveStorage")[0].force


async def test_groups_go_there_and_come_back(manager: StandIn, driver: Driver) -> None:
    await driver.call("create_instance_group", GROUP)
    await driver.call("update_instance_group", GROUP, 2)
    (created,), (updated,) = (
        manager.asked("CreateInstanceGroup"),
        manager.asked("UpdateInstanceGroup"),
    )
    assert created.instance_group == updated.instance_group
    assert updated.current_version == 2
    manager.answers("GetInstanceGroup", instance_group=created.instance_group)
    assert await driver.call("get_instance_group", "g") == GROUP
    await driver.call("remove_instance_group", "g", force=True)
    assert manager.asked("RemoveInstanceGroup")[0].force


async def test_an_outdated_version_is_a_conflict(manager: StandIn, driver: Driver) -> None:
    manager.refuses("UpdateInstanceGroup", 5, "version is 4", "VERSION_CONFLICT")
    with pytest.raises(VersionConflict, match="version is 4"):
        await driver.call("update_instance_group", GROUP, 2)


async def test_instances(manager: StandIn, driver: Driver) -> None:
    await driver.call("register_instance", "g", "i1", 16, {"tp0": 4})
    assert manager.asked("RegisterInstance")[0].location_spec_infos[0].size == 4
    info = {"instance_id": "i1", "instance_group_name": "g", "block_size": 16}
    manager.answers("GetInstanceInfo", instance_info=info)
    manager.answers("ListInstanceInfo", instance_info=[info])
    one = await driver.call("get_instance_info", "i1")
    assert (one.instance_id, one.instance_group, one.model_deployment) == ("i1", "g", None)
    assert await driver.call("list_instance_info") == (one,)
    await driver.call("remove_instance", "i1")
    assert manager.asked("RemoveInstance")[0].instance_group == ""


async def test_cache_calls(manager: StandIn, driver: Driver) -> None:
    manager.answers("GetCacheMeta", locations=[{}], metas=['{"status":"CLS_NOT_FOUND"}'])
    (meta,) = await driver.call("get_cache_meta", "i1", [-5])
    assert meta.status == "CLS_NOT_FOUND"
    await driver.call("remove_cache", "i1", [-5], mask=[False])
    assert manager.asked("RemoveCache")[0].block_keys == [-5]


async def test_accounts(manager: StandIn, driver: Driver) -> None:
    await driver.call("add_account", "ann", "secret", AccountRole.ADMIN)
    assert manager.asked("AddAccount")[0].role == 1
    await driver.call("delete_account", "ann")
    manager.answers("ListAccount", accounts=[{"user_name": "ann", "role": 1}])
    assert await driver.call("list_account") == (Account(user_name="ann", role=AccountRole.ADMIN),)


def test_a_password_never_shows_in_a_call() -> None:
    assert "secret" not in repr(admin_calls.add_account("ann", "secret"))


async def test_snapshots(manager: StandIn, driver: Driver) -> None:
    manager.answers("GenConfigSnapshot", config_snapshot='{"a":1}')
    assert await driver.call("gen_config_snapshot") == '{"a":1}'
    await driver.call("load_config_snapshot", '{"a":1}')
    assert manager.asked("LoadConfigSnapshot")[0].config_snapshot == '{"a":1}'


async def test_metrics_keep_kind_and_value(manager: StandIn, driver: Driver) -> None:
    manager.answers(
        "GetMetrics",
        timestamp=2**53 + 1,
        metrics=[
            {
                "metric_name": "n",
                "metric_value": value,
                "metric_tags": [{"tag_key": "api_name", "tag_value": "AddStorage"}],
            }
            for value in ({"int_value": 0}, {"float_value": 0.5}, {"string_value": "x"}, {})
        ],
    )
    snapshot = await driver.call("get_metrics")
    assert snapshot.timestamp_ms == 2**53 + 1
    assert [metric.value for metric in snapshot.metrics] == [0, 0.5, "x", None]
    assert snapshot.metrics[0].tags == {"api_name": "AddStorage"}


async def test_health_and_leadership(manager: StandIn, driver: Driver) -> None:
    manager.answers("CheckHealth", is_leader=True, is_health=True, elector_last_loop_time_ms=7)
    health = await driver.call("check_health")
    assert (health.is_leader, health.is_health, health.elector_last_loop_time_ms) == (
        True,
        True,
        7,
    )
    manager.answers("GetManagerClusterInfo", self_node_id="a", leader_node_id="b")
    info = await driver.call("get_manager_cluster_info")
    assert (info.self_node_id, info.leader_node_id) == ("a", "b")
    await driver.call("leader_demote")
    manager.answers("GetLeaderElectorConfig", campaign_delay_time_ms=2**40)
    assert await driver.call("get_leader_elector_config") == 2**40
    await driver.call("update_leader_elector_config", 5)
    assert manager.asked("UpdateLeaderElectorConfig")[0].campaign_delay_time_ms == 5
    await driver.call("update_logger", "kvcm.cache", "debug")
    assert manager.asked("UpdateLogger")[0].log_level == "debug"
