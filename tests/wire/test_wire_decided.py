"""What is decided where the protocol is silent (wire.md §9), as far as no test elsewhere has it."""

from __future__ import annotations

import json
import math
import time
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
    registration,
    succeeded,
    uris,
)

from kvcm.testing.eventually import eventually_sync

Json = dict[str, Any]


def grouped(wire: Wire, name: str, **group: Any) -> Instance:
    """An instance in a group of its own, both called ``name``."""
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, **group))
    succeeded(wire.call("RegisterInstance", registration(name, instance_group=name)))
    return Instance(wire, name)


def file_storage(wire: Wire, server: Server, name: str, **spec: Any) -> None:
    nfs = {"root_path": f"{server.folder}/{name}", "key_count_per_file": 8, **spec}
    wire.admin_ok("AddStorage", storage={"global_unique_name": name, "nfs": nfs})


# -- RemoveCache and TrimCache ----------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (None, []),
        ({}, []),
        ({"bool_masks": {}}, []),
        ({"offset": 0}, []),
        ({"offset": 2}, [1, 2]),
        ({"offset": 99}, [1, 2, 3]),
        ({"bool_masks": {"values": [False, True, False]}}, [2]),
        ({"bool_masks": {"values": [True]}}, [1]),
        ({"bool_masks": {"values": [True] * 9}}, [1, 2, 3]),
    ],
)
def test_remove_cache_keeps_masked_keys(instance: Instance, mask, kept):
    instance.write([1, 2, 3])
    fields = {} if mask is None else {"block_mask": mask}
    instance.ok("RemoveCache", block_keys=[1, 2, 3, 99], **fields)
    found = instance.batch([1, 2, 3])
    assert [k for k, e in zip([1, 2, 3], found, strict=True) if e["type"] == "ST_NFS"] == kept


def test_admin_remove_cache_is_the_same(instance: Instance):
    instance.write([1, 2])
    instance.wire.admin_ok(
        "RemoveCache", instance_id=instance.id, block_keys=[1, 2], block_mask={"offset": 1}
    )
    assert instance.statuses([1, 2]) == ["SERVING", "NOT_FOUND"]


def test_removed_keys_can_be_written_again_at_once(instance: Instance):
    first = instance.write([1])
    instance.ok("RemoveCache", block_keys=[1])
    second = instance.write([1])
    assert uris(first[0])["tp0"] != uris(second[0])["tp0"]
    assert instance.prefix([1]) == second


def test_remove_cache_cancels_the_named_blocks_of_a_write_in_flight(instance: Instance):
    started = instance.start([1, 2, 3])
    instance.ok("RemoveCache", block_keys=[2])
    succeeded(instance.finish(started["write_session_id"], {"offset": 3}))
    assert instance.statuses([1, 2, 3]) == ["SERVING", "NOT_FOUND", "SERVING"]
    assert len(instance.start([2])["locations"]) == 1


@pytest.mark.parametrize("strategy", ["TS_REMOVE_ALL_CACHE", "TS_REMOVE_ALL_META"])
def test_trim_all_ends_everything_granted_before(instance: Instance, strategy):
    instance.write([1, 2])
    started = instance.start([3])
    instance.ok("TrimCache", strategy=strategy)
    assert instance.prefix([1, 2]) == []
    assert instance.statuses([1, 2]) == ["NOT_FOUND", "NOT_FOUND"]
    succeeded(instance.finish(started["write_session_id"], {"offset": 1}))
    succeeded(instance.finish(started["write_session_id"], {"offset": 1}))
    assert instance.statuses([3]) == ["NOT_FOUND"]
    again = instance.write([1, 2, 3])
    assert len(again) == 3
    assert instance.prefix([1, 2, 3]) == again


def test_trim_leaves_other_instances_alone(register):
    ours, theirs = register(), register()
    for instance in (ours, theirs):
        instance.write([1])
    ours.ok("TrimCache", strategy="TS_REMOVE_ALL_CACHE")
    assert theirs.statuses([1]) == ["SERVING"]
    assert ours.statuses([1]) == ["NOT_FOUND"]


