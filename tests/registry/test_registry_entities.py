from __future__ import annotations

import asyncio
import logging

import pytest
from registry_samples import OpenRegistry, group, instance, storage

from kvcm.core.errors import (
    ConfigError,
    DuplicateEntity,
    EntityNotExist,
    InvalidArgument,
    NotReady,
    VersionConflict,
)
from kvcm.core.types import (
    AccountRole,
    InstanceGroupQuota,
    QuotaConfig,
    StorageConfig,
    StorageType,
)
from kvcm.registry.compare import merge_unknown
from kvcm.registry.defaults import default_group, default_storage
from kvcm.registry.registry import Registry
from kvcm.registry.view import RegistryView
from kvcm.testing.clock import SimClock
from kvcm.testing.eventually import eventually


async def test_a_storage_of_a_known_name_is_a_duplicate(registry: Registry) -> None:
    for config in (storage(root="/other/"), storage()):
        with pytest.raises(DuplicateEntity, match="'nfs_01'"):
            await registry.put_storage(config, expect_new=True)
    assert registry.view.storages == {"nfs_01": storage()}


async def test_a_storage_is_disabled_enabled_updated_and_removed(
    registry: Registry, open_registry: OpenRegistry
) -> None:
    assert not (await registry.set_storage_enabled("nfs_01", False)).enabled
    updated = await registry.put_storage(storage(root="/new/"), expect_new=False)
    assert updated.spec["root_path"] == "/new/"
    assert not updated.enabled, "an update does not enable"
    assert (await open_registry()).view.storages == {"nfs_01": updated}
    assert (await registry.set_storage_enabled("nfs_01", True)).enabled
    assert (await registry.remove_storage("nfs_01")).global_unique_name == "nfs_01"
    assert registry.view.storages == {}
    await registry.put_storage(storage(), expect_new=True)


async def test_an_unknown_storage_is_named(registry: Registry) -> None:
    for call in (
        registry.set_storage_enabled("nope", True),
        registry.remove_storage("nope"),
        registry.put_storage(storage("nope"), expect_new=False),
    ):
        with pytest.raises(EntityNotExist, match="storage 'nope'"):
            await call


async def test_what_changes_nothing_publishes_nothing(registry: Registry) -> None:
    before = registry.view
    await registry.set_storage_enabled("nfs_01", True)
    await registry.put_storage(storage(), expect_new=False)
    assert registry.view is before


async def test_a_group_update_needs_the_stored_version_and_a_larger_one(
    registry: Registry,
) -> None:
    for current in (0, 2):
        with pytest.raises(VersionConflict, match="'team' is at version 1"):
            await registry.update_group(group(version=9), current_version=current)
    for version in (0, 1):
        with pytest.raises(InvalidArgument, match=r"instance_group\.version"):
            await registry.update_group(group(version=version), current_version=1)
    changed = group(version=9, user_data="x")
    assert await registry.update_group(changed, current_version=1) == changed
    assert registry.view.groups == {"team": changed}
    with pytest.raises(EntityNotExist, match="'nope'"):
        await registry.update_group(group("nope", version=2), current_version=1)
    with pytest.raises(DuplicateEntity, match="'team'"):
        await registry.create_group(group())


async def test_a_group_with_instances_stays_unless_forced(registry: Registry) -> None:
    stored = [await registry.register_instance(instance(name)) for name in ("b", "a")]
    with pytest.raises(InvalidArgument, match="2 instances: 'a', 'b'"):
        await registry.remove_group("team")
    closed = await registry.remove_group("team", force=True)
    assert {i.uid for i in closed} == {i.uid for i in stored}
    assert registry.view.closing == closed
    assert not registry.view.groups
    assert not registry.view.instances
    for gone in closed:
        await registry.forget_instance(gone.uid)
    with pytest.raises(EntityNotExist, match="'team'"):
        await registry.remove_group("team")


