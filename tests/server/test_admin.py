from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manager_harness import INSTANCE, Running

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.core.storage import MARKER
from kvcm.server.admin_service import ANSWERED_BY_ALL
from kvcm.testing.eventually import eventually

GROUP: dict[str, Any] = {
    "name": "g2",
    "storage_candidates": ["s1"],
    "global_quota_group_name": "q2",
    "max_instance_count": "3",
    "quota": {
        "capacity": "1000",
        "quota_config": [{"storage_type": "ST_NFS", "capacity": "500"}],
    },
    "cache_config": {
        "reclaim_strategy": {
            "storage_unique_name": "",
            "reclaim_policy": "POLICY_LRU",
            "trigger_strategy": {"used_size": "0", "used_percentage": 0.5},
            "trigger_period_seconds": 1,
            "reclaim_step_size": 2,
            "reclaim_step_percentage": 3,
            "delay_before_delete_ms": 4,
        },
        "data_storage_strategy": "CPS_PREFER_3FS",
        "meta_indexer_config": {
            "max_key_count": "10",
            "mutex_shard_num": "16",
            "batch_key_size": "0",
            "meta_storage_backend_config": {"storage_type": "local", "storage_uri": "x"},
            "meta_cache_policy_config": {
                "capacity": "1",
                "type": "LRU",
                "cache_shard_bits": 2,
                "high_pri_pool_ratio": 0.25,
            },
        },
    },
    "user_data": "u",
    "version": "1",
}


class Admin:
    """The admin port of a running manager."""

    def __init__(self, running: Running) -> None:
        self.running = running

    async def __call__(self, method: str, **body: Any) -> dict[str, Any]:
        return await self.running.post(method, body, admin=True)

    async def code(self, method: str, **body: Any) -> str:
        return await self.running.code(method, body, admin=True)

    async def refusal(self, method: str, code: str, **body: Any) -> str:
        status = (await self(method, **body))["header"]["status"]
        assert status["code"] == code
        message: str = status["message"]
        assert message
        return message

    async def storages(self) -> dict[str, Any]:
        """What is stored of each one, all of them in good health."""
        shown = (await self("listStorage"))["storage"]
        assert {storage.pop("health") for storage in shown} <= {"available"}
        return {storage["global_unique_name"]: storage for storage in shown}


@pytest.fixture
def admin(running: Running) -> Admin:
    return Admin(running)


def nfs(root: Path, name: str = "s2", keys: int = 4) -> dict[str, Any]:
    return {
        "global_unique_name": name,
        "nfs": {"root_path": str(root), "key_count_per_file": keys},
        "check_storage_available_when_open": True,
    }


async def test_the_bootstrap_file_is_what_the_registry_begins_with(admin: Admin) -> None:
    assert list(await admin.storages()) == ["s1"]
    group = (await admin("getInstanceGroup", name="default"))["instance_group"]
    assert group["storage_candidates"] == ["s1"]
    assert group["version"] == "1"


async def test_a_storage_added_is_open_listed_and_usable(admin: Admin, tmp_path: Path) -> None:
    storage = nfs(tmp_path / "s2")
    assert await admin.code("addStorage", storage=storage) == "OK"
    assert (await admin.storages())["s2"] == storage
    assert (tmp_path / "s2").is_dir()
    group = {**GROUP, "storage_candidates": ["s2", "s1", "unknown"]}
    assert await admin.code("createInstanceGroup", instance_group=group) == "OK"
    body = {**INSTANCE, "instance_id": "j", "instance_group": "g2"}
    configs = json.loads((await admin.running.post("registerInstance", body))["storage_configs"])
    assert [(c["global_unique_name"], c["is_available"]) for c in configs] == [
        ("s1", True),
        ("s2", True),
    ]


