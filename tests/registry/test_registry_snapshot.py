from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from registry_samples import NewUrl, OpenRegistry, group, instance, storage

from kvcm.core.errors import InvalidArgument
from kvcm.core.types import AccountRole
from kvcm.registry.registry import Registry
from kvcm.testing.clock import SimClock


@pytest.fixture
async def filled(registry: Registry) -> Registry:
    await registry.create_group(group("other", max_instance_count=3, tier="gold"))
    for name in ("model-a", "../x", "a\nb"):
        stored = await registry.register_instance(instance(name))
        await registry.raise_trim(stored.uid)
    await registry.add_account("ann", "pw", AccountRole.ADMIN)
    return registry


async def document(registry: Registry) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(await registry.export_snapshot())
    return loaded


async def test_a_snapshot_round_trips_the_whole_registry(filled: Registry) -> None:
    text, before = await filled.export_snapshot(), filled.view
    await filled.load_snapshot(text)
    assert await filled.export_snapshot() == text
    await filled.remove_storage("nfs_01")
    await filled.put_storage(storage("nfs_02"), expect_new=True)
    await filled.update_group(group(version=5, user_data="x"), current_version=1)
    await filled.create_group(group("late"))
    await filled.delete_account("ann")
    await filled.load_snapshot(text)
    assert await filled.export_snapshot() == text
    assert filled.view.instances == before.instances
    assert not filled.view.closing
    assert await filled.verify_password("ann", "pw")


async def test_a_snapshot_moves_to_another_registry(
    filled: Registry, open_registry: OpenRegistry, new_url: NewUrl
) -> None:
    text = await filled.export_snapshot()
    other = await open_registry(new_url(), clock=SimClock(seed=5))
    uid = other.view.cluster_uid
    await other.load_snapshot(text)
    assert other.view.instances == filled.view.instances
    assert other.view.groups == filled.view.groups
    assert other.view.cluster_uid == uid != filled.view.cluster_uid
    fresh = await other.register_instance(instance("new"))
    assert fresh.uid not in {i.uid for i in filled.view.instances.values()}
    assert not await other.bootstrap([], [group("default")])


async def test_uids_with_scattered_numbers_are_kept(
    filled: Registry, open_registry: OpenRegistry, new_url: NewUrl
) -> None:
    doc = await document(filled)
    for item, number in zip(doc["instances"], (9, 4, 7), strict=True):
        item["uid"] = f"00000{number}abcd"
    other = await open_registry(new_url())
    await other.load_snapshot(json.dumps(doc))
    assert {i.uid[5] for i in other.view.instances.values()} == {"9", "4", "7"}
    assert (await other.register_instance(instance("new"))).uid.startswith("00000a")


async def test_an_instance_with_blocks_is_never_dropped(filled: Registry) -> None:
    empty = await filled.export_snapshot()
    kept = await filled.register_instance(instance("kept"))
    other = await filled.register_instance(instance("idle"))
    revision = filled.view.revision
    with pytest.raises(InvalidArgument, match=r"would drop .*: 'kept'$"):
        await filled.load_snapshot(empty, {kept.uid})
    assert filled.view.revision == revision
    await filled.load_snapshot(empty, ())
    assert {i.uid for i in filled.view.closing} == {kept.uid, other.uid}


@pytest.mark.parametrize(
    "change",
    [{"uid": "hz00000000"}, {"uid": "000099abcd"}, {"block_size": 77}, {"shard_count": 32}],
)
async def test_a_changed_incarnation_counts_as_dropped(
    filled: Registry, change: dict[str, Any]
) -> None:
    before = filled.view.instances["model-a"]
    doc = await document(filled)
    next(i for i in doc["instances"] if i["instance_id"] == "model-a").update(change)
    with pytest.raises(InvalidArgument, match="'model-a'"):
        await filled.load_snapshot(json.dumps(doc), {before.uid})
    assert filled.view.instances["model-a"] == before
    await filled.load_snapshot(json.dumps(doc))
    after = filled.view.instances["model-a"]
    assert after.uid != before.uid
    assert [i.uid for i in filled.view.closing] == [before.uid]


