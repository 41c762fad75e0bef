from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from registry_samples import group, group_with_indexer, group_with_trigger, instance, storage

from kvcm.core import limits
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import (
    CacheConfig,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    LocationSpecGroup,
    LocationSpecInfo,
    QuotaConfig,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)
from kvcm.registry import validate

NAN, INF = float("nan"), float("inf")


def infos(*sizes: int) -> tuple[LocationSpecInfo, ...]:
    return tuple(LocationSpecInfo(name=f"s{i}", size=size) for i, size in enumerate(sizes))


def with_specs(specs: tuple[LocationSpecInfo, ...]) -> dict[str, Any]:
    return {"location_spec_infos": specs, "location_spec_groups": ()}


def with_groups(*groups: LocationSpecGroup) -> dict[str, Any]:
    return {"location_spec_groups": groups}


def quota(*entries: QuotaConfig, capacity: int = 0) -> InstanceGroupQuota:
    return InstanceGroupQuota(capacity=capacity, quota_config=entries)


SPEC = LocationSpecInfo(name="tp0", size=1)


def group_with_reclaim(**fields: Any) -> InstanceGroup:
    """A group whose high mark is 0.8."""
    trigger = TriggerStrategy(used_percentage=0.8)
    reclaim = CacheReclaimStrategy(trigger_strategy=trigger, **fields)
    return group(cache_config=CacheConfig(reclaim_strategy=reclaim))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"capacity_bytes": -1}, "storage.capacity_bytes"),
        ({"high_percentage": -0.1}, "storage.high_percentage"),
        ({"high_percentage": NAN}, "storage.high_percentage"),
        ({"high_percentage": INF}, "storage.high_percentage"),
        ({"low_percentage": NAN}, "storage.low_percentage"),
        ({"high_percentage": 0.8, "low_percentage": 0.81}, "storage.low_percentage"),
        ({"high_percentage": 0.8, "low_percentage": 0.8, "capacity_bytes": 1 << 62}, ""),
        ({"high_percentage": 1.5}, ""),
    ],
)
def test_marks_of_a_storage_are_checked(fields: dict[str, Any], named: str) -> None:
    config = storage(**fields)
    if not named:
        validate.check_storage(config)
        return
    with pytest.raises(InvalidArgument, match=named):
        validate.check_storage(config)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"instance_id": ""}, "instance_id"),
        ({"instance_id": "a\0b"}, "instance_id"),
        ({"instance_id": "\ud800"}, "instance_id"),
        ({"instance_id": "x" * (limits.INSTANCE_ID_BYTES_MAX + 1)}, "instance_id"),
        ({"instance_group": ""}, "instance_group"),
        ({"instance_group": " \t"}, "instance_group"),
        ({"instance_group": "g" * (limits.ENTITY_NAME_BYTES_MAX + 1)}, "instance_group"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": -1}, "block_size"),
        ({"block_size": 1 << 31}, "block_size"),
        (with_specs(()), "location_spec_infos"),
        (with_specs(infos(0)), "location_spec_infos[0].size"),
        (with_specs(infos(1, -5)), "location_spec_infos[1].size"),
        (with_specs(infos(limits.SPEC_SIZE_BYTES_MAX + 1)), "location_spec_infos[0].size"),
        (with_specs((SPEC, SPEC)), "location_spec_infos has name 'tp0' twice"),
        (with_specs((SPEC.model_copy(update={"name": ""}),)), "location_spec_infos[0].name"),
        (with_specs(infos(*[1] * (limits.SPECS_PER_INSTANCE_MAX + 1))), "location_spec_infos"),
        (with_groups(LocationSpecGroup(name="g", spec_names=("tp9",))), "unknown spec 'tp9'"),
        (with_groups(LocationSpecGroup(name="g")), "location_spec_groups[0].spec_names"),
        (with_groups(LocationSpecGroup(name="", spec_names=("tp0",))), "groups[0].name"),
        (
            with_groups(LocationSpecGroup(name="g", spec_names=("tp0", "tp0"))),
            "location_spec_groups[0].spec_names has value 'tp0' twice",
        ),
        (
            with_groups(*[LocationSpecGroup(name="g", spec_names=("tp0",))] * 2),
            "location_spec_groups has name 'g' twice",
        ),
        (
            with_groups(
                *[
                    LocationSpecGroup(name=f"g{i}", spec_names=("tp0",))
                    for i in range(limits.SPEC_GROUPS_PER_INSTANCE_MAX + 1)
                ]
            ),
            "location_spec_groups",
        ),
        ({"model_deployment": {"tp_size": -1}}, "model_deployment.tp_size"),
        (
            {"model_deployment": {"model_name": "m" * (limits.TEXT_FIELD_BYTES_MAX + 1)}},
            "model_deployment.model_name",
        ),
        (
            {"model_deployment": {"user_data": "u" * (limits.USER_DATA_BYTES_MAX + 1)}},
            "model_deployment.user_data",
        ),
        ({"model_deployment": {"digest": "\ud800"}}, "model_deployment.digest"),
    ],
)
def test_a_bad_registration_names_its_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_instance(instance(**fields))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"instance_id": "x" * limits.INSTANCE_ID_BYTES_MAX},
        {"instance_group": "g" * limits.ENTITY_NAME_BYTES_MAX},
        with_specs(infos(limits.SPEC_SIZE_BYTES_MAX)),
        with_specs(infos(*[1] * limits.SPECS_PER_INSTANCE_MAX)),
        with_groups(
            *[
                LocationSpecGroup(name=f"g{i}", spec_names=("tp0",))
                for i in range(limits.SPEC_GROUPS_PER_INSTANCE_MAX)
            ]
        ),
        {"block_size": (1 << 31) - 1},
        {"model_deployment": {"model_name": "m" * limits.TEXT_FIELD_BYTES_MAX}},
        {"model_deployment": {"user_data": "u" * limits.USER_DATA_BYTES_MAX}},
        {"model_deployment": None},
    ],
)
def test_a_registration_at_its_limits_is_accepted(fields: dict[str, Any]) -> None:
    validate.check_instance(instance(**fields))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: group(""), "instance_group.name"),
        (lambda: group(" team"), "instance_group.name"),
        (lambda: group("g" * (limits.ENTITY_NAME_BYTES_MAX + 1)), "instance_group.name"),
        (lambda: group(max_instance_count=-1), "max_instance_count"),
        (lambda: group(version=-1), "instance_group.version"),
        (lambda: group(storage_candidates=("a", "a")), "storage_candidates"),
        (lambda: group(storage_candidates=("",)), "storage_candidates[0]"),
        (
            lambda: group(
                storage_candidates=tuple(
                    f"s{i}" for i in range(limits.STORAGE_CANDIDATES_PER_GROUP_MAX + 1)
                )
            ),
            "storage_candidates",
        ),
        (lambda: group(user_data="u" * (limits.USER_DATA_BYTES_MAX + 1)), "user_data"),
        (lambda: group(quota=quota(capacity=-1)), "quota.capacity"),
        (
            lambda: group(quota=quota(QuotaConfig(storage_type=StorageType.NFS, capacity=-1))),
            "quota.quota_config[0].capacity",
        ),
        (
            lambda: group(
                quota=quota(*[QuotaConfig(storage_type=StorageType.NFS, capacity=1)] * 2)
            ),
            "quota.quota_config has storage_type 'NFS' twice",
        ),
        (
            lambda: group(quota=quota(QuotaConfig(storage_type=StorageType(0), capacity=1))),
            "quota.quota_config[0].storage_type",
        ),
        (lambda: group_with_trigger(used_size=-1), "trigger_strategy.used_size"),
        (lambda: group_with_trigger(used_percentage=-0.1), "used_percentage"),
        (lambda: group_with_trigger(used_percentage=NAN), "used_percentage"),
        (lambda: group_with_trigger(used_percentage=INF), "used_percentage"),
        (lambda: group_with_reclaim(low_percentage=-0.1), "reclaim_strategy.low_percentage"),
        (lambda: group_with_reclaim(low_percentage=NAN), "reclaim_strategy.low_percentage"),
        (lambda: group_with_reclaim(low_percentage=0.81), "reclaim_strategy.low_percentage"),
        (lambda: group_with_reclaim(ttl_seconds=-1), "reclaim_strategy.ttl_seconds"),
        (lambda: group_with_indexer(max_key_count=-1), "max_key_count"),
        (lambda: group_with_indexer(mutex_shard_num=-2), "mutex_shard_num"),
        (lambda: group_with_indexer(mutex_shard_num=12), "mutex_shard_num"),
        (lambda: group_with_indexer(batch_key_size=-1), "batch_key_size"),
        (
            lambda: group_with_indexer(meta_cache_policy_config={"high_pri_pool_ratio": NAN}),
            "high_pri_pool_ratio",
        ),
        (lambda: group(addition=1 << 63), "instance_group.addition"),
    ],
)
def test_a_bad_group_names_its_field(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_group(make())
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: group("g" * limits.ENTITY_NAME_BYTES_MAX),
        lambda: group_with_trigger(used_percentage=1.5),
        lambda: group_with_trigger(used_percentage=0.0),
        lambda: group_with_reclaim(low_percentage=0.8),
        lambda: group(
            storage_candidates=tuple(
                f"s{i}" for i in range(limits.STORAGE_CANDIDATES_PER_GROUP_MAX)
            )
        ),
        lambda: group(user_data="u" * limits.USER_DATA_BYTES_MAX),
        lambda: group(quota=quota(capacity=(1 << 63) - 1)),
        *[lambda n=n: group_with_indexer(mutex_shard_num=n) for n in (0, 1, 2, 16, 1 << 40)],
    ],
)
def test_legal_groups_are_accepted(make: Callable[[], Any]) -> None:
    validate.check_group(make())