async def test_an_old_clients_update_keeps_what_it_does_not_know(
    admin: Admin, tmp_path: Path
) -> None:
    ours = {"capacity_bytes": "1000", "high_percentage": 0.9, "low_percentage": 0.5}
    storage = nfs(tmp_path / "s2")
    assert await admin.code("addStorage", storage=storage | ours) == "OK"
    assert (await admin.storages())["s2"] == storage | ours
    assert await admin.code("updateStorage", storage=storage) == "OK"
    assert (await admin.storages())["s2"] == storage | ours
    assert await admin.code("updateStorage", storage=storage | {"capacity_bytes": 0}) == "OK"
    del ours["capacity_bytes"]
    assert (await admin.storages())["s2"] == storage | ours

    reclaim = GROUP["cache_config"]["reclaim_strategy"]
    added = {
        "low_percentage": 0.25,
        "ttl_seconds": "60",
        "ttl_since": "TTL_SINCE_FINISH",
        "admission": "ADMISSION_TINYLFU",
    }
    cache = GROUP["cache_config"] | {"reclaim_strategy": reclaim | added}
    assert await admin.code("createInstanceGroup", instance_group=GROUP | {"cache_config": cache})
    again = GROUP | {"version": "2", "user_data": "new"}
    assert await admin.code("updateInstanceGroup", instance_group=again, current_version=1) == "OK"
    stored = (await admin("getInstanceGroup", name="g2"))["instance_group"]
    assert stored == again | {"cache_config": cache}


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("-0.1", "used_percentage is -0.1"),
        ("NaN", "400"),
        ("1e999", "400"),
        ('"0.9"', "400"),
        ("1.01", "OK"),
    ],
)
async def test_a_bad_watermark_is_refused_by_name(admin: Admin, value: str, answer: str) -> None:
    """R90; wire.md §9 makes 1.01 legal: "never by this trigger"."""
    body = (
        '{"instance_group":{"name":"g3","version":1,"cache_config":{"reclaim_strategy":'
        '{"trigger_strategy":{"used_percentage":' + value + "}}}}}"
    )
    running = admin.running
    url = running.url("/api/createInstanceGroup", admin=True)
    response = await running.http.post(url, content=body)
    assert response.status_code == (400 if answer == "400" else 200)
    status = response.json()["header"]["status"]
    assert status["code"] == ("OK" if answer == "OK" else "INVALID_ARGUMENT")
    assert answer in ("400", "OK") or answer in status["message"]


async def test_a_disabled_storage_is_not_available_until_enabled(admin: Admin) -> None:
    async def available() -> bool:
        answer = await admin.running.post("registerInstance", INSTANCE)
        found: bool = json.loads(answer["storage_configs"])[0]["is_available"]
        return found

    assert await admin.code("disableStorage", storage_unique_name="s1") == "OK"
    assert not await available()
    assert await admin.code("enableStorage", storage_unique_name="s1") == "OK"
    assert await available()


@pytest.mark.parametrize("method", ["enableStorage", "disableStorage", "removeStorage"])
async def test_unknown_storages_are_named(admin: Admin, method: str) -> None:
    assert "'nope'" in await admin.refusal(method, "INVALID_ARGUMENT", storage_unique_name="nope")