def test_trim_by_time_takes_what_was_finished_in_the_half_open_range(instance: Instance):
    instance.write([1])
    (meta,) = instance.ok("GetCacheMeta", block_keys=[1], detail_level=1)["metas"]
    finished = json.loads(meta)["finish_time_ms"] // 1000

    def trim(begin: int, end: int) -> None:
        instance.ok("TrimCache", strategy="TS_TIMESTAMP", begin_timestamp=begin, end_timestamp=end)

    started = instance.start([2])
    trim(0, finished)
    trim(finished + 1, 2147483647)
    assert instance.statuses([1]) == ["SERVING"]
    trim(finished, finished + 1)
    # What is still being written has no finish time.
    assert instance.statuses([1, 2]) == ["NOT_FOUND", "WRITING"]
    succeeded(instance.finish(started["write_session_id"], {"offset": 1}))
    assert instance.statuses([2]) == ["SERVING"]


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "TS_TIMESTAMP", "begin_timestamp": 5, "end_timestamp": 5},
        {"strategy": "TS_TIMESTAMP", "begin_timestamp": 6, "end_timestamp": 5},
        {"strategy": "TS_TIMESTAMP"},
        {"strategy": "TS_UNSPECIFIED"},
        {"strategy": 17},
        {},
    ],
)
def test_wrong_trims_are_refused_and_trim_nothing(instance: Instance, fields):
    instance.write([1])
    answer = instance.call("TrimCache", fields)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert instance.statuses([1]) == ["SERVING"]


# -- instances --------------------------------------------------------------------------


def test_a_removed_instance_registered_again_sees_nothing_of_the_old_one(register):
    old = register()
    locations = old.write([1, 2])
    session = old.start([3])["write_session_id"]
    old.wire.admin_ok("RemoveInstance", instance_id=old.id)
    new = register(instance_id=old.id, block_size=16)
    assert new.prefix([1, 2]) == []
    assert new.statuses([1, 2, 3]) == ["NOT_FOUND"] * 3
    assert code_of(new.finish(session, {"offset": 1})) == "INVALID_ARGUMENT"
    again = new.write([1, 2])
    old_files = {uri.partition("?")[0] for entry in locations for uri in uris(entry).values()}
    new_files = {uri.partition("?")[0] for entry in again for uri in uris(entry).values()}
    assert not old_files & new_files


def test_an_instance_can_be_registered_before_any_candidate_exists(wire, server, fresh_id):
    name = fresh_id()
    wire.admin_ok(
        "CreateInstanceGroup", instance_group=group_document(name, storage_candidates=[name])
    )
    answer = wire.ok("RegisterInstance", registration(name, instance_group=name))
    assert answer["storage_configs"] == "[]"
    instance = Instance(wire, name)
    assert code_of(instance.call("StartWriteCache", block_keys=[1])) == "REACH_MAX_ENTITY_CAPACITY"
    file_storage(wire, server, name)
    answer = wire.ok("RegisterInstance", registration(name, instance_group=name))
    assert [c["global_unique_name"] for c in json.loads(answer["storage_configs"])] == [name]
    assert len(instance.write([1])) == 1


def test_max_instance_count_0_is_unlimited(wire: Wire, fresh_id):
    name = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, max_instance_count=0))
    for _ in range(3):
        wire.ok("RegisterInstance", registration(fresh_id(), instance_group=name))
    limited = fresh_id()
    wire.admin_ok(
        "CreateInstanceGroup", instance_group=group_document(limited, max_instance_count=1)
    )
    first = registration(fresh_id(), instance_group=limited)
    wire.ok("RegisterInstance", first)
    answer = wire.call("RegisterInstance", registration(fresh_id(), instance_group=limited))
    assert code_of(answer) == "REACH_MAX_ENTITY_CAPACITY"
    assert "max_instance_count" in message_of(answer)
    # The one that is there may register again.
    wire.ok("RegisterInstance", first)


# -- storages ---------------------------------------------------------------------------


def test_a_storage_with_blocks_is_removed_by_force_only(wire, server, fresh_id):
    name = fresh_id()
    file_storage(wire, server, name)
    instance = grouped(wire, name, storage_candidates=[name])
    instance.write([1, 2])
    instance.start([3])
    answer = wire.admin("RemoveStorage", storage_unique_name=name)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "3 blocks" in message_of(answer)
    assert len(instance.prefix([1, 2])) == 2
    wire.admin_ok("RemoveStorage", storage_unique_name=name, force=True)
    assert instance.prefix([1, 2]) == []
    listed = wire.admin_ok("ListStorage")["storage"]
    assert name not in [storage["global_unique_name"] for storage in listed]


def test_an_empty_storage_is_removed_without_force(wire, server, fresh_id):
    name = fresh_id()
    file_storage(wire, server, name)
    wire.admin_ok("RemoveStorage", storage_unique_name=name)
    assert code_of(wire.admin("RemoveStorage", storage_unique_name=name)) == "INVALID_ARGUMENT"


def test_a_storage_with_blocks_changes_its_path_by_force_only(wire, server, fresh_id):
    name = fresh_id()
    file_storage(wire, server, name)
    instance = grouped(wire, name, storage_candidates=[name])
    before = instance.write([1])
    moved = {"global_unique_name": name, "nfs": {"root_path": f"{server.folder}/{name}-moved"}}
    answer = wire.admin("UpdateStorage", storage=moved)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "1 blocks" in message_of(answer)
    assert "force_update" in message_of(answer)
    assert instance.prefix([1]) == before
    wire.admin_ok("UpdateStorage", storage=moved, force_update=True)
    assert instance.prefix([1]) == []
    (after,) = instance.write([1])
    assert f"/{name}-moved/" in uris(after)["tp0"]