def plugin(name: str, count: int = 0, **options: str) -> StorageConfig:
    numbered = {f"option_{i}": "" for i in range(count)}
    spec = {"plugin": name, **numbered, **options}
    return storage(type=StorageType.PLUGIN, spec=spec)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: storage(""), "global_unique_name"),
        (lambda: storage("a/b"), "global_unique_name"),
        (lambda: storage("a?b"), "global_unique_name"),
        (lambda: storage("a\n"), "global_unique_name"),
        (lambda: storage("s" * (limits.ENTITY_NAME_BYTES_MAX + 1)), "global_unique_name"),
        (lambda: storage(type=StorageType.UNSPECIFIED), "storage.storage_spec"),
        (lambda: storage(spec={"root_path": 5}), "storage_spec.root_path"),
        (lambda: storage(spec={"key_count_per_file": True}), "storage_spec.key_count_per_file"),
        (lambda: storage(spec={"key_count_per_file": -1}), "storage_spec.key_count_per_file"),
        (lambda: storage(root="r" * (limits.TEXT_FIELD_BYTES_MAX + 1)), "storage_spec.root_path"),
        (lambda: plugin(""), "storage_spec.plugin.name"),
        (lambda: plugin("A"), "storage_spec.plugin.name"),
        (lambda: plugin("1st"), "storage_spec.plugin.name"),
        (lambda: plugin("a/b"), "storage_spec.plugin.name"),
        (lambda: plugin("a\n"), "storage_spec.plugin.name"),
        (lambda: plugin("p" * (limits.PLUGIN_NAME_CHARACTERS_MAX + 1)), "storage_spec.plugin.name"),
        (lambda: plugin("p", limits.OPTIONS_PER_PLUGIN_MAX + 1), "storage_spec.plugin.options"),
        (lambda: plugin("p", **{" x": "1"}), "storage_spec.plugin.options.name"),
        (lambda: plugin("p", x="\0"), "storage_spec.x"),
    ],
)
def test_a_bad_storage_names_its_field(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate.check_storage(make())
    assert named in str(caught.value)


def test_storages_at_their_limits_are_accepted() -> None:
    validate.check_storage(storage("s" * limits.ENTITY_NAME_BYTES_MAX))
    validate.check_storage(storage(root="r" * limits.TEXT_FIELD_BYTES_MAX))
    name = "p" * limits.PLUGIN_NAME_CHARACTERS_MAX
    validate.check_storage(plugin(name, limits.OPTIONS_PER_PLUGIN_MAX))


def test_a_message_never_repeats_a_password() -> None:
    password = "secret" * limits.PASSWORD_BYTES_MAX
    with pytest.raises(InvalidArgument, match="password has") as caught:
        validate.check_account("user", password)
    assert "secret" not in str(caught.value)
    validate.check_account("user", "p" * limits.PASSWORD_BYTES_MAX)
    with pytest.raises(InvalidArgument, match="password is empty"):
        validate.check_account("user", "")
    with pytest.raises(InvalidArgument, match="user_name"):
        validate.check_account(" ", "p")
