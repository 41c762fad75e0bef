"""How much must go, as a table."""

from __future__ import annotations

import pytest

from kvcm.core.quota import UNLIMITED
from kvcm.core.types import (
    CacheConfig,
    CacheReclaimStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
    StorageType,
    TriggerStrategy,
)
from kvcm.metaindex.ledger import Delta, Ledger
from kvcm.reclaimer.watermark import Excess, excesses, over


@pytest.mark.parametrize(
    ("used", "capacity", "percentage", "size", "expected"),
    [
        (80, 100, 0.8, 0, 0),
        (81, 100, 0.8, 0, 6),
        (100, 100, 1.0, 0, 0),
        (100, 100, 0.0, 0, 0),
        (100, 100, 1.5, 0, 0),
        (101, 100, 1.5, 0, 1),
        (101, 100, 0.0, 0, 1),
        (10, 0, 1.5, 0, 10),
        (50, UNLIMITED, 0.8, 0, 0),
        (50, UNLIMITED, 0.8, 40, 12),
        (40, UNLIMITED, 0.0, 40, 0),
        (81, 100, 0.8, 50, 34),
    ],
)
def test_what_is_over(
    used: int, capacity: int, percentage: float, size: int, expected: int
) -> None:
    assert over(used, capacity, percentage, size) == expected


def group(
    *, capacity: int = 100, trigger: TriggerStrategy | None = None, per_type: int = 1000
) -> InstanceGroup:
    return InstanceGroup(
        name="g",
        quota=InstanceGroupQuota(
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


def test_a_lowered_quota_drains_also_without_a_trigger() -> None:
    assert list(excesses(group(capacity=40), ["u"], ledger(50))) == [Excess(10)]
    assert list(excesses(group(capacity=0), ["u"], ledger(50))) == [Excess(50)]


def test_type_and_key_marks_are_their_own() -> None:
    found = list(
        excesses(
            group(per_type=30, trigger=TriggerStrategy(used_percentage=0.8)), ["u"], ledger(60, 9)
        )
    )
    assert found == [
        Excess(38, storage_type=StorageType.NFS),
        Excess(2, uid="u", in_blocks=True),
    ]


def test_below_all_marks_nothing_goes() -> None:
    trigger = TriggerStrategy(used_percentage=0.8, used_size=60)
    assert list(excesses(group(trigger=trigger), ["u"], ledger(60, 8))) == []