async def test_a_group_whose_instances_are_all_closing_can_go(registry: Registry) -> None:
    await registry.register_instance(instance())
    await registry.close_instance("model-a")
    assert await registry.remove_group("team") == ()
    assert len(registry.view.closing) == 1


async def test_unknown_stored_fields_survive_an_update_by_who_does_not_know_them(
    registry: Registry, open_registry: OpenRegistry
) -> None:
    nfs = StorageType.NFS
    newer = group(
        "newer",
        tier="gold",
        quota={
            "capacity": 5,
            "burst": 7,
            "quota_config": [{"storage_type": nfs, "capacity": 1, "floor": 3}],
        },
    )
    await registry.create_group(newer)
    older = group(
        "newer",
        version=2,
        quota=InstanceGroupQuota(
            capacity=6, quota_config=(QuotaConfig(storage_type=nfs, capacity=2),)
        ),
    )
    merged = await registry.update_group(older, current_version=1)
    assert merged.model_dump()["tier"] == "gold"
    quota = (await open_registry()).view.groups["newer"].model_dump()["quota"]
    assert quota["burst"] == 7
    assert quota["capacity"] == 6
    assert quota["quota_config"] == ({"storage_type": nfs, "capacity": 2, "floor": 3},)


def test_additions_that_an_update_names_are_replaced() -> None:
    old = storage(tier="slow", spec={"root_path": "/a", "stripe": 4})
    new = storage(tier="fast", spec={"root_path": "/b"})
    merged = merge_unknown(old, new)
    assert merged.model_dump()["tier"] == "fast"
    assert merged.spec == {"root_path": "/b", "stripe": 4}
    other = StorageConfig(global_unique_name="nfs_01", type=StorageType.HF3FS)
    assert merge_unknown(old, other).spec == {}
    assert merge_unknown(storage(), new) is new


def test_an_update_keeps_our_additions_unless_it_names_them() -> None:
    old = storage(capacity_bytes=100, high_percentage=0.9, low_percentage=0.5)
    kept = merge_unknown(old, storage(spec={"root_path": "/b"}))
    assert (kept.capacity_bytes, kept.high_percentage, kept.low_percentage) == (100, 0.9, 0.5)
    named = merge_unknown(old, storage(capacity_bytes=0, high_percentage=0.6))
    assert (named.capacity_bytes, named.high_percentage, named.low_percentage) == (0, 0.6, 0.5)


async def test_what_is_kept_must_fit_what_is_new(open_registry: OpenRegistry) -> None:
    registry = await open_registry()
    await registry.put_storage(storage(high_percentage=0.9, low_percentage=0.8), expect_new=True)
    with pytest.raises(InvalidArgument, match="low_percentage"):
        await registry.put_storage(storage(high_percentage=0.7), expect_new=False)
    assert registry.view.storages["nfs_01"].high_percentage == 0.9


async def test_defaults_are_created_once_and_stay_deleted(open_registry: OpenRegistry) -> None:
    registry = await open_registry()
    assert await registry.bootstrap([default_storage("/data/")], [default_group()])
    stored = registry.view.groups["default"]
    assert stored.storage_candidates == ("nfs_01",)
    assert registry.view.storages["nfs_01"].spec == {"root_path": "/data/", "key_count_per_file": 8}
    await registry.remove_group("default")
    await registry.remove_storage("nfs_01")
    await registry.close()
    again = await open_registry()
    assert not await again.bootstrap([default_storage()], [default_group()])
    assert not again.view.groups
    assert not again.view.storages


async def test_a_registry_that_has_something_gets_no_defaults_later_either(
    registry: Registry,
) -> None:
    assert not await registry.bootstrap([default_storage()], [default_group()])
    await registry.remove_group("team")
    await registry.remove_storage("nfs_01")
    assert not await registry.bootstrap([default_storage()], [default_group()])


async def test_a_bad_bootstrap_creates_nothing(open_registry: OpenRegistry) -> None:
    registry = await open_registry()
    with pytest.raises(InvalidArgument, match="name is empty"):
        await registry.bootstrap([storage()], [group("ok"), group("")])
    assert not registry.view.storages
    assert await registry.bootstrap([storage()], [group("ok")])


