"""How much must go, from whom. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvcm.core import quota
from kvcm.core.quota import Marks
from kvcm.core.types import InstanceGroup, StorageConfig, StorageType
from kvcm.metaindex.ledger import Ledger
from kvcm.metaindex.pressure import Scope

KEPT_SHARE = 0.5
"""Of its share of what is not being written, so much stays when open writes push usage over."""


@dataclass(frozen=True, slots=True)
class Excess:
    """What must go within a scope: ``amount`` bytes, or blocks when the scope has a ``uid``.

    ``limit`` is the capacity of what was exceeded, in the same unit.
    """

    scope: Scope
    amount: int
    limit: int


def over(marks: Marks, used: int, *, being_written: int = 0, wanted: int = 0) -> int:
    """How much of ``used`` must go, 0 when nothing must.

    * Above the capacity the rest goes in any case, if the marks drain.
    * Above the high mark usage goes down to the low one. What is being written counts as used,
      but eviction frees none of it: it stops where half is left of what the low mark grants to the
      rest of the capacity, so that open writes alone never empty a cache (docs/decisions/0014).
    * A refused write, where a trigger applies, gets ``min(low, capacity - wanted)``; one that is
      larger than the whole capacity can never fit and gets what the low mark gives.
    """
    amount = max(0, used - marks.capacity) if marks.drains else 0
    if marks.high is None:
        return amount
    needs_room = wanted > 0 and used + wanted > marks.capacity
    if used > marks.high or needs_room:
        base = marks.capacity if marks.capacity < quota.UNLIMITED else marks.high
        others = max(0, base - being_written)
        kept = math.floor(others * (marks.low / base) * KEPT_SHARE) if base else 0
        amount = max(amount, min(used - marks.low, used - being_written - kept))
    if needs_room and wanted <= marks.capacity:
        amount = max(amount, used + wanted - marks.capacity)
    return amount


def group_excesses(
    group: InstanceGroup,
    uids: Iterable[str],
    ledger: Ledger,
    wanted: Mapping[Scope, int],
) -> Iterator[Excess]:
    """What a group must give back: as a whole, per type, and in keys of each instance.

    Each is measured when it is asked for, so that what was evicted for one counts for the next.

    Args:
        wanted: room that refused writes want.
    """

    def excess(scope: Scope, marks: Marks, used: int, being_written: int) -> Excess | None:
        want = wanted.get(scope, 0)
        amount = over(marks, used, being_written=being_written, wanted=want)
        return Excess(scope, amount, marks.capacity) if amount > 0 else None

    held = ledger.group(group.name)
    found = excess(Scope(group.name), quota.group_marks(group), held.counted, held.open_bytes)
    if found:
        yield found
    for kind in _limited_types(group):
        held = ledger.group_type(group.name, kind)
        scope = Scope(group.name, storage_type=kind)
        found = excess(scope, quota.type_marks(group, kind), held.counted, held.open_bytes)
        if found:
            yield found
    marks = quota.key_marks(group)
    if marks.capacity < quota.UNLIMITED:
        for uid in uids:
            held = ledger.instance(uid)
            scope = Scope(group.name, uid=uid)
            found = excess(scope, marks, held.blocks, held.open_blocks)
            if found:
                yield found


def _limited_types(group: InstanceGroup) -> list[StorageType]:
    return [entry.storage_type for entry in group.quota.quota_config] if group.quota else []


def storage_excess(config: StorageConfig, ledger: Ledger, wanted: Mapping[Scope, int]) -> int:
    """Bytes that must go from a storage. Trash fills it too, but is gone already for the marks."""
    scope = Scope(storage=config.global_unique_name)
    held = ledger.storage(config.global_unique_name)
    return over(
        quota.storage_marks(config),
        held.counted,
        being_written=held.open_bytes,
        wanted=wanted.get(scope, 0),
    )


def shares(
    config: StorageConfig, amount: int, groups: Iterable[InstanceGroup], ledger: Ledger
) -> list[Excess]:
    """Who gives back how much of ``amount`` bytes of a storage (docs/decisions/0013).

    What is to remain there is shared out among the groups that hold bytes on it, by their quotas
    (a group without one counts with the storage's capacity). The group furthest above its share
    gives first, down to its share; a group at or below its share gives nothing.
    """
    name = config.global_unique_name
    capacity = quota.storage_capacity(config)
    held = {
        g.name: (ledger.group_storage(g.name, name).counted, min(quota.group_capacity(g), capacity))
        for g in groups
    }
    held = {group: both for group, both in held.items() if both[0] > 0}
    remains = sum(used for used, _ in held.values()) - amount
    weights = sum(weight for _, weight in held.values())
    above = {
        group: used - (remains * weight // weights if weights else 0)
        for group, (used, weight) in held.items()
    }
    found: list[Excess] = []
    for group in sorted(above, key=lambda g: (-above[g], g)):
        give = min(amount, above[group])
        if give > 0:
            found.append(Excess(Scope(group, storage=name), give, capacity))
            amount -= give
    return found
