"""Every RPC of AdminService over both transports, errors included (wire.md §2, §7, §9)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wire_harness import (
    Instance,
    Server,
    Wire,
    code_of,
    group_document,
    message_of,
    methods,
    reason_of,
    registration,
    running_server,
    succeeded,
)

from kvcm.testing.eventually import eventually_sync

Json = dict[str, Any]


def nfs(server: Server, name: str, **spec: Any) -> Json:
    root = f"{server.folder}/{name}"
    return {
        "global_unique_name": name,
        "nfs": {"root_path": root, "key_count_per_file": 8, **spec},
        "check_storage_available_when_open": False,
    }


def all_stored(wire: Wire) -> list[Json]:
    """Without their health, which passes."""
    listed = wire.admin_ok("ListStorage")["storage"]
    assert {storage.pop("health") for storage in listed} <= {"available", "suspect", "unavailable"}
    return listed


def stored(wire: Wire, name: str) -> Json | None:
    listed = all_stored(wire)
    names = [storage["global_unique_name"] for storage in listed]
    assert names == sorted(names)
    return next((s for s in listed if s["global_unique_name"] == name), None)


# -- storages ---------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_a_storage_is_shown_as_it_was_added(wire: Wire, server: Server, fresh_id, check):
    for member, spec in (
        ("nfs", {"root_path": f"{server.folder}/n", "key_count_per_file": 3}),
        (
            "threefs",
            {
                "cluster_name": "c",
                "mountpoint": str(server.folder),
                "root_dir": "r",
                "key_count_per_file": 0,
                "touch_file_when_create": True,
            },
        ),
        (
            "vcnsthreefs",
            {
                "cluster_name": "",
                "mountpoint": f"{server.folder}",
                "root_dir": "v",
                "key_count_per_file": 2,
                "touch_file_when_create": False,
                "remote_host": "h",
                "remote_port": 1,
                "meta_storage_uri": "m://u",
            },
        ),
        ("plugin", {"name": "memory", "options": []}),
    ):
        storage = {
            "global_unique_name": fresh_id(),
            member: spec,
            "check_storage_available_when_open": check,
        }
        wire.admin_ok("AddStorage", storage=storage)
        assert stored(wire, storage["global_unique_name"]) == storage


def test_adding_a_storage_again_is_a_duplicate_and_changes_nothing(wire, server, fresh_id):
    name = fresh_id()
    wire.admin_ok("AddStorage", storage=nfs(server, name))
    for storage in (nfs(server, name), nfs(server, name, key_count_per_file=1)):
        answer = wire.admin("AddStorage", storage=storage)
        assert code_of(answer) == "DUPLICATE_ENTITY"
        assert name in message_of(answer)
    assert stored(wire, name) == nfs(server, name)


NOT_BUILT_IN = {
    "tair_mem_pool": {"domain": "d", "timeout": 5},
    "plugin": {"name": "nobodys", "options": [{"name": "a", "value": "b"}]},
    "local": {},
}


@pytest.mark.parametrize("member", NOT_BUILT_IN)
def test_a_type_that_is_not_built_in_is_unsupported_and_not_stored(wire, fresh_id, member):
    name = fresh_id()
    storage = {"global_unique_name": name, member: NOT_BUILT_IN[member]}
    answer = wire.admin("AddStorage", storage=storage)
    assert code_of(answer) == "UNSUPPORTED"
    assert name in message_of(answer)
    assert stored(wire, name) is None


def test_a_storage_that_fails_to_open_is_not_stored(wire, server: Server, fresh_id):
    name = fresh_id()
    blocked = server.folder / f"file-{name}"
    blocked.write_text("not a folder")
    answer = wire.admin("AddStorage", storage=nfs(server, name, root_path=f"{blocked}/x"))
    assert code_of(answer) == "IO_ERROR"
    assert str(blocked) in message_of(answer)
    assert stored(wire, name) is None


def test_an_hf3fs_mountpoint_that_is_not_there_fails_the_check(wire, server, fresh_id):
    name = fresh_id()
    storage = {
        "global_unique_name": name,
        "threefs": {"mountpoint": f"{server.folder}/not-mounted-{name}", "root_dir": "r"},
        "check_storage_available_when_open": True,
    }
    answer = wire.admin("AddStorage", storage=storage)
    assert code_of(answer) == "IO_ERROR"
    assert stored(wire, name) is None
    assert not Path(storage["threefs"]["mountpoint"]).exists()


BAD_STORAGES = [
    ({}, "global_unique_name"),
    ({"global_unique_name": "a/b"}, "global_unique_name"),
    ({"global_unique_name": "a b"}, "global_unique_name"),
    ({"global_unique_name": "é"}, "global_unique_name"),
    ({"global_unique_name": "x" * 257}, "global_unique_name"),
    ({"nfs": {}}, "root_path"),
    ({"nfs": {"root_path": "relative"}}, "root_path"),
    ({"nfs": {"root_path": "/"}}, "root_path"),
    ({"nfs": {"root_path": "/tmp/../etc"}}, "root_path"),
    ({"nfs": {"root_path": "/a?b"}}, "root_path"),
    ({"nfs": {"root_path": "/a", "key_count_per_file": -1}}, "key_count_per_file"),
    ({"nfs": {"root_path": "/a", "key_count_per_file": 4097}}, "key_count_per_file"),
    ({"threefs": {"root_dir": "r"}}, "mountpoint"),
    ({"mooncake": {"master_service_entry": "m"}}, "master_service_entry"),
    ({"threefs": {"mountpoint": "/m", "root_dir": "../.."}}, "root_dir"),
]


@pytest.mark.parametrize(("changes", "field"), BAD_STORAGES, ids=range(len(BAD_STORAGES)))
def test_a_wrong_storage_is_refused_naming_the_field(wire, fresh_id, changes, field):
    storage: Json = {"global_unique_name": fresh_id(), **changes}
    if field == "global_unique_name":
        storage.setdefault("nfs", {"root_path": "/tmp/kvcm-never-made"})
        if not changes:
            del storage["global_unique_name"]
    answer = wire.admin("AddStorage", storage=storage)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert field in message_of(answer)
    assert not Path("/tmp/kvcm-never-made").exists()


def test_a_storage_without_a_spec_or_no_storage_is_refused(wire: Wire, fresh_id):
    for body in ({}, {"storage": {}}, {"storage": {"global_unique_name": fresh_id()}}):
        answer = wire.admin("AddStorage", body)
        assert code_of(answer) in ("INVALID_ARGUMENT", "UNSUPPORTED")
        assert message_of(answer)


@pytest.mark.parametrize("method", ["EnableStorage", "DisableStorage", "RemoveStorage"])
def test_calls_on_an_unknown_storage_name_it(wire: Wire, method):
    answer = wire.admin(method, storage_unique_name="nobody")
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "nobody" in message_of(answer)
    assert reason_of(answer) == "ENTITY_NOT_EXIST"


def test_update_storage(wire: Wire, server: Server, fresh_id):
    name = fresh_id()
    answer = wire.admin("UpdateStorage", storage=nfs(server, name))
    assert (code_of(answer), reason_of(answer)) == ("INVALID_ARGUMENT", "ENTITY_NOT_EXIST")
    wire.admin_ok("AddStorage", storage=nfs(server, name))
    changed = nfs(server, name, key_count_per_file=2)
    wire.admin_ok("UpdateStorage", storage=changed)
    assert stored(wire, name) == changed
    bad = nfs(server, name, root_path="relative")
    assert code_of(wire.admin("UpdateStorage", storage=bad)) == "INVALID_ARGUMENT"
    assert stored(wire, name) == changed


def test_an_update_keeps_a_storage_disabled(wire: Wire, server: Server, fresh_id):
    name = fresh_id()
    wire.admin_ok("AddStorage", storage=nfs(server, name))
    for _ in range(2):
        wire.admin_ok("DisableStorage", storage_unique_name=name)
    wire.admin_ok("UpdateStorage", storage=nfs(server, name, key_count_per_file=2))
    group = group_document(name, storage_candidates=[name])
    wire.admin_ok("CreateInstanceGroup", instance_group=group)
    answer = wire.ok("RegisterInstance", registration(name, instance_group=name))
    assert json.loads(answer["storage_configs"])[0]["is_available"] is False


# -- groups -----------------------------------------------------------------------------


def test_a_group_lives_from_create_to_remove(wire: Wire, fresh_id):
    name = fresh_id()
    group = group_document(name)
    wire.admin_ok("CreateInstanceGroup", instance_group=group)
    duplicate = wire.admin("CreateInstanceGroup", instance_group=group)
    assert code_of(duplicate) == "DUPLICATE_ENTITY"
    assert name in message_of(duplicate)
    shown = wire.admin_ok("GetInstanceGroup", name=name)["instance_group"]
    assert shown["name"] == name
    assert shown["version"] == "1"
    wire.admin_ok("RemoveInstanceGroup", name=name)
    for method in ("GetInstanceGroup", "RemoveInstanceGroup"):
        answer = wire.admin(method, name=name)
        assert (code_of(answer), reason_of(answer)) == ("INVALID_ARGUMENT", "ENTITY_NOT_EXIST")
        assert name in message_of(answer)
    assert "instance_group" not in wire.admin("GetInstanceGroup", name=name)
    missing = wire.admin("UpdateInstanceGroup", instance_group=group, current_version=1)
    assert code_of(missing) == "INVALID_ARGUMENT"


BAD_GROUPS = [
    ({"name": ""}, "name"),
    ({"name": " "}, "name"),
    ({"name": " x"}, "name"),
    ({"name": "x" * 257}, "name"),
    ({"storage_candidates": ["a", "a"]}, "storage_candidates"),
    ({"storage_candidates": [""]}, "storage_candidates"),
    ({"quota": {"quota_config": [{"capacity": 1}]}}, "storage_type"),
    (
        {"quota": {"quota_config": [{"storage_type": 4, "capacity": 1}] * 2}},
        "storage_type",
    ),
    ({"quota": {"quota_config": [{"storage_type": 99, "capacity": 1}]}}, "storage_type"),
    ({"cache_config": {"data_storage_strategy": 77}}, "data_storage_strategy"),
    ({"cache_config": {"reclaim_strategy": {"reclaim_policy": 77}}}, "reclaim_policy"),
]


@pytest.mark.parametrize(("changes", "field"), BAD_GROUPS, ids=range(len(BAD_GROUPS)))
def test_a_wrong_group_is_refused_naming_the_field(wire, fresh_id, changes, field):
    group = {**group_document(fresh_id()), **changes}
    answer = wire.admin("CreateInstanceGroup", instance_group=group)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert field in message_of(answer)


# -- instances --------------------------------------------------------------------------


def test_an_instance_registered_at_the_admin_port_works(wire: Wire, fresh_id):
    name = fresh_id()
    answer = wire.admin_ok("RegisterInstance", registration(name))
    assert set(answer) == {"header"}
    instance = Instance(wire, name)
    assert len(instance.write([1, 2])) == 2
    assert code_of(wire.admin("RegisterInstance", registration(name, block_size=99))) == (
        "DUPLICATE_ENTITY"
    )


def test_instances_are_listed_by_group(wire: Wire, fresh_id):
    group = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(group))
    names = sorted(fresh_id() for _ in range(3))
    for name in names:
        wire.ok("RegisterInstance", registration(name, instance_group=group))
    listed = wire.admin_ok("ListInstanceInfo", instance_group_name=group)["instance_info"]
    assert [info["instance_id"] for info in listed] == names
    wire.admin_ok("RemoveInstance", instance_id=names[0])
    listed = wire.admin_ok("ListInstanceInfo", instance_group_name=group)["instance_info"]
    assert [info["instance_id"] for info in listed] == names[1:]


# -- accounts ---------------------------------------------------------------------------

PASSWORD = "s3cret-pässword-never-shown"


def test_accounts_live_and_their_passwords_are_never_shown(wire: Wire, fresh_id):
    name = fresh_id()
    wire.admin_ok("AddAccount", user_name=name, password=PASSWORD, role="ROLE_ADMIN")
    other = fresh_id()
    wire.admin_ok("AddAccount", user_name=other, password="x")
    listed = wire.admin_ok("ListAccount")["accounts"]
    assert {"user_name": name, "role": "ROLE_ADMIN"} in listed
    assert {"user_name": other, "role": "ROLE_USER"} in listed
    duplicate = wire.admin("AddAccount", user_name=name, password="y")
    assert code_of(duplicate) == "DUPLICATE_ENTITY"
    snapshot = wire.admin_ok("GenConfigSnapshot")
    everything = json.dumps([listed, duplicate, snapshot]) + wire.server.log
    assert PASSWORD not in everything
    assert json.dumps(PASSWORD)[1:-1] not in everything
    for account in (name, other):
        wire.admin_ok("DeleteAccount", user_name=account)
    answer = wire.admin("DeleteAccount", user_name=name)
    assert (code_of(answer), reason_of(answer)) == ("INVALID_ARGUMENT", "ENTITY_NOT_EXIST")
    assert name not in [a["user_name"] for a in wire.admin_ok("ListAccount")["accounts"]]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"password": "x"}, "user_name"),
        ({"user_name": " ", "password": "x"}, "user_name"),
        ({"user_name": "u"}, "password"),
        ({"user_name": "u", "password": "x" * 1025}, "password"),
        ({"user_name": "u", "password": "x", "role": 9}, "role"),
    ],
)
def test_a_wrong_account_is_refused_naming_the_field(wire: Wire, fields, field):
    answer = wire.admin("AddAccount", fields)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert field in message_of(answer)
    assert "x" * 1025 not in message_of(answer)


# -- snapshots --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format":99}', "x" * 100_000])
def test_what_is_no_snapshot_is_refused(wire: Wire, text):
    answer = wire.admin("LoadConfigSnapshot", config_snapshot=text)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "config_snapshot" in message_of(answer)
    assert len(message_of(answer)) < 2000


# -- the rest that every node answers ---------------------------------------------------


def test_health_and_cluster(wire: Wire):
    health = wire.admin_ok("CheckHealth")
    assert health["is_leader"] is True
    assert health["is_health"] is True
    assert int(health["elector_last_loop_time_ms"]) > 0
    cluster = wire.admin_ok("GetManagerClusterInfo")
    assert cluster["self_node_id"]
    assert cluster["leader_node_id"] == cluster["self_node_id"]
    assert int(cluster["info_updated_time"]) > 0


def test_log_levels_change_by_module(wire: Wire):
    for module in ("", "kvcm", "server", "kvcm.server.backends"):
        wire.admin_ok("UpdateLogger", module_name=module, log_level="debug")
        wire.admin_ok("UpdateLogger", module_name=module, log_level="INFO")
    for fields, field in (
        ({"module_name": "", "log_level": "loud"}, "log_level"),
        ({"module_name": "", "log_level": ""}, "log_level"),
        ({"module_name": "nobody", "log_level": "info"}, "module_name"),
    ):
        answer = wire.admin("UpdateLogger", fields)
        assert code_of(answer) == "INVALID_ARGUMENT"
        assert field in message_of(answer)


# -- a manager that may be disturbed ----------------------------------------------------


@pytest.fixture(scope="module")
def solo() -> Any:
    """A manager with the contents of a first start."""
    with running_server(bootstrap={}) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def own(request: pytest.FixtureRequest, solo: Server) -> Any:
    """That manager over one transport, leading before and after."""
    wire = Wire(solo, request.param)
    yield wire
    wire.admin_ok("UpdateLeaderElectorConfig", campaign_delay_time_ms=0)
    eventually_sync(lambda: wire.admin_ok("CheckHealth")["is_leader"], timeout=30)


def test_the_contents_of_a_first_start(own: Wire):
    default = {
        "global_unique_name": "nfs_01",
        "nfs": {"root_path": "/tmp/nfs/", "key_count_per_file": 8},
        "check_storage_available_when_open": False,
    }
    assert all_stored(own) == [default]
    shown = own.admin_ok("GetInstanceGroup", name="default")["instance_group"]
    config = shown["cache_config"]
    capacity = "10000000000"
    assert shown["storage_candidates"] == ["nfs_01"]
    assert shown["global_quota_group_name"] == "default_quota_group"
    assert shown["max_instance_count"] == "100"
    assert shown["quota"]["capacity"] == "30000000000"
    assert sorted(shown["quota"]["quota_config"], key=lambda c: c["storage_type"]) == [
        {"storage_type": "ST_3FS", "capacity": capacity},
        {"storage_type": "ST_NFS", "capacity": capacity},
        {"storage_type": "ST_TAIRMEMPOOL", "capacity": capacity},
    ]
    strategy = config["reclaim_strategy"]
    assert strategy["reclaim_policy"] == "POLICY_LRU"
    assert strategy["trigger_strategy"]["used_percentage"] == 0.8
    assert strategy["delay_before_delete_ms"] == 1000
    assert config["data_storage_strategy"] == "CPS_PREFER_3FS"
    assert config["meta_indexer_config"]["max_key_count"] == "1000000"
    assert config["meta_indexer_config"]["mutex_shard_num"] == "16"


def test_after_leader_demote_the_very_next_health_check_says_so(own: Wire, fresh_id):
    name = fresh_id()
    own.ok("RegisterInstance", registration(name))
    own.admin_ok("UpdateLeaderElectorConfig", campaign_delay_time_ms=600_000)
    assert own.admin_ok("GetLeaderElectorConfig")["campaign_delay_time_ms"] == "600000"
    own.admin_ok("LeaderDemote")
    assert own.admin_ok("CheckHealth")["is_leader"] is False
    _leader_only(own, name)
    # Setting a shorter delay ends a stay that is under way.
    own.admin_ok("UpdateLeaderElectorConfig", campaign_delay_time_ms=0)
    eventually_sync(lambda: own.admin_ok("CheckHealth")["is_leader"], timeout=30)
    own.ok("GetInstanceInfo", instance_id=name)


def _leader_only(own: Wire, name: str) -> None:
    """Every call of a node that does not lead, with its answer."""
    anyone = {
        "GetMetrics",
        "CheckHealth",
        "GetManagerClusterInfo",
        "LeaderDemote",
        "GetLeaderElectorConfig",
        "UpdateLeaderElectorConfig",
        "UpdateLogger",
    }
    for method in methods(admin=False):
        answer = own.call(method, instance_id=name)
        assert code_of(answer) == "SERVER_NOT_LEADER", method
        assert "leader" in message_of(answer)
    for method in methods(admin=True):
        if method in anyone - {"LeaderDemote", "UpdateLeaderElectorConfig"}:
            assert code_of(own.admin(method)) != "SERVER_NOT_LEADER", method
        elif method not in anyone:
            assert code_of(own.admin(method)) == "SERVER_NOT_LEADER", method


@pytest.mark.parametrize("delay", [-1, 24 * 3600 * 1000 + 1])
def test_a_wrong_campaign_delay_is_refused(own: Wire, delay):
    answer = own.admin("UpdateLeaderElectorConfig", campaign_delay_time_ms=delay)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "campaign_delay_time_ms" in message_of(answer)


def test_a_snapshot_restores_what_was_there(own: Wire, fresh_id):
    name = fresh_id()
    own.admin_ok("AddAccount", user_name=name, password="x", role="ROLE_ADMIN")
    own.admin_ok("CreateInstanceGroup", instance_group=group_document(name))
    own.ok("RegisterInstance", registration(name, instance_group=name))
    snapshot = own.admin_ok("GenConfigSnapshot")["config_snapshot"]
    before = _registry(own)

    own.admin_ok("RemoveInstanceGroup", name=name, force=True)
    own.admin_ok("DeleteAccount", user_name=name)
    own.admin_ok("CreateInstanceGroup", instance_group=group_document(f"{name}-later"))
    assert _registry(own) != before

    own.admin_ok("LoadConfigSnapshot", config_snapshot=snapshot)
    assert _registry(own) == before
    missing = own.admin("GetInstanceGroup", name=f"{name}-later")
    assert code_of(missing) == "INVALID_ARGUMENT"
    # And the restored instance works.
    instance = Instance(own, name)
    eventually_sync(lambda: code_of(instance.call("StartWriteCache", block_keys=[1])) == "OK")
    succeeded(instance.call("GetInstanceInfo"))
    own.admin_ok("RemoveInstanceGroup", name=name, force=True)


def _registry(wire: Wire) -> Json:
    return {
        "storage": all_stored(wire),
        "instance_info": wire.admin_ok("ListInstanceInfo")["instance_info"],
        "accounts": wire.admin_ok("ListAccount")["accounts"],
        "default": wire.admin_ok("GetInstanceGroup", name="default")["instance_group"],
    }
