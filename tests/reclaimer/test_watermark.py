"""How much must go and from whom, as tables."""

from __future__ import annotations

import pytest

from kvcm.core.quota import (
    UNLIMITED,
    Marks,
    group_marks,
    key_marks,
    marks,
    never_evicts,
    storage_marks,
)
from kvcm.core.types import (
    CacheConfig,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)
from kvcm.metaindex.ledger import Delta, Ledger
from kvcm.metaindex.pressure import Scope
from kvcm.reclaimer.watermark import Excess, group_excesses, over, shares, storage_excess


@pytest.mark.parametrize(
    ("capacity", "percentage", "size", "low", "expected"),
    [
        (100, 0.8, 0, 0.0, Marks(100, 80, 75)),
        (100, 0.8, 0, 0.5, Marks(100, 80, 50)),
        (100, 0.8, 0, 0.8, Marks(100, 80, 80)),
        (100, 0.8, 0, 0.9, Marks(100, 80, 75)),  # above the mark: not meant for it
        (100, 0.03, 0, 0.0, Marks(100, 3, 0)),
        (100, 1.0, 0, 0.0, Marks(100, 100, 95)),
        (100, 0.0, 0, 0.0, Marks(100)),
        (100, 1.01, 0, 0.0, Marks(100)),
        (100, 0.0, 40, 0.0, Marks(100, 40, 38)),
        (100, 0.0, 100, 0.0, Marks(100, 100, 95)),
        (100, 0.0, 101, 0.0, Marks(100)),  # never reached
        (100, 0.8, 40, 0.0, Marks(100, 40, 38)),  # the lower one counts
        (100, 0.3, 40, 0.0, Marks(100, 30, 25)),
        (0, 0.8, 0, 0.0, Marks(0, 0, 0)),
        (UNLIMITED, 0.8, 0, 0.0, Marks(UNLIMITED)),
        (UNLIMITED, 0.8, 40, 0.5, Marks(UNLIMITED, 40, 38)),
    ],
)
def test_marks(capacity: int, percentage: float, size: int, low: float, expected: Marks) -> None:
    assert marks(capacity, percentage, size=size, low=low) == expected


M = Marks(100, 80, 75)


@pytest.mark.parametrize(
    ("of", "used", "being_written", "wanted", "expected"),
    [
        (M, 80, 0, 0, 0),
        (M, 81, 0, 0, 6),
        (Marks(100), 100, 0, 0, 0),
        (Marks(100), 101, 0, 0, 1),
        (Marks(100), 101, 0, 50, 1),  # no trigger: a refused write arms nothing
        (Marks(100, drains=False), 101, 0, 50, 0),
        (Marks(0), 10, 0, 0, 10),
        (Marks(UNLIMITED, 40, 38), 50, 0, 0, 12),
        # Room for a refused write: down to the lower of low mark and capacity - wanted.
        (M, 79, 0, 10, 0),  # it fits already
        (M, 79, 0, 22, 4),
        (M, 79, 0, 50, 29),
        (M, 79, 0, 100, 79),
        (M, 79, 0, 101, 4),  # it can never fit whole
        (Marks(100, 100, 95), 100, 0, 1, 5),
        # What is being written counts, but cannot be evicted: half of the rest's share stays.
        (M, 81, 10, 0, 6),
        (M, 90, 60, 0, 15),
        (M, 90, 70, 0, 9),  # 20 are evictable, 0.75 * 30 / 2 = 11 stay
        (M, 95, 84, 0, 5),
        (M, 95, 90, 0, 2),
        (M, 95, 95, 0, 0),
        (M, 110, 80, 0, 23),  # R91: 80 + 30 in 100; 7 stay
        (M, 110, 120, 0, 10),
    ],
)
def test_what_is_over(of: Marks, used: int, being_written: int, wanted: int, expected: int) -> None:
    found = over(of, used, being_written=being_written, wanted=wanted)
    assert found == expected


def test_eviction_for_open_writes_ends() -> None:
    """R91: what it takes for bytes that it cannot reclaim is bounded, however often it looks."""
    being_written, evictable = 80, 30
    for _ in range(10):
        evictable -= over(M, being_written + evictable, being_written=being_written)
    assert evictable == 7


def group(
    name: str = "g",
    *,
    capacity: int | None = 100,
    trigger: TriggerStrategy | None = None,
    per_type: int = 1000,
) -> InstanceGroup:
    return InstanceGroup(
        name=name,
        quota=None
        if capacity is None
        else InstanceGroupQuota(
            capacity=capacity,
            quota_config=(QuotaConfig(storage_type=StorageType.NFS, capacity=per_type),),
        ),
        cache_config=CacheConfig(
            reclaim_strategy=CacheReclaimStrategy(trigger_strategy=trigger),
            meta_indexer_config=MetaIndexerConfig(max_key_count=10),
        ),
    )


def ledger(serving: int, blocks: int = 1) -> Ledger:
    made = Ledger()
    delta = Delta(serving_bytes=serving, serving_blocks=blocks)
    made.apply("g", "u", "nfs", StorageType.NFS, delta)
    return made


