from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registry_samples import OpenRegistry, group, group_with_indexer, instance

from kvcm.core.errors import (
    CapacityReached,
    DuplicateEntity,
    EntityNotExist,
    InstanceNotExist,
    InvalidArgument,
)
from kvcm.core.types import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.registry import rules
from kvcm.registry.compare import differing_fields, shard_count
from kvcm.registry.registry import Registry
from kvcm.registry.state import Draft, RegistryState
from kvcm.testing.clock import SimClock


async def test_registering_equal_data_again_gives_the_same_instance(registry: Registry) -> None:
    first = await registry.register_instance(instance())
    revision = registry.view.revision
    again = await registry.register_instance(
        instance(
            location_spec_infos=tuple(reversed(instance().location_spec_infos)),
            location_spec_groups=(
                LocationSpecGroup(name="first", spec_names=("tp0",)),
                LocationSpecGroup(name="all", spec_names=("tp1", "tp0")),
            ),
            model_deployment=ModelDeployment(
                model_name="m", dtype="bf16", tp_size=2, extra="e", user_data="other"
            ),
        )
    )
    assert again == first
    assert registry.view.revision == revision
    assert registry.view.instances == {"model-a": first}
    assert re.fullmatch("[a-z0-9]{10}", first.uid)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 32}, "block_size"),
        ({"model_deployment": ModelDeployment(model_name="m2")}, "model_deployment"),
        ({"model_deployment": None}, "model_deployment"),
        (
            {
                "location_spec_infos": (
                    LocationSpecInfo(name="tp0", size=1024),
                    LocationSpecInfo(name="tp1", size=2048),
                )
            },
            "location_spec_infos",
        ),
        ({"location_spec_groups": ()}, "location_spec_groups"),
        ({"instance_group": "other"}, "instance_group"),
        ({"digest": "x"}, "digest"),
    ],
)
async def test_other_data_are_a_duplicate_naming_instance_and_field(
    registry: Registry, fields: dict[str, Any], named: str
) -> None:
    await registry.create_group(group("other"))
    first = await registry.register_instance(instance())
    with pytest.raises(DuplicateEntity) as caught:
        await registry.register_instance(instance(**fields))
    assert "'model-a'" in str(caught.value)
    assert str(caught.value).endswith(f"different {named}")
    assert registry.view.instances["model-a"] == first


@pytest.mark.parametrize("field", ["dtype", "lora_name", "extra", "weights_digest"])
def test_every_part_of_the_deployment_counts_but_user_data(field: str) -> None:
    changed = ModelDeployment.model_validate(
        {"model_name": "m", "dtype": "bf16", "tp_size": 2, "extra": "e", field: "changed"}
    )
    assert differing_fields(instance(), instance(model_deployment=changed)) == ["model_deployment"]


def test_an_absent_deployment_equals_an_empty_one() -> None:
    absent = instance(model_deployment=None)
    assert differing_fields(absent, instance(model_deployment=ModelDeployment())) == []


async def test_all_differing_fields_are_named(registry: Registry) -> None:
    await registry.register_instance(instance())
    with pytest.raises(DuplicateEntity, match="different block_size, model_deployment"):
        await registry.register_instance(instance(block_size=1, model_deployment=None))


async def test_an_unknown_group_is_named(registry: Registry) -> None:
    with pytest.raises(EntityNotExist, match="'nowhere'"):
        await registry.register_instance(instance(instance_group="nowhere"))
    assert registry.view.instances == {}


async def test_max_instance_count_is_reached_at_n_plus_one(registry: Registry) -> None:
    await registry.create_group(group("small", max_instance_count=2))
    for name in ("a", "b"):
        await registry.register_instance(instance(name, instance_group="small"))
    with pytest.raises(CapacityReached) as caught:
        await registry.register_instance(instance("c", instance_group="small"))
    assert caught.value.reason == "MAX_INSTANCE_COUNT"
    assert "'small'" in str(caught.value)
    await registry.register_instance(instance("a", instance_group="small"))
    await registry.close_instance("a")
    await registry.register_instance(instance("c", instance_group="small"))
    assert set(registry.view.instances) == {"b", "c"}


async def test_max_instance_count_zero_is_unlimited(registry: Registry) -> None:
    for i in range(5):
        await registry.register_instance(instance(f"i{i}"))
    assert len(registry.view.instances) == 5


HOSTILE = [
    "../x",
    "é" * 100,
    "a",
    "a:b",
    "a\nb",
    "/",
    ".",
    " ",
    "a b",
    "%2e%2e",
    "'; DROP --",
    "😀",
]


async def test_hostile_ids_round_trip(registry: Registry, open_registry: OpenRegistry) -> None:
    for name in HOSTILE:
        await registry.register_instance(instance(name))
    assert list(registry.view.instances) == HOSTILE
    reopened = await open_registry()
    assert dict(reopened.view.instances) == dict(registry.view.instances)
    assert len({i.uid for i in reopened.view.instances.values()}) == len(HOSTILE)


