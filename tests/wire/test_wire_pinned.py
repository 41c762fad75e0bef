"""Pinned outcomes (wire.md §7) that need no server of their own."""

from __future__ import annotations

import time
from typing import Any

import pytest
from wire_harness import (
    SPECS,
    Instance,
    Wire,
    code_of,
    group_document,
    message_of,
    registration,
    succeeded,
)

from kvcm.testing.eventually import eventually_sync

Json = dict[str, Any]
GROUPS = [
    {"name": "g1", "spec_names": ["tp0"]},
    {"name": "g2", "spec_names": ["tp0", "tp1"]},
]
DEPLOYMENT = {
    "model_name": "m",
    "dtype": "bf16",
    "use_mla": False,
    "tp_size": 2,
    "dp_size": 1,
    "lora_name": "l",
    "pp_size": 1,
    "extra": "e",
    "user_data": "u",
}


def body(instance_id: str, **changes: Any) -> Json:
    return registration(
        instance_id, model_deployment=DEPLOYMENT, location_spec_groups=GROUPS, **changes
    )


# -- RegisterInstance -------------------------------------------------------------------


def deployment(**changes: Any) -> Json:
    return {"model_deployment": {**DEPLOYMENT, **changes}}


SAME = [
    {},
    deployment(user_data="other"),
    {"location_spec_infos": SPECS[::-1]},
    {"location_spec_groups": GROUPS[::-1]},
    {"location_spec_groups": [GROUPS[0], {"name": "g2", "spec_names": ["tp1", "tp0"]}]},
]


@pytest.mark.parametrize("changes", SAME, ids=range(len(SAME)))
def test_registering_equal_data_again_is_ok(wire: Wire, fresh_id, changes):
    name = fresh_id()
    first = wire.ok("RegisterInstance", body(name))
    again = wire.ok("RegisterInstance", {**body(name), **changes})
    assert again["storage_configs"] == first["storage_configs"]


def test_registering_again_keeps_the_blocks(register):
    instance = register()
    locations = instance.write([1, 2])
    instance.wire.ok("RegisterInstance", registration(instance.id))
    assert instance.prefix([1, 2]) == locations


DIFFERENT = [
    ("block_size", {"block_size": 8}),
    *[
        ("model_deployment", deployment(**{key: value}))
        for key, value in {
            "model_name": "x",
            "dtype": "fp8",
            "use_mla": True,
            "tp_size": 4,
            "dp_size": 2,
            "lora_name": "",
            "pp_size": 2,
            "extra": "",
        }.items()
    ],
    ("location_spec_infos", {"location_spec_infos": [SPECS[0], {"name": "tp1", "size": 501}]}),
    (
        "location_spec_infos",
        {"location_spec_infos": [*SPECS, {"name": "tp2", "size": 1}]},
    ),
    ("location_spec_groups", {"location_spec_groups": GROUPS[:1]}),
    (
        "location_spec_groups",
        {"location_spec_groups": [GROUPS[0], {"name": "g2", "spec_names": ["tp1"]}]},
    ),
]


@pytest.mark.parametrize(("field", "changes"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_registering_different_data_names_instance_and_field(wire, fresh_id, field, changes):
    name = fresh_id()
    wire.ok("RegisterInstance", body(name))
    answer = wire.call("RegisterInstance", {**body(name), **changes})
    assert code_of(answer) == "DUPLICATE_ENTITY"
    assert name in message_of(answer)
    assert field in message_of(answer)
    assert answer["storage_configs"] == ""
    # The first registration is unharmed.
    wire.ok("RegisterInstance", body(name))


def test_another_group_is_different_data(wire: Wire, fresh_id):
    name = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name))
    wire.ok("RegisterInstance", body(name))
    answer = wire.call("RegisterInstance", body(name, instance_group=name))
    assert code_of(answer) == "DUPLICATE_ENTITY"
    assert "instance_group" in message_of(answer)


@pytest.mark.parametrize("group", ["nobody", "", " ", " default"])
def test_an_unknown_group_is_an_error_naming_it(wire: Wire, fresh_id, group):
    answer = wire.call("RegisterInstance", body(fresh_id(), instance_group=group))
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert (repr(group) if group.strip() else "instance_group") in message_of(answer)
    assert answer["storage_configs"] == ""


