"""The limits that a write meets, what they leave, and what eviction could do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.cache.placement import Candidate, Grant, Room
from kvcm.core import quota
from kvcm.core.quota import Marks
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.pressure import Scope, Want


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit at one moment, in bytes, or in blocks when the scope has a ``uid``.

    ``used`` is what its marks count; ``trash`` fills a storage as well until it is deleted.
    """

    reason: str
    scope: Scope
    marks: Marks
    used: int
    trash: int = 0

    @property
    def in_blocks(self) -> bool:
        """Counts blocks, not bytes."""
        return self.scope.uid is not None

    @property
    def left(self) -> int:
        """What still fits."""
        if self.marks.capacity >= quota.UNLIMITED:
            return quota.UNLIMITED
        return self.marks.capacity - self.used - self.trash


def limits_of(
    index: InstanceIndex, group: InstanceGroup, name: str, config: StorageConfig | None
) -> list[Limit]:
    """All limits of a write of an instance to the storage ``name``, as they stand now."""
    shared = index.shared
    ledger = shared.ledger
    kind = shared.type_of(name)
    return [
        Limit(
            "QUOTA_GROUP",
            Scope(group.name),
            quota.group_marks(group),
            ledger.group(group.name).counted,
        ),
        Limit(
            "QUOTA_TYPE",
            Scope(group.name, storage_type=kind),
            quota.type_marks(group, kind),
            ledger.group_type(group.name, kind).counted,
        ),
        Limit(
            "STORAGE_FULL",
            Scope(storage=name),
            quota.storage_marks(config),
            ledger.storage(name).counted,
            ledger.storage(name).trash_bytes,
        ),
        Limit(
            "MAX_KEY_COUNT",
            Scope(group.name, uid=index.uid),
            quota.key_marks(group),
            ledger.instance(index.uid).blocks,
        ),
    ]


def candidate(
    index: InstanceIndex, group: InstanceGroup, name: str, config: StorageConfig | None
) -> Candidate:
    """A storage as placement sees it."""
    _, of_type, own, _ = limits_of(index, group, name, config)
    storages = index.shared.storages
    return Candidate(
        name,
        index.shared.type_of(name),
        of_type.left,
        own.left,
        storages.free_bytes(name),
        storages.available_for_s(name),
    )


def rooms(limits: Sequence[Limit]) -> list[Room]:
    """What each limit leaves."""
    return [Room(limit.reason, limit.left, limit.in_blocks) for limit in limits]


def wants(limits: Sequence[Limit], grant: Grant, sizes: Sequence[int]) -> list[Want]:
    """The room that eviction could make for a write that was cut.

    Nothing when the limit that cut it has no trigger: eviction could not cure that.
    """
    curable = {limit.reason: limit for limit in limits if limit.marks.high is not None}
    if grant.reason not in curable:
        return []
    needed = {True: len(sizes), False: sum(sizes)}
    return [
        Want(curable[reason].scope, needed[curable[reason].in_blocks])
        for reason in grant.short
        if reason in curable
    ]


def crosses(limits: Sequence[Limit], size: int, blocks: int) -> bool:
    """Whether a grant of so much takes usage over a mark."""
    return any(
        limit.marks.high is not None
        and limit.used + (blocks if limit.in_blocks else size) > limit.marks.high
        for limit in limits
    )