def excesses(of: InstanceGroup, held: Ledger) -> list[tuple[Scope, int]]:
    return [(e.scope, e.amount) for e in group_excesses(of, ["u"], held, {})]


def test_a_lowered_quota_drains_also_without_a_trigger() -> None:
    assert excesses(group(capacity=40), ledger(50)) == [(Scope("g"), 10)]
    assert excesses(group(capacity=0), ledger(50)) == [(Scope("g"), 50)]


def test_type_and_key_marks_are_their_own() -> None:
    found = excesses(
        group(per_type=30, trigger=TriggerStrategy(used_percentage=0.8)), ledger(60, 9)
    )
    assert found == [
        (Scope("g", storage_type=StorageType.NFS), 38),
        (Scope("g", uid="u"), 2),
    ]


def test_below_all_marks_nothing_goes() -> None:
    trigger = TriggerStrategy(used_percentage=0.8, used_size=60)
    assert excesses(group(trigger=trigger), ledger(60, 8)) == []


def test_a_size_alone_is_no_trigger_of_other_limits() -> None:
    of = group(trigger=TriggerStrategy(used_size=60))
    assert group_marks(of).high == 60
    assert key_marks(of).high is None


def test_a_group_with_a_quota_and_no_trigger_never_evicts() -> None:
    assert never_evicts(group())
    assert never_evicts(group(trigger=TriggerStrategy()))
    assert not never_evicts(group(trigger=TriggerStrategy(used_percentage=1.5)))
    assert not never_evicts(group(capacity=None))


def storage(**space: float) -> StorageConfig:
    return StorageConfig.model_validate(
        {"global_unique_name": "s", "type": StorageType.NFS} | space
    )


def test_a_storage_without_a_mark_evicts_nobody() -> None:
    held = Ledger()
    held.apply("g", "u", "s", StorageType.NFS, Delta(serving_bytes=200))
    wanted = {Scope(storage="s"): 10}
    assert storage_excess(storage(capacity_bytes=100), held, wanted) == 0
    assert storage_excess(storage(capacity_bytes=0, high_percentage=0.5), held, wanted) == 0
    assert storage_marks(None) == Marks(UNLIMITED, drains=False)


def test_trash_fills_a_storage_and_is_evicted_no_second_time() -> None:
    held = Ledger()
    config = storage(capacity_bytes=100, high_percentage=0.9, low_percentage=0.6)
    held.apply("g", "u", "s", StorageType.NFS, Delta(serving_bytes=60, trash_bytes=40))
    assert storage_excess(config, held, {}) == 0
    assert storage_excess(config, held, {Scope(storage="s"): 30}) == 0
    held.apply("g", "u", "s", StorageType.NFS, Delta(serving_bytes=31, trash_bytes=-40))
    assert storage_excess(config, held, {}) == 31


@pytest.mark.parametrize(
    ("held", "quotas", "amount", "expected"),
    [
        # Equal quotas: what remains is 40 each.
        ({"a": 60, "b": 31}, {"a": 100, "b": 100}, 11, {"a": 11}),
        ({"a": 50, "b": 41}, {"a": 100, "b": 100}, 11, {"a": 10, "b": 1}),
        # By quota: of 80, a may keep 60 and b 20.
        ({"a": 60, "b": 31}, {"a": 30, "b": 10}, 11, {"b": 11}),
        ({"a": 66, "b": 25}, {"a": 30, "b": 10}, 11, {"a": 6, "b": 5}),
        # A quota above the storage's capacity counts as that.
        ({"a": 66, "b": 25}, {"a": 300, "b": 100}, 11, {"a": 11}),
        # Who holds nothing there has no share that others could not use.
        ({"a": 91, "b": 0}, {"a": 1, "b": 1000}, 11, {"a": 11}),
        # The furthest above gives first, down to its share; one below gives nothing.
        ({"a": 50, "b": 40, "c": 5}, {"a": 100, "b": 100, "c": 100}, 15, {"a": 15}),
        ({"a": 45, "b": 44, "c": 6}, {"a": 100, "b": 100, "c": 100}, 30, {"a": 24, "b": 6}),
        # A group without quota counts with the storage's capacity.
        ({"a": 60, "b": 31}, {"a": None, "b": 100}, 11, {"a": 11}),
        ({"a": 10, "b": 10}, {"a": 0, "b": 100}, 5, {"a": 5}),
        ({"a": 10, "b": 10}, {"a": 0, "b": 0}, 20, {"a": 10, "b": 10}),
    ],
)
def test_who_gives_back_for_a_storage(
    held: dict[str, int], quotas: dict[str, int | None], amount: int, expected: dict[str, int]
) -> None:
    totals = Ledger()
    for name, used in held.items():
        totals.apply(name, f"u-{name}", "s", StorageType.NFS, Delta(serving_bytes=used))
        totals.apply(name, f"u-{name}", "other", StorageType.NFS, Delta(serving_bytes=1000))
    groups = [group(name, capacity=capacity) for name, capacity in quotas.items()]
    config = storage(capacity_bytes=100, high_percentage=0.9, low_percentage=0.8)
    found = shares(config, amount, groups, totals)
    assert found == [Excess(Scope(n, storage="s"), give, 100) for n, give in expected.items()]