async def test_a_storage_that_cannot_be_used_is_not_stored(admin: Admin, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = [
        ("INVALID_ARGUMENT", {"global_unique_name": "x", "mooncake": {"protocol": "rdma"}}),
        ("UNSUPPORTED", {"global_unique_name": "x", "tair_mem_pool": {}}),
        ("UNSUPPORTED", {"global_unique_name": "x", "local": {}}),
        ("INVALID_ARGUMENT", {"global_unique_name": "x"}),
        ("INVALID_ARGUMENT", nfs(tmp_path / "y", name="")),
        ("INVALID_ARGUMENT", nfs(tmp_path / "y", name="a/b")),
        ("INVALID_ARGUMENT", nfs(tmp_path / "y", name="x", keys=-1)),
        ("IO_ERROR", nfs(tmp_path / "file" / "below", name="x")),
    ]
    for code, storage in refused:
        await admin.refusal("addStorage", code, storage=storage)
    await admin.refusal("addStorage", "INVALID_ARGUMENT")
    assert list(await admin.storages()) == ["s1"]
    assert not (tmp_path / "y").exists()


async def test_adding_a_storage_twice_is_a_duplicate(admin: Admin, tmp_path: Path) -> None:
    message = await admin.refusal(
        "addStorage", "DUPLICATE_ENTITY", storage=nfs(tmp_path / "other", name="s1")
    )
    assert "s1" in message
    assert not (tmp_path / "other").exists()


async def test_a_storage_with_blocks_is_removed_only_by_force(admin: Admin) -> None:
    admin.running.cache.blocks_on_storage = 7
    message = await admin.refusal("removeStorage", "INVALID_ARGUMENT", storage_unique_name="s1")
    assert "7 blocks" in message
    assert "s1" in await admin.storages()
    assert await admin.code("removeStorage", storage_unique_name="s1", force=True) == "OK"
    assert admin.running.cache.dropped == ["s1"]
    assert await admin.storages() == {}


async def test_a_path_is_changed_only_by_force_while_blocks_live_there(
    admin: Admin, tmp_path: Path
) -> None:
    admin.running.cache.blocks_on_storage = 7
    moved = nfs(tmp_path / "moved", name="s1")
    assert "7 blocks" in await admin.refusal("updateStorage", "INVALID_ARGUMENT", storage=moved)
    assert not (tmp_path / "moved").exists()
    assert await admin.code("updateStorage", storage=moved, force_update=True) == "OK"
    assert admin.running.cache.dropped == ["s1"]
    assert (await admin.storages())["s1"] == moved
    refused = await admin.refusal(
        "updateStorage", "INVALID_ARGUMENT", storage=nfs(tmp_path, name="nope")
    )
    assert "'nope'" in refused


async def test_keys_per_file_change_while_blocks_live_there(admin: Admin, tmp_path: Path) -> None:
    admin.running.cache.blocks_on_storage = 7
    root = (await admin.storages())["s1"]["nfs"]["root_path"]
    changed = nfs(Path(root), name="s1", keys=16)
    changed["nfs"]["root_path"] = root
    assert await admin.code("updateStorage", storage=changed) == "OK"
    assert admin.running.cache.dropped == []
    assert (await admin.storages())["s1"]["nfs"]["key_count_per_file"] == 16


async def test_a_place_is_made_for_a_storage_that_is_added_or_moved_and_for_no_other(
    admin: Admin, tmp_path: Path
) -> None:
    storage = nfs(tmp_path / "s2", name="s2")
    assert await admin.code("addStorage", storage=storage) == "OK"
    assert (tmp_path / "s2" / MARKER).is_file()
    (tmp_path / "s2").rename(tmp_path / "away")
    (tmp_path / "s2").mkdir()
    for changed in (storage | {"capacity_bytes": 5}, nfs(tmp_path / "s2", name="s2", keys=3)):
        refused = await admin.refusal("updateStorage", "IO_ERROR", storage=changed)
        assert "is its file system mounted?" in refused
        assert list((tmp_path / "s2").iterdir()) == []
    (tmp_path / "s2").rmdir()
    (tmp_path / "away").rename(tmp_path / "s2")
    assert await admin.code("updateStorage", storage=storage | {"capacity_bytes": 5}) == "OK"
    moved = nfs(tmp_path / "s3", name="s2")
    assert await admin.code("updateStorage", storage=moved, force_update=True) == "OK"
    assert (tmp_path / "s3" / MARKER).is_file()


async def test_a_group_makes_the_round_trip(admin: Admin) -> None:
    assert await admin.code("createInstanceGroup", instance_group=GROUP) == "OK"
    assert (await admin("getInstanceGroup", name="g2"))["instance_group"] == GROUP
    await admin.refusal("createInstanceGroup", "DUPLICATE_ENTITY", instance_group=GROUP)


async def test_group_updates_go_by_version(admin: Admin) -> None:
    assert await admin.code("createInstanceGroup", instance_group=GROUP) == "OK"
    newer = {**GROUP, "version": "2", "user_data": "v"}
    update = {"instance_group": newer, "current_version": "1"}
    await admin.refusal(
        "updateInstanceGroup", "INVALID_ARGUMENT", **{**update, "current_version": 5}
    )
    assert await admin.code("updateInstanceGroup", **update) == "OK"
    await admin.refusal("updateInstanceGroup", "INVALID_ARGUMENT", **update)
    assert (await admin("getInstanceGroup", name="g2"))["instance_group"]["user_data"] == "v"


async def test_wrong_enum_numbers_in_a_group_are_named(admin: Admin) -> None:
    quota = {"quota_config": [{"storage_type": 77, "capacity": 1}]}
    message = await admin.refusal(
        "createInstanceGroup", "INVALID_ARGUMENT", instance_group={**GROUP, "quota": quota}
    )
    assert "instance_group.quota.quota_config[0].storage_type" in message


async def test_a_group_with_instances_is_removed_only_by_force(admin: Admin) -> None:
    assert "'i'" in await admin.refusal("removeInstanceGroup", "INVALID_ARGUMENT", name="default")
    assert await admin.code("removeInstanceGroup", name="default", force=True) == "OK"
    assert (await admin("listInstanceInfo"))["instance_info"] == []
    await admin.refusal("getInstanceGroup", "INVALID_ARGUMENT", name="default")
    await admin.refusal("removeInstanceGroup", "INVALID_ARGUMENT", name="default", force=True)


async def test_instances_are_listed_by_group_and_removed(admin: Admin) -> None:
    body = {**INSTANCE, "instance_id": "j"}
    assert await admin.code("registerInstance", **body) == "OK"
    assert "j" in admin.running.cache.prepared
    listed = (await admin("listInstanceInfo"))["instance_info"]
    assert [i["instance_id"] for i in listed] == ["i", "j"]
    assert listed[0]["quota_group_name"] == "q"
    assert (
        len((await admin("listInstanceInfo", instance_group_name="default"))["instance_info"]) == 2
    )
    unknown = await admin("listInstanceInfo", instance_group_name="none")
    assert unknown["instance_info"] == []
    assert unknown["header"]["status"]["code"] == "OK"
    assert await admin.code("removeInstance", instance_id="j") == "OK"
    await admin.refusal("getInstanceInfo", "INSTANCE_NOT_EXIST", instance_id="j")
    other = {"instance_id": "i", "instance_group": "other"}
    await admin.refusal("removeInstance", "INSTANCE_NOT_EXIST", **other)
    assert await admin.code("getInstanceInfo", instance_id="i") == "OK"


async def test_registration_outcomes(admin: Admin) -> None:
    register = admin.running.post
    again = await register("registerInstance", INSTANCE)
    assert again["header"]["status"]["code"] == "OK"
    for change, code, says in [
        ({"block_size": 8}, "DUPLICATE_ENTITY", "block_size"),
        ({"instance_id": "n", "instance_group": "none"}, "INVALID_ARGUMENT", "none"),
        ({"instance_id": "n", "block_size": 0}, "INVALID_ARGUMENT", "block_size"),
        ({"instance_id": ""}, "INVALID_ARGUMENT", "instance_id"),
    ]:
        answer = await register("registerInstance", {**INSTANCE, **change})
        assert answer["header"]["status"]["code"] == code
        assert says in answer["header"]["status"]["message"]
        assert answer["storage_configs"] == ""


async def test_an_instance_without_candidates_is_registered_all_the_same(admin: Admin) -> None:
    group = {"name": "bare", "version": 1}
    assert await admin.code("createInstanceGroup", instance_group=group) == "OK"
    body = {**INSTANCE, "instance_id": "k", "instance_group": "bare"}
    answer = await admin.running.post("registerInstance", body)
    assert answer["storage_configs"] == "[]"


async def test_instance_info_is_what_was_registered(admin: Admin) -> None:
    body = {
        **INSTANCE,
        "instance_id": "full",
        "location_spec_infos": [{"name": "a", "size": "1"}, {"name": "b", "size": "2"}],
        "location_spec_groups": [{"name": "g", "spec_names": ["a"]}],
        "model_deployment": {
            "model_name": "m",
            "dtype": "bf16",
            "use_mla": True,
            "tp_size": 1,
            "dp_size": 2,
            "lora_name": "l",
            "pp_size": 3,
            "extra": "e",
            "user_data": "u",
        },
    }
    assert await admin.running.code("registerInstance", body) == "OK"
    info = (await admin("getInstanceInfo", instance_id="full"))["instance_info"]
    assert {k: info[k] for k in body if k != "instance_group"} == {
        k: v for k, v in body.items() if k != "instance_group"
    }
    meta = await admin.running.post("getInstanceInfo", {"instance_id": "full"})
    assert meta["instance_info"] == info
    assert meta["instance_group"] == "default"


async def test_accounts_never_show_a_password(admin: Admin) -> None:
    account = {"user_name": "ann", "password": "s3cret-word", "role": "ROLE_ADMIN"}
    assert await admin.code("addAccount", **account) == "OK"
    await admin.refusal("addAccount", "DUPLICATE_ENTITY", **account)
    listed = await admin("listAccount")
    assert listed["accounts"] == [{"user_name": "ann", "role": "ROLE_ADMIN"}]
    assert "s3cret-word" not in json.dumps([listed, await admin("genConfigSnapshot")])
    await admin.refusal("addAccount", "INVALID_ARGUMENT", user_name="bob", password="p", role=7)
    assert await admin.code("deleteAccount", user_name="ann") == "OK"
    await admin.refusal("deleteAccount", "INVALID_ARGUMENT", user_name="ann")


async def test_a_snapshot_brings_back_what_was_removed(admin: Admin) -> None:
    snapshot = (await admin("genConfigSnapshot"))["config_snapshot"]
    assert await admin.code("removeInstanceGroup", name="default", force=True) == "OK"
    assert await admin.code("loadConfigSnapshot", config_snapshot=snapshot) == "OK"
    assert await admin.code("getInstanceInfo", instance_id="i") == "OK"
    await admin.refusal("loadConfigSnapshot", "INVALID_ARGUMENT", config_snapshot="{")


async def test_places_are_made_for_the_storages_that_a_snapshot_brings_and_for_no_others(
    admin: Admin, tmp_path: Path
) -> None:
    assert await admin.code("addStorage", storage=nfs(tmp_path / "s2")) == "OK"
    snapshot = (await admin("genConfigSnapshot"))["config_snapshot"]
    assert await admin.code("removeStorage", storage_unique_name="s2") == "OK"
    (tmp_path / "s2" / MARKER).unlink()
    (tmp_path / "blocks" / MARKER).unlink()
    assert await admin.code("loadConfigSnapshot", config_snapshot=snapshot) == "OK"
    await eventually((tmp_path / "s2" / MARKER).is_file, timeout=30)
    assert not (tmp_path / "blocks" / MARKER).exists()


async def test_both_services_share_cache_calls(admin: Admin) -> None:
    answer = await admin("getCacheMeta", instance_id="i", block_keys=[1])
    assert list(answer) == ["header", "locations", "metas"]
    assert "tracer_result" not in answer["header"]
    assert await admin.code("removeCache", instance_id="i", block_keys=[1]) == "OK"


async def test_every_call_is_counted_on_both_transports(admin: Admin) -> None:
    await admin.code("listStorage")
    await admin.running.admin.ListStorage(admin_pb2.ListStorageRequest())
    metrics = (await admin("getMetrics"))["metrics"]
    of_list = [
        m
        for m in metrics
        if m["metric_tags"] == [{"tag_key": "api_name", "tag_value": "ListStorage"}]
    ]
    assert [m["metric_name"] for m in of_list] == [
        "service.query_counter",
        "service.query_rt_us",
    ]
    assert of_list[0]["metric_value"] == {"int_value": "2"}
    assert of_list[1]["metric_value"]["float_value"] > 0


async def test_a_demoted_leader_says_so_at_once_and_refuses(admin: Admin) -> None:
    assert (await admin("checkHealth"))["is_leader"]
    assert await admin.code("updateLeaderElectorConfig", campaign_delay_time_ms=60_000) == "OK"
    assert (await admin("getLeaderElectorConfig"))["campaign_delay_time_ms"] == "60000"
    assert (await admin("getManagerClusterInfo"))["leader_node_id"]
    assert await admin.code("leaderDemote") == "OK"
    health = await admin("checkHealth")
    assert not health["is_leader"]
    assert health["is_health"]
    assert (await admin("getManagerClusterInfo"))["leader_node_id"] == ""
    for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods:
        name = method.name[0].lower() + method.name[1:]
        if method.name not in ANSWERED_BY_ALL:
            assert await admin.code(name) == "SERVER_NOT_LEADER", name
    for method in meta_pb2.DESCRIPTOR.services_by_name["MetaService"].methods:
        name = method.name[0].lower() + method.name[1:]
        assert await admin.running.code(name) == "SERVER_NOT_LEADER", name


async def test_log_levels_change_by_module(admin: Admin) -> None:
    assert await admin.code("updateLogger", module_name="kvcm.server", log_level="DEBUG") == "OK"
    assert await admin.code("updateLogger", module_name="server", log_level="info") == "OK"
    assert await admin.code("updateLogger", log_level="info") == "OK"
    message = await admin.refusal("updateLogger", "INVALID_ARGUMENT", log_level="loud")
    assert "log_level" in message
    message = await admin.refusal(
        "updateLogger", "INVALID_ARGUMENT", module_name="kvcm.nope", log_level="info"
    )
    assert "module_name" in message