BAD = [
    ("block_size", {"block_size": 0}),
    ("block_size", {"block_size": -1}),
    ("size", {"location_spec_infos": [{"name": "tp0", "size": 0}]}),
    ("size", {"location_spec_infos": [{"name": "tp0", "size": -5}]}),
    ("location_spec_infos", {"location_spec_infos": []}),
    ("location_spec_infos", {"location_spec_infos": [SPECS[0], SPECS[0]]}),
    ("name", {"location_spec_infos": [{"name": "", "size": 1}]}),
    ("nobody", {"location_spec_groups": [{"name": "g", "spec_names": ["nobody"]}]}),
    ("location_spec_groups", {"location_spec_groups": [GROUPS[0], GROUPS[0]]}),
    ("instance_id", {"instance_id": ""}),
]


@pytest.mark.parametrize(("field", "changes"), BAD, ids=range(len(BAD)))
@pytest.mark.parametrize("service", ["meta", "admin"])
def test_a_wrong_registration_is_refused_naming_the_field(wire, fresh_id, field, changes, service):
    name = fresh_id()
    wrong = {**registration(name), **changes}
    call = wire.call if service == "meta" else wire.admin
    answer = call("RegisterInstance", wrong)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert field in message_of(answer)
    assert code_of(wire.call("GetInstanceInfo", instance_id=name)) == "INSTANCE_NOT_EXIST"


# -- GetInstanceInfo --------------------------------------------------------------------


def test_instance_info_is_what_was_registered(wire: Wire, fresh_id):
    name = fresh_id()
    wire.ok("RegisterInstance", body(name))
    answer = wire.ok("GetInstanceInfo", instance_id=name)
    info = {
        "quota_group_name": "q",
        "instance_group_name": "default",
        "instance_id": name,
        "block_size": 4,
        "location_spec_infos": [{"name": "tp0", "size": "1000"}, {"name": "tp1", "size": "500"}],
        "model_deployment": DEPLOYMENT,
        "location_spec_groups": GROUPS,
    }
    assert answer["instance_group"] == "default"
    assert answer["instance_info"] == info
    assert wire.admin_ok("GetInstanceInfo", instance_id=name)["instance_info"] == info
    listed = wire.admin_ok("ListInstanceInfo", instance_group_name="default")["instance_info"]
    assert info in listed
    assert info in wire.admin_ok("ListInstanceInfo")["instance_info"]


def test_an_instance_without_deployment_shows_none(wire: Wire, fresh_id):
    name = fresh_id()
    plain = registration(name)
    del plain["model_deployment"]
    wire.ok("RegisterInstance", plain)
    info = wire.ok("GetInstanceInfo", instance_id=name)["instance_info"]
    assert "model_deployment" not in info
    # An empty one says the same.
    wire.ok("RegisterInstance", {**plain, "model_deployment": {}})


def test_get_instance_info_of_an_unknown_instance(wire: Wire, fresh_id):
    name = fresh_id()
    for answer in (
        wire.call("GetInstanceInfo", instance_id=name),
        wire.admin("GetInstanceInfo", instance_id=name),
    ):
        assert code_of(answer) == "INSTANCE_NOT_EXIST"
        assert name in message_of(answer)
        assert "instance_info" not in answer


def test_instances_of_an_unknown_group_are_an_empty_list(wire: Wire):
    answer = wire.admin_ok("ListInstanceInfo", instance_group_name="nobody")
    assert answer["instance_info"] == []


# -- unknown instances ------------------------------------------------------------------

SIX = [
    ("GetCacheLocation", {"query_type": "QT_PREFIX_MATCH", "block_keys": [1]}),
    ("GetCacheMeta", {"block_keys": [1]}),
    ("StartWriteCache", {"block_keys": [1]}),
    ("FinishWriteCache", {"write_session_id": "a" * 32, "success_blocks": {"offset": 0}}),
    ("RemoveCache", {"block_keys": [1]}),
    ("TrimCache", {"strategy": "TS_REMOVE_ALL_CACHE"}),
]