async def test_a_removed_instance_frees_its_name_under_a_fresh_uid(registry: Registry) -> None:
    first = await registry.register_instance(instance())
    closed = await registry.close_instance("model-a")
    assert closed == first.model_copy(update={"closing": True})
    assert registry.view.closing == (closed,)
    second = await registry.register_instance(instance(block_size=32))
    assert second.uid != first.uid
    assert registry.view.instances["model-a"] == second
    await registry.close_instance("model-a", "team")
    assert [i.uid for i in registry.view.closing] == [first.uid, second.uid]
    await registry.forget_instance(first.uid)
    await registry.forget_instance(first.uid)
    assert [i.uid for i in registry.view.closing] == [second.uid]


async def test_a_uid_never_comes_back_even_if_chance_repeats_itself(
    open_registry: OpenRegistry,
) -> None:
    seen = set()
    for _ in range(4):
        registry = await open_registry(clock=SimClock(seed=7))
        if not registry.view.groups:
            await registry.create_group(group())
        stored = await registry.register_instance(instance())
        seen.add(stored.uid)
        await registry.close_instance("model-a")
        await registry.forget_instance(stored.uid)
        await registry.close()
    assert len(seen) == 4


async def test_closing_and_forgetting_name_what_is_wrong(registry: Registry) -> None:
    stored = await registry.register_instance(instance())
    with pytest.raises(InstanceNotExist, match="'nobody'"):
        await registry.close_instance("nobody")
    with pytest.raises(InstanceNotExist, match="'elsewhere'"):
        await registry.close_instance("model-a", "elsewhere")
    with pytest.raises(InvalidArgument, match="live"):
        await registry.forget_instance(stored.uid)
    assert registry.view.instances == {"model-a": stored}


async def test_trim_numbers_grow_and_are_visible_at_once(
    registry: Registry, open_registry: OpenRegistry
) -> None:
    stored = await registry.register_instance(instance())
    for wanted in (1, 2, 3):
        assert await registry.raise_trim(stored.uid) == wanted
        assert registry.view.instances["model-a"].trim == wanted
    assert (await open_registry()).view.instances["model-a"].trim == 3
    await registry.close_instance("model-a")
    with pytest.raises(InstanceNotExist, match=stored.uid):
        await registry.raise_trim(stored.uid)


@pytest.mark.parametrize(
    ("shards", "keys", "shards_max", "wanted"),
    [
        (0, 0, 64, 16),
        (1, 1_000_000, 64, 16),
        (32, 0, 64, 32),
        (64, 0, 64, 64),
        (128, 0, 64, 64),
        (128, 0, 1024, 128),
        (1 << 40, 0, 1024, 1024),
        (16, 16 * 262_144, 64, 16),
        (16, 16 * 262_144 + 1, 64, 32),
        (0, 100_000_000, 1024, 512),
    ],
)
def test_shards_follow_group_and_server(
    shards: int, keys: int, shards_max: int, wanted: int
) -> None:
    made_in = group_with_indexer(mutex_shard_num=shards, max_key_count=keys)
    assert shard_count(made_in, shards_max) == wanted


async def test_shards_stay_as_they_were_at_registration(registry: Registry) -> None:
    assert (await registry.register_instance(instance())).shard_count == 16
    wider = group_with_indexer(mutex_shard_num=64).model_copy(update={"version": 2})
    await registry.update_group(wider, current_version=1)
    assert (await registry.register_instance(instance())).shard_count == 16
    assert (await registry.register_instance(instance("b"))).shard_count == 64


def empty_draft() -> Draft:
    state = RegistryState(1, "c" * 8, b"", True, 1, {}, {"team": group()}, {}, {}, {})
    return Draft(state)


names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=5)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    specs = draw(st.dictionaries(names, st.integers(1, 9), min_size=1, max_size=4))
    members = st.lists(st.sampled_from(sorted(specs)), min_size=1, unique=True)
    groups = draw(st.dictionaries(names, members, max_size=3))
    return instance(
        draw(st.sampled_from("ab")),
        block_size=draw(st.integers(1, 3)),
        location_spec_infos=tuple(LocationSpecInfo(name=n, size=s) for n, s in specs.items()),
        location_spec_groups=tuple(
            LocationSpecGroup(name=n, spec_names=tuple(s)) for n, s in groups.items()
        ),
        model_deployment=ModelDeployment(model_name=draw(names), user_data=draw(names)),
    )


def shuffled(wanted: Instance, chance: random.Random) -> Instance:
    def mixed(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(chance.sample(values, len(values)))

    return wanted.model_copy(
        update={
            "location_spec_infos": mixed(wanted.location_spec_infos),
            "location_spec_groups": mixed(
                tuple(
                    g.model_copy(update={"spec_names": mixed(g.spec_names)})
                    for g in wanted.location_spec_groups
                )
            ),
        }
    )


@given(wanted=instances(), others=st.lists(instances(), max_size=4), chance=st.randoms())
def test_registration_is_idempotent_whatever_the_order(
    wanted: Instance, others: list[Instance], chance: random.Random
) -> None:
    draft, clock = empty_draft(), SimClock()
    stored = rules.register_instance(draft, wanted, clock, 64)
    for other in others:
        same = other.instance_id == wanted.instance_id and not differing_fields(stored, other)
        try:
            assert (rules.register_instance(draft, other, clock, 64) == stored) == same
        except DuplicateEntity:
            assert not same
    assert rules.register_instance(draft, shuffled(wanted, chance), clock, 64) == stored
    assert draft.instances[wanted.instance_id] == stored