async def test_accounts_keep_only_a_hash(
    registry: Registry, caplog: pytest.LogCaptureFixture, open_registry: OpenRegistry
) -> None:
    caplog.set_level(logging.DEBUG)
    added = await registry.add_account("ann", "correct horse", AccountRole.ADMIN)
    await registry.add_account("bob", "correct horse", AccountRole.USER)
    assert [a.user_name for a in await registry.list_accounts()] == ["ann", "bob"]
    other = await open_registry()
    assert await other.verify_password("ann", "correct horse") == added
    assert await other.verify_password("ann", "wrong horse") is None
    assert await other.verify_password("nobody", "correct horse") is None
    assert await other.verify_password("nobody", "") is None
    with pytest.raises(DuplicateEntity, match="'ann'"):
        await registry.add_account("ann", "other", AccountRole.USER)
    snapshot = await registry.export_snapshot()
    assert snapshot.count("$argon2id$") == 2
    assert "horse" not in snapshot + caplog.text + repr(await registry.list_accounts())
    await registry.delete_account("ann")
    with pytest.raises(EntityNotExist, match="'ann'"):
        await registry.delete_account("ann")
    assert await other.verify_password("ann", "correct horse") is None


async def test_views_are_immutable_and_published_in_order(registry: Registry) -> None:
    seen: list[RegistryView] = []
    stop = registry.subscribe(seen.append)
    before = registry.view
    await asyncio.gather(*(registry.register_instance(instance(f"i{i}")) for i in range(20)))
    assert [len(view.instances) for view in seen] == list(range(1, 21))
    assert [view.revision for view in seen] == [before.revision + i for i in range(1, 21)]
    assert seen[-1] is registry.view
    assert not before.instances, "a view taken earlier does not change"
    with pytest.raises(TypeError):
        registry.view.instances["x"] = instance()  # type: ignore[index]
    stop()
    await registry.close_instance("i0")
    assert len(seen) == 20


async def test_a_cancelled_change_is_still_published(registry: Registry) -> None:
    task = asyncio.ensure_future(registry.register_instance(instance()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: set(registry.view.instances) == {"model-a"})


async def test_a_failing_subscriber_stops_nobody(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[RegistryView] = []

    def fail(view: RegistryView) -> None:
        raise ValueError("bad subscriber")

    registry.subscribe(fail)
    registry.subscribe(seen.append)
    await registry.register_instance(instance())
    assert len(seen) == 1
    assert "bad subscriber" in caplog.text


async def test_secret_and_cluster_uid_are_made_once(
    registry: Registry, open_registry: OpenRegistry
) -> None:
    again = await open_registry(clock=SimClock(seed=99))
    assert again.view.secret == registry.view.secret
    assert again.view.cluster_uid == registry.view.cluster_uid
    assert len(again.view.secret) == 32
    assert len(again.view.cluster_uid) == 8
    assert repr(again.view.secret) not in repr(again.view)


async def test_epochs_only_grow(registry: Registry, open_registry: OpenRegistry) -> None:
    other = await open_registry()
    given = [await r.next_epoch() for r in (registry, other, registry, other)]
    assert given == [1, 2, 3, 4]
    await registry.close()
    assert await (await open_registry()).next_epoch() == 5


async def test_a_registry_that_is_not_open_says_so(db_url: str) -> None:
    registry = Registry(db_url, SimClock())
    for call in (registry.refresh(), registry.next_epoch(), registry.list_accounts()):
        with pytest.raises(NotReady):
            await call
    with pytest.raises(NotReady):
        _ = registry.view
    await registry.close()


@pytest.mark.parametrize("shards_max", [8, 24, 2048])
def test_shards_max_is_a_power_of_two_within_limits(shards_max: int, db_url: str) -> None:
    with pytest.raises(ConfigError, match="shards_max"):
        Registry(db_url, SimClock(), shards_max=shards_max)