@pytest.mark.parametrize(("method", "fields"), SIX, ids=[m for m, _ in SIX])
@pytest.mark.parametrize("removed", [False, True], ids=["unknown", "removed"])
def test_the_six_cache_calls_of_an_unknown_instance(wire, fresh_id, method, fields, removed):
    name = fresh_id()
    if removed:
        wire.ok("RegisterInstance", registration(name))
        wire.admin_ok("RemoveInstance", instance_id=name)
    answer = wire.call(method, {"instance_id": name, **fields})
    assert code_of(answer) == "INSTANCE_NOT_EXIST"
    assert name in message_of(answer)


def test_headers_are_always_set_and_carry_the_trace_id(wire: Wire):
    before = int(time.time() * 1e6)
    for trace_id in ("abc", "", "a_b", "é☃", 'q"\\/\n'):
        header = wire.call("GetInstanceInfo", trace_id=trace_id)["header"]
        assert header["status"]["code"] == "INSTANCE_NOT_EXIST"
        prefix, _, micros = header["request_id"].rpartition("_")
        assert prefix == trace_id
        assert abs(int(micros) - before) < 60_000_000
        assert header["tracer_result"] == ""


def test_admin_headers_have_no_tracer_result(wire: Wire):
    header = wire.admin("GetInstanceInfo")["header"]
    assert set(header) == {"status", "request_id"}


# -- RemoveInstance ---------------------------------------------------------------------


@pytest.mark.parametrize("group", [{}, {"instance_group": ""}, {"instance_group": "default"}])
def test_remove_instance_works_with_and_without_its_group(register, group):
    instance = register()
    instance.write([1])
    instance.wire.admin_ok("RemoveInstance", instance_id=instance.id, **group)
    assert code_of(instance.call("GetInstanceInfo")) == "INSTANCE_NOT_EXIST"
    assert code_of(instance.wire.admin("RemoveInstance", instance_id=instance.id)) == (
        "INSTANCE_NOT_EXIST"
    )


def test_remove_instance_with_another_group_removes_nothing(register):
    instance = register()
    answer = instance.wire.admin("RemoveInstance", instance_id=instance.id, instance_group="other")
    assert code_of(answer) == "INSTANCE_NOT_EXIST"
    instance.ok("GetInstanceInfo")


# -- groups -----------------------------------------------------------------------------


def test_mutex_shard_num_is_any_power_of_two(wire: Wire, fresh_id):
    for number in (0, 1, 2, 64, 1 << 20, 1 << 40):
        config = {"meta_indexer_config": {"mutex_shard_num": number}}
        group = group_document(fresh_id(), cache_config=config)
        wire.admin_ok("CreateInstanceGroup", instance_group=group)
    for number in (3, 6, 1023, -2):
        config = {"meta_indexer_config": {"mutex_shard_num": number}}
        group = group_document(fresh_id(), cache_config=config)
        answer = wire.admin("CreateInstanceGroup", instance_group=group)
        assert code_of(answer) == "INVALID_ARGUMENT"
        assert "mutex_shard_num" in message_of(answer)


def test_an_update_names_the_stored_version_and_brings_a_larger_one(wire: Wire, fresh_id):
    name = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, version=5))

    def update(current: int, version: int) -> str:
        group = group_document(name, version=version, user_data=f"v{version}")
        return code_of(
            wire.admin("UpdateInstanceGroup", instance_group=group, current_version=current)
        )

    assert update(4, 6) == "INVALID_ARGUMENT"
    assert update(6, 7) == "INVALID_ARGUMENT"
    assert update(5, 5) == "INVALID_ARGUMENT"
    assert update(5, 4) == "INVALID_ARGUMENT"
    assert update(5, 9) == "OK"
    stored = wire.admin_ok("GetInstanceGroup", name=name)["instance_group"]
    assert (stored["version"], stored["user_data"]) == ("9", "v9")
    assert update(5, 10) == "INVALID_ARGUMENT"
    assert update(9, 10) == "OK"


# -- limits and reclaiming --------------------------------------------------------------