def test_a_change_that_moves_no_block_needs_no_force(wire, server, fresh_id):
    name = fresh_id()
    file_storage(wire, server, name)
    instance = grouped(wire, name, storage_candidates=[name])
    before = instance.write([1])
    nfs = {"root_path": f"{server.folder}/{name}", "key_count_per_file": 2}
    wire.admin_ok("UpdateStorage", storage={"global_unique_name": name, "nfs": nfs})
    assert instance.prefix([1]) == before


def test_a_prefix_ends_where_the_storage_changes_unless_the_client_can_take_it(
    wire, server, fresh_id
):
    name = fresh_id()
    for storage in (f"a-{name}", f"b-{name}"):
        file_storage(wire, server, storage)
    instance = grouped(wire, name, storage_candidates=[f"a-{name}"])
    first = instance.write([1, 2])
    wire.admin_ok(
        "UpdateInstanceGroup",
        instance_group=group_document(name, storage_candidates=[f"b-{name}"], version=2),
        current_version=1,
    )
    second = instance.write([3, 4])
    assert f"b-{name}" in uris(second[0])["tp0"]
    assert instance.prefix([1, 2, 3, 4]) == first
    assert instance.prefix([1, 2, 3, 4], features=1) == first + second
    assert instance.prefix([1, 2, 3, 4], features=2) == first
    assert instance.batch([1, 2, 3, 4]) == first + second
    assert instance.prefix([1, 2, 3, 4], block_mask={"offset": 2}) == second


def test_a_disabled_storage_hides_its_blocks_and_gives_them_back(wire, server, fresh_id):
    name = fresh_id()
    file_storage(wire, server, name)
    instance = grouped(wire, name, storage_candidates=[name])
    locations = instance.write([1])
    wire.admin_ok("DisableStorage", storage_unique_name=name)
    assert instance.prefix([1]) == []
    assert instance.batch([1])[0]["type"] == "ST_UNSPECIFIED"
    assert code_of(instance.call("StartWriteCache", block_keys=[2])) == "REACH_MAX_ENTITY_CAPACITY"
    wire.admin_ok("EnableStorage", storage_unique_name=name)
    assert instance.prefix([1]) == locations


# -- groups -----------------------------------------------------------------------------


def test_a_group_with_instances_is_removed_by_force_only(wire: Wire, fresh_id):
    name = fresh_id()
    instance = grouped(wire, name)
    instance.write([1])
    answer = wire.admin("RemoveInstanceGroup", name=name)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert name in message_of(answer)
    assert instance.statuses([1]) == ["SERVING"]
    wire.admin_ok("RemoveInstanceGroup", name=name, force=True)
    assert code_of(instance.call("GetInstanceInfo")) == "INSTANCE_NOT_EXIST"
    assert code_of(wire.admin("GetInstanceGroup", name=name)) == "INVALID_ARGUMENT"


def test_a_type_without_a_quota_entry_is_bound_by_the_group_only(wire: Wire, fresh_id):
    quota = {"capacity": 3000, "quota_config": [{"storage_type": "ST_3FS", "capacity": 0}]}
    instance = grouped(wire, fresh_id(), quota=quota)
    started = instance.start([1, 2, 3])
    assert len(started["locations"]) == 2


def test_a_type_with_a_quota_of_0_takes_nothing(wire: Wire, fresh_id):
    quota = {"capacity": 3000, "quota_config": [{"storage_type": "ST_NFS", "capacity": 0}]}
    instance = grouped(wire, fresh_id(), quota=quota)
    assert code_of(instance.call("StartWriteCache", block_keys=[1])) == "REACH_MAX_ENTITY_CAPACITY"


def reclaim(share: Any = 0.8, size: Any = 0) -> Json:
    trigger = {"used_percentage": share, "used_size": size}
    return {"cache_config": {"reclaim_strategy": {"trigger_strategy": trigger}}}


NUMBERS = [
    (reclaim(-0.1), "used_percentage"),
    (reclaim(size=-1), "used_size"),
    ({"quota": {"capacity": -1}}, "capacity"),
    ({"quota": {"quota_config": [{"storage_type": 4, "capacity": -1}]}}, "capacity"),
    ({"max_instance_count": -1}, "max_instance_count"),
    ({"cache_config": {"meta_indexer_config": {"max_key_count": -1}}}, "max_key_count"),
]


