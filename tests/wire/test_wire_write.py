"""StartWriteCache (wire.md §5)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from wire_harness import (
    Instance,
    Wire,
    code_of,
    group_document,
    message_of,
    reason_of,
    registration,
    succeeded,
    uris,
)

Json = dict[str, Any]
SESSION_ID = re.compile(r"[a-z0-9]{32}\Z")


def bools(*values: bool) -> Json:
    return {"bool_masks": {"values": list(values)}}


T, F = True, False


def test_the_table_of_the_page(instance: Instance):
    """One after the other: each row meets what the rows before it have left."""
    rows = [
        ([1, 2, 3, 4], {"offset": 0}, 4),
        ([1, 2, 3, 4], {"offset": 4}, 0),
        ([1, 2, 3, 4, 5, 6], {"offset": 4}, 2),
        ([5, 6, 7, 8], {"offset": 2}, 2),
        ([5, 55, 66, 6], bools(T, F, F, T), 2),
    ]
    for keys, mask, granted in rows:
        started = instance.start(keys)
        assert started["block_mask"] == mask, keys
        assert len(started["locations"]) == granted, keys


MASKS = [
    ([1, 2], [], {"offset": 0}),
    ([1, 2], [1], {"offset": 1}),
    ([1, 2], [1, 2], {"offset": 2}),
    ([1, 2], [2], bools(F, T)),
    ([1, 2, 3], [2], bools(F, T, F)),
    ([1, 2, 3], [1, 3], bools(T, F, T)),
    ([1, 2, 3], [1, 2], {"offset": 2}),
    ([1, 2, 3], [2, 3], bools(F, T, T)),
    # A key twice is granted once; the second is masked as existing.
    ([1, 1], [], bools(F, T)),
    ([1, 2, 1, 3, 3], [], bools(F, F, T, F, T)),
    ([1, 1], [1], {"offset": 2}),
    ([2, 1, 1], [2], bools(T, F, T)),
]


@pytest.mark.parametrize(("keys", "existing", "mask"), MASKS)
@pytest.mark.parametrize("state", ["serving", "open"])
def test_masked_is_what_need_not_be_written(instance: Instance, keys, existing, mask, state):
    if existing:
        started = instance.start(existing)
        if state == "serving":
            instance.finish(started["write_session_id"], {"offset": len(existing)})
    started = instance.start(keys)
    assert started["block_mask"] == mask
    assert SESSION_ID.match(started["write_session_id"])
    unmasked = dict.fromkeys(k for k in keys if k not in existing)
    assert len(started["locations"]) == len(unmasked)


def test_location_j_is_the_j_th_unmasked_key(instance: Instance):
    instance.write([20, 40])
    started = instance.start([10, 20, 30, 40, 50, 10])
    assert started["block_mask"] == bools(F, T, F, T, F, T)
    succeeded(instance.finish(started["write_session_id"], bools(T, T, T)))
    assert instance.batch([10, 30, 50]) == started["locations"]


@pytest.mark.parametrize("form", ["grpc", "http"])
def test_locations_equal_those_of_a_lookup_field_for_field(instance: Instance, form):
    """Whichever transport looks up, and whatever it compares."""
    started = instance.start(range(20))
    succeeded(instance.finish(started["write_session_id"], {"offset": 20}))
    reader = Instance(Wire(instance.wire.server, form), instance.id)
    assert reader.prefix(range(20)) == started["locations"]
    assert reader.batch(range(20)) == started["locations"]
    first = started["locations"][0]
    assert first["type"] == "ST_NFS"
    assert first["spec_size"] == 2
    assert [spec["name"] for spec in first["location_specs"]] == ["tp0", "tp1"]


def test_locations_of_different_keys_never_share_an_address(instance: Instance):
    seen: set[str] = set()
    for keys in ([1, 2, 3], range(10, 40), [7]):
        for location in instance.start(keys)["locations"]:
            for uri in uris(location).values():
                assert uri not in seen
                seen.add(uri)


def test_a_session_that_grants_nothing_is_a_session_all_the_same(instance: Instance):
    instance.write([1, 2])
    started = instance.start([1, 2])
    assert started["block_mask"] == {"offset": 2}
    assert started["locations"] == []
    assert SESSION_ID.match(started["write_session_id"])
    again = instance.start([1, 2])
    assert again["write_session_id"] != started["write_session_id"]


def test_session_ids_never_repeat(instance: Instance):
    ids = [instance.start([key])["write_session_id"] for key in (1, 2, 3, 3, 3)]
    assert all(SESSION_ID.match(id_) for id_ in ids)
    assert len(set(ids)) == len(ids)


# -- spec groups ------------------------------------------------------------------------


@pytest.fixture
def grouped(register) -> Instance:
    """Specs k0, k1, v0 of 10, 20, 40 bytes; groups k (k0, k1), v (v0), all."""
    return register(
        location_spec_infos=[
            {"name": "k0", "size": 10},
            {"name": "k1", "size": 20},
            {"name": "v0", "size": 40},
        ],
        location_spec_groups=[
            {"name": "v", "spec_names": ["v0"]},
            {"name": "k", "spec_names": ["k1", "k0"]},
            {"name": "all", "spec_names": ["k0", "k1", "v0"]},
        ],
    )


def test_only_the_specs_of_each_keys_group_are_allocated(grouped: Instance):
    names = ["k", "v", "all", "k"]
    locations = grouped.write([1, 2, 3, 4], location_spec_group_names=names)
    assert [list(uris(location)) for location in locations] == [
        ["k0", "k1"],
        ["v0"],
        ["k0", "k1", "v0"],
        ["k0", "k1"],
    ]
    assert [location["spec_size"] for location in locations] == [2, 1, 3, 2]
    assert grouped.batch([1, 2, 3, 4]) == locations


def test_one_group_for_all_keys(grouped: Instance):
    locations = grouped.write([1, 2], location_spec_group_names=["k", "k"])
    assert [location["spec_size"] for location in locations] == [2, 2]


def test_sizes_in_the_addresses_are_those_of_the_specs(grouped: Instance):
    (location,) = grouped.write([1])
    sizes = {name: uri.rpartition("size=")[2] for name, uri in uris(location).items()}
    assert sizes == {"k0": "10", "k1": "20", "v0": "40"}


@pytest.mark.parametrize(
    "names",
    [["k"], ["k", "k", "k"], ["k", "nobody"], ["", "k"], ["k0", "k1"]],
    ids=lambda names: "-".join(names) or "empty",
)
def test_a_wrong_count_or_an_unknown_group_is_refused_and_nothing_is_granted(grouped, names):
    answer = grouped.call("StartWriteCache", block_keys=[1, 2], location_spec_group_names=names)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "location_spec_group_names" in message_of(answer)
    assert answer["locations"] == []
    assert answer["write_session_id"] == ""
    assert grouped.start([1, 2])["block_mask"] == {"offset": 0}


def test_group_names_count_the_keys_made_of_tokens(register):
    instance = register(block_size=2, location_spec_groups=[{"name": "g", "spec_names": ["tp1"]}])
    started = instance.ok(
        "StartWriteCache", token_ids=[1, 2, 3, 4, 5], location_spec_group_names=["g", "g"]
    )
    assert [location["spec_size"] for location in started["locations"]] == [1, 1]


def test_a_key_counts_as_existing_only_when_one_location_has_every_spec_asked_for(grouped):
    grouped.write([1, 2], location_spec_group_names=["k", "all"])
    start = grouped.start([1, 2], location_spec_group_names=["v", "v"])
    assert start["block_mask"] == bools(F, T)
    again = grouped.start([1, 2], location_spec_group_names=["all", "all"])
    # k and v of key 1 lie in two locations; "all" needs one that has both.
    assert again["block_mask"] == bools(F, T)
    assert again["locations"][0]["spec_size"] == 3
    assert grouped.start([1], location_spec_group_names=["k"])["block_mask"] == {"offset": 1}


# -- limits -----------------------------------------------------------------------------


def limited(wire: Wire, fresh_id: Any, **group: Any) -> Instance:
    """An instance in a group of its own."""
    name = fresh_id()
    wire.admin_ok("CreateInstanceGroup", instance_group=group_document(name, **group))
    succeeded(wire.call("RegisterInstance", registration(name, instance_group=name)))
    return Instance(wire, name)


def by_key_count(count: int) -> Json:
    return {"cache_config": {"meta_indexer_config": {"max_key_count": count}}}


LIMITS = [
    # A block has 1,500 bytes; each of these lets four through.
    ({"quota": {"capacity": 7499}}, "QUOTA_GROUP"),
    (
        {
            "quota": {
                "capacity": 1 << 40,
                "quota_config": [{"storage_type": "ST_NFS", "capacity": 6000}],
            }
        },
        "QUOTA_TYPE",
    ),
    (by_key_count(4), "MAX_KEY_COUNT"),
]


@pytest.mark.parametrize(("group", "reason"), LIMITS, ids=[r for _, r in LIMITS])
def test_a_limit_grants_a_leading_part_and_says_why(wire, fresh_id, group, reason):
    instance = limited(wire, fresh_id, **group)
    started = instance.start(range(6))
    assert started["block_mask"] == bools(F, F, F, F, T, T)
    assert len(started["locations"]) == 4
    assert reason_of(started) == reason
    succeeded(instance.finish(started["write_session_id"], bools(T, T, T, T)))
    assert instance.prefix(range(6)) == started["locations"]


@pytest.mark.parametrize(("group", "reason"), LIMITS, ids=[r for _, r in LIMITS])
def test_nothing_granted_because_of_a_limit_is_an_error(wire, fresh_id, group, reason):
    instance = limited(wire, fresh_id, **group)
    instance.write(range(4))
    answer = instance.call("StartWriteCache", block_keys=[50, 51])
    assert code_of(answer) == "REACH_MAX_ENTITY_CAPACITY"
    assert reason_of(answer) == reason
    assert answer["locations"] == []
    assert answer["write_session_id"] == ""
    # What exists needs no room.
    assert instance.start(range(4))["block_mask"] == {"offset": 4}


def test_open_blocks_count_and_freed_ones_do_not(wire, fresh_id):
    instance = limited(wire, fresh_id, **by_key_count(2))
    started = instance.start([1, 2])
    assert code_of(instance.call("StartWriteCache", block_keys=[3])) != "OK"
    succeeded(instance.finish(started["write_session_id"], bools(F, T)))
    assert instance.start([3, 4])["block_mask"] == bools(F, T)


def test_max_key_count_is_per_instance(wire, fresh_id):
    first = limited(wire, fresh_id, **by_key_count(1))
    second_id = fresh_id()
    succeeded(wire.call("RegisterInstance", registration(second_id, instance_group=first.id)))
    second = Instance(wire, second_id)
    first.write([1])
    second.write([1])
    for instance in (first, second):
        assert code_of(instance.call("StartWriteCache", block_keys=[2])) == (
            "REACH_MAX_ENTITY_CAPACITY"
        )


def test_existing_keys_in_front_of_a_refused_one_stay_masked(wire, fresh_id):
    instance = limited(wire, fresh_id, **by_key_count(3))
    instance.write([1, 2])
    started = instance.start([1, 2, 3, 4])
    assert started["block_mask"] == bools(T, T, F, T)
    assert reason_of(started) == "MAX_KEY_COUNT"


@pytest.mark.parametrize("candidates", [[], ["nobody"]], ids=["none", "unknown"])
def test_without_a_storage_the_reason_is_no_storage(wire, fresh_id, candidates):
    instance = limited(wire, fresh_id, storage_candidates=candidates)
    answer = instance.call("StartWriteCache", block_keys=[1])
    assert code_of(answer) == "REACH_MAX_ENTITY_CAPACITY"
    assert reason_of(answer) == "NO_STORAGE"
    assert instance.batch([1])[0]["type"] == "ST_UNSPECIFIED"


def test_features_are_accepted(instance: Instance):
    """Bit 0 of field 100: the client can handle answers that span several storages."""
    started = instance.start([1, 2], features=1)
    succeeded(instance.finish(started["write_session_id"], {"offset": 2}))
    assert instance.prefix([1, 2], features=1) == started["locations"]
    assert instance.prefix([1, 2], features=4294967295) == started["locations"]


def test_what_admission_refuses_is_masked_and_no_error(wire, fresh_id):
    """Four blocks fit below the mark; those there were asked for again and again, the new ones
    once."""
    instance = limited(
        wire,
        fresh_id,
        quota={"capacity": 9000},
        cache_config={
            "reclaim_strategy": {
                "trigger_strategy": {"used_percentage": 0.67},
                "admission": "ADMISSION_TINYLFU",
            }
        },
    )
    instance.write([1, 2])
    instance.write([3, 4])
    for _ in range(20):
        assert len(instance.prefix([1, 2])) == len(instance.prefix([3, 4])) == 2
    started = succeeded(instance.call("StartWriteCache", block_keys=[1, 2, 5, 6]))
    assert (started["block_mask"], started["locations"]) == ({"offset": 4}, [])
    assert reason_of(started) == "ADMISSION"
    succeeded(instance.finish(started["write_session_id"], bools()))
    assert len(instance.prefix([1, 2, 5, 6])) == 2