def limited(wire: Wire, name: str, **group: Any) -> Instance:
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, **group))
    succeeded(wire.call("RegisterInstance", registration(name, instance_group=name)))
    return Instance(wire, name)


def triggered(share: float, keys: int = 1000) -> Json:
    return {
        "reclaim_strategy": {
            "reclaim_policy": "POLICY_LRU",
            "trigger_strategy": {"used_percentage": share},
        },
        "meta_indexer_config": {"max_key_count": keys},
    }


def update(wire: Wire, name: str, version: int, **group: Any) -> None:
    wire.admin_ok(
        "UpdateInstanceGroup",
        instance_group=group_document(name, version=version + 1, **group),
        current_version=version,
    )


def test_a_refused_write_succeeds_soon_after_the_trigger_is_lowered(wire: Wire, fresh_id):
    name = fresh_id()
    instance = limited(wire, name, cache_config=triggered(2, keys=10))
    for first in range(0, 10, 2):
        instance.write([first, first + 1])
    assert code_of(instance.call("StartWriteCache", block_keys=[100])) == (
        "REACH_MAX_ENTITY_CAPACITY"
    )
    update(wire, name, 1, cache_config=triggered(0.5, keys=10))
    began = time.monotonic()
    eventually_sync(
        lambda: code_of(instance.call("StartWriteCache", block_keys=[100])) == "OK", timeout=20
    )
    # Two seconds are promised; the rest is for a busy machine.
    assert time.monotonic() - began < 8


def test_a_refused_write_succeeds_soon_after_the_bytes_trigger_is_lowered(wire, fresh_id):
    name = fresh_id()
    instance = limited(wire, name, quota={"capacity": 15_000}, cache_config=triggered(2))
    for first in range(0, 10, 2):
        instance.write([first, first + 1])
    assert code_of(instance.call("StartWriteCache", block_keys=[100])) == (
        "REACH_MAX_ENTITY_CAPACITY"
    )
    update(wire, name, 1, quota={"capacity": 15_000}, cache_config=triggered(0.5))
    eventually_sync(
        lambda: code_of(instance.call("StartWriteCache", block_keys=[100])) == "OK", timeout=20
    )


def test_a_trigger_above_1_never_fires_and_open_blocks_are_never_reclaimed(wire, fresh_id):
    name = fresh_id()
    instance = limited(wire, name, cache_config=triggered(1.5, keys=4))
    instance.write([1, 2])
    started = instance.start([3, 4])
    other = limited(wire, fresh_id(), cache_config=triggered(0.01, keys=4))
    other.write([1, 2])
    open_ = other.start([3, 4])
    # The second group's reclaiming shows that a round has passed.
    eventually_sync(lambda: other.statuses([1, 2]) == ["NOT_FOUND"] * 2, timeout=20)
    assert instance.statuses([1, 2]) == ["SERVING"] * 2
    assert other.statuses([3, 4]) == ["WRITING"] * 2
    succeeded(other.finish(open_["write_session_id"], {"offset": 2}))
    succeeded(instance.finish(started["write_session_id"], {"offset": 2}))


# -- metrics ----------------------------------------------------------------------------


def test_metrics_have_calls_and_times_by_rpc_name(wire: Wire):
    def of(api: str) -> dict[str, Any]:
        answer = wire.admin_ok("GetMetrics")
        assert abs(int(answer["timestamp"]) - time.time() * 1000) < 60_000
        assert answer["extra_data"] == ""
        return {
            metric["metric_name"]: metric["metric_value"]
            for metric in answer["metrics"]
            if {"tag_key": "api_name", "tag_value": api} in metric["metric_tags"]
        }

    wire.admin("AddStorage")
    before = of("AddStorage")
    assert set(before) == {"service.query_counter", "service.query_rt_us"}
    assert set(before["service.query_rt_us"]) == {"float_value"}
    assert before["service.query_rt_us"]["float_value"] > 0
    wire.admin("AddStorage")
    after = of("AddStorage")
    grown = int(after["service.query_counter"]["int_value"]) - int(
        before["service.query_counter"]["int_value"]
    )
    assert grown == 1
    wire.call("GetCacheLocation")
    assert "service.query_counter" in of("GetCacheLocation")