@pytest.mark.parametrize(("changes", "field"), NUMBERS, ids=range(len(NUMBERS)))
def test_negative_numbers_are_refused_naming_the_field(wire, fresh_id, changes, field):
    name = fresh_id()
    answer = wire.admin("CreateInstanceGroup", instance_group=group_document(name, **changes))
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert field in message_of(answer)
    assert code_of(wire.admin("GetInstanceGroup", name=name)) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("share", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(wire: Wire, fresh_id, share):
    """They have no JSON form: over HTTP the word is a value of a wrong type."""
    group = group_document(fresh_id(), **reclaim(share))
    if wire.transport == "http":
        body = json.dumps({"instance_group": group})
        for text in (body, body.replace(f'"{share}"', share)):
            response = wire.server.post_raw("createInstanceGroup", text, admin=True)
            assert response.status_code == 400
        return
    answer = wire.admin("CreateInstanceGroup", instance_group=group)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "used_percentage" in message_of(answer)


@pytest.mark.parametrize("share", [0, 0.5, 1, 1.01, 2, 1e308])
def test_a_used_percentage_from_0_up_is_legal(wire: Wire, fresh_id, share):
    name = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, **reclaim(share)))
    stored = wire.admin_ok("GetInstanceGroup", name=name)["instance_group"]
    trigger = stored["cache_config"]["reclaim_strategy"]["trigger_strategy"]
    assert math.isclose(trigger["used_percentage"], share)


def test_a_quota_below_usage_is_accepted_drains_and_refuses_writes_meanwhile(wire, fresh_id):
    name = fresh_id()
    instance = grouped(wire, name, quota={"capacity": 30_000}, **reclaim(1))
    for key in range(0, 20, 2):
        instance.write([key, key + 1])
    wire.admin_ok(
        "UpdateInstanceGroup",
        instance_group=group_document(name, quota={"capacity": 15_000}, version=2, **reclaim(1)),
        current_version=1,
    )

    def usage() -> int:
        instances = wire.server.http.get(wire.server.url("/v1/usage", admin=True)).json()
        counted: int = instances["groups"][name]["counted_bytes"]
        return counted

    eventually_sync(lambda: usage() <= 15_000, timeout=20)
    assert instance.prefix([0]) == []


def test_settings_of_index_and_cache_are_kept_and_shown(wire: Wire, fresh_id):
    name = fresh_id()
    indexer = {
        "max_key_count": "7",
        "mutex_shard_num": "8",
        "batch_key_size": "9",
        "meta_storage_backend_config": {"storage_type": "redis", "storage_uri": "redis://x:1"},
        "meta_cache_policy_config": {
            "capacity": "5",
            "type": "LRU",
            "cache_shard_bits": 3,
            "high_pri_pool_ratio": 0.25,
        },
    }
    group = group_document(name, cache_config={"meta_indexer_config": indexer})
    wire.admin_ok("CreateInstanceGroup", instance_group=group)
    stored = wire.admin_ok("GetInstanceGroup", name=name)["instance_group"]
    assert stored["cache_config"]["meta_indexer_config"] == indexer


def test_candidates_that_name_no_storage_are_accepted(wire: Wire, fresh_id):
    name = fresh_id()
    group = group_document(name, storage_candidates=["nobody", "nfs_01"])
    wire.admin_ok("CreateInstanceGroup", instance_group=group)
    stored = wire.admin_ok("GetInstanceGroup", name=name)["instance_group"]
    assert stored["storage_candidates"] == ["nobody", "nfs_01"]
    assert f"instance group {name!r}: unknown storage candidates nobody" in wire.server.log


# -- snapshots --------------------------------------------------------------------------


def test_a_snapshot_that_would_drop_an_instance_with_blocks_is_refused(instance: Instance):
    wire = instance.wire
    instance.write([1])
    snapshot = json.loads(wire.admin_ok("GenConfigSnapshot")["config_snapshot"])
    snapshot["instances"] = [i for i in snapshot["instances"] if i["instance_id"] != instance.id]
    answer = wire.admin("LoadConfigSnapshot", config_snapshot=json.dumps(snapshot))
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert instance.statuses([1]) == ["SERVING"]


# -- limits of replies ------------------------------------------------------------------


def test_bytes_are_deleted_only_after_the_grace(instance: Instance):
    """10 s by default: a reader that was told an address can still read it for a while."""
    started = instance.start([1])
    path = Path("/" + uris(started["locations"][0])["tp0"].split("://")[1].split("/", 1)[1])
    path = Path(str(path).partition("?")[0])
    eventually_sync(path.parent.is_dir)
    path.write_bytes(bytes(1000))
    succeeded(instance.finish(started["write_session_id"], {"offset": 1}))
    removed = time.monotonic()
    instance.ok("RemoveCache", block_keys=[1])
    while time.monotonic() < removed + 1:
        assert instance.statuses([1]) == ["NOT_FOUND"]
        assert path.exists()