async def test_a_removed_incarnation_never_comes_back(filled: Registry) -> None:
    text, old = await filled.export_snapshot(), filled.view.instances["model-a"]
    await filled.close_instance("model-a")
    await filled.load_snapshot(text)
    assert filled.view.instances["model-a"].uid != old.uid
    assert [i.uid for i in filled.view.closing] == [old.uid]
    await filled.close_instance("model-a")
    await filled.forget_instance(old.uid)
    await filled.load_snapshot(text)
    assert filled.view.instances["model-a"].uid != old.uid


async def test_a_trim_is_never_undone(filled: Registry) -> None:
    text, uid = await filled.export_snapshot(), filled.view.instances["model-a"].uid
    trim = await filled.raise_trim(uid)
    await filled.load_snapshot(text)
    assert filled.view.instances["model-a"].trim == trim


async def test_hashes_can_be_left_out_and_are_taken_from_here(
    filled: Registry, open_registry: OpenRegistry, new_url: NewUrl
) -> None:
    text = await filled.export_snapshot(with_hashes=False)
    assert "argon2" not in text
    await filled.load_snapshot(text)
    assert await filled.verify_password("ann", "pw")
    other = await open_registry(new_url())
    with pytest.raises(InvalidArgument, match="'ann' without password_hash"):
        await other.load_snapshot(text)
    assert not other.view.groups


async def test_the_secret_is_not_in_a_snapshot(filled: Registry) -> None:
    assert filled.view.secret.hex() not in await filled.export_snapshot()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


Edit = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda d: d.update(format=2), "config_snapshot.format is 2"),
        (lambda d: d.pop("format"), "config_snapshot.format"),
        (lambda d: d.update(extra=1), "config_snapshot.extra"),
        (lambda d: d.pop("storages"), "config_snapshot.storages"),
        (lambda d: d.update(instances={}), "config_snapshot.instances"),
        (lambda d: d["storages"].append(5), "config_snapshot.storages[1]"),
        (lambda d: d["storages"][0].pop("type"), "config_snapshot.storages[0].type"),
        (lambda d: d["storages"][0].update(type=77), "config_snapshot.storages[0].type"),
        (lambda d: d["storages"].append(d["storages"][0]), "storages has name 'nfs_01' twice"),
        (
            lambda d: d["instance_groups"][0].update(quota={"capacity": -1}),
            "config_snapshot.instance_groups[0].quota.capacity",
        ),
        (
            lambda d: d["instance_groups"][0].update(quota={"capacity": "much"}),
            "config_snapshot.instance_groups[0].quota.capacity",
        ),
        (lambda d: d["instance_groups"].pop(1), "instance_group 'team' is not in the snapshot"),
        (lambda d: d["instances"][1].update(block_size=0), "instances[1]: block_size"),
        (lambda d: d["instances"][0].update(uid="../../etc1"), "instances[0].uid"),
        (lambda d: d["instances"][0].update(uid=""), "instances[0].uid"),
        (lambda d: d["instances"][0].update(uid="zzzzzz0000"), "instances[0].uid"),
        (lambda d: d["instances"][0].update(uid=d["instances"][1]["uid"]), "has uid"),
        (lambda d: d["instances"][0].update(shard_count=17), "instances[0].shard_count"),
        (lambda d: d["instances"][0].update(trim=-1), "instances[0].trim"),
        (lambda d: d["instances"][0].update(closing=True), "instances[0].closing"),
        (lambda d: d["accounts"][0].update(role=9), "config_snapshot.accounts[0].role"),
        (lambda d: d["accounts"][0].update(password="x"), "config_snapshot.accounts[0].password"),
        (lambda d: d["accounts"][0].update(password_hash="x"), "accounts[0].password_hash"),
        (lambda d: d["accounts"].append(5), "config_snapshot.accounts[1]"),
        (lambda d: d["storages"][0]["spec"].update(x=nested(400)), "storages[0] is nested deeper"),
    ],
)
async def test_a_bad_snapshot_names_the_path_and_changes_nothing(
    filled: Registry, edit: Edit, named: str
) -> None:
    before = filled.view
    doc = await document(filled)
    edit(doc)
    with pytest.raises(InvalidArgument) as caught:
        await filled.load_snapshot(json.dumps(doc))
    assert named in str(caught.value)
    await filled.refresh()
    assert filled.view is before


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", '{"format":NaN}', '{"format":1,"format":1}', "[" * 100_000, "\ud800"],
)
async def test_what_is_no_document_is_refused(filled: Registry, text: str) -> None:
    with pytest.raises(InvalidArgument, match="config_snapshot"):
        await filled.load_snapshot(text)
