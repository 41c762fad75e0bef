"""Space as operators see it: what is used, what limits it, what was refused (design.md §5)."""

from __future__ import annotations

from collections.abc import Iterable

from kvcm.cache.api import ReadCacheUsage, Usage, UsageLimit, UsageReport
from kvcm.core import quota
from kvcm.core.quota import UNLIMITED, Marks
from kvcm.core.types import STORAGE_TYPE_NAMES, InstanceGroup
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.ledger import ZERO, Delta
from kvcm.metaindex.readcache import ReadCache
from kvcm.registry.view import RegistryView


def usage_report(index: MetaIndex, view: RegistryView) -> UsageReport:
    """The state of this moment. It costs a walk over instances, groups and storages."""
    shared = index.shared
    ledger, refusals = shared.ledger, shared.refusals
    report = UsageReport(quarantined=shared.quarantine.count, epoch=shared.epoch)
    report.read_cache = _read_cache(shared.cache)
    now = shared.clock.monotonic()
    report.refused, report.cut = dict(refusals.refused), dict(refusals.cut)
    of_instances = _reasons(((uid,), r, n) for (uid, r), n in refusals.instances.items())
    of_storages = _reasons(((name,), r, n) for (name, r), n in refusals.storages.items())
    of_types = _reasons(((g, k), r, n) for (g, k, r), n in refusals.types.items())
    both = [*refusals.refused.items(), *refusals.cut.items()]
    of_groups = _reasons(((group,), r, n) for (group, r), n in both)
    for uid, instance in index.by_uid.items():
        held = ledger.instance(uid)
        name = instance.instance.instance_id
        if instance.closed:
            name += f" (removed, {uid})"
        if held != ZERO or not instance.closed:
            group = view.groups.get(instance.group)
            limit = _limit(quota.key_marks(group), "blocks") if group is not None else None
            report.instances[name] = _usage(held, limit, of_instances.get((uid,)))
            report.uids[name], report.owners[name] = uid, instance.group
        report.extents += len(instance.book.entries) - len(instance.book.over)
        report.sessions += instance.book.open_count
        report.overdue += instance.book.overdue_count(now)
    for group in view.groups.values():
        limit = _limit(quota.group_marks(group), "bytes", effective(index, view, group))
        report.groups[group.name] = _usage(
            ledger.group(group.name), limit, of_groups.get((group.name,))
        )
        for entry in group.quota.quota_config if group.quota is not None else ():
            kind = entry.storage_type
            report.group_types[group.name, STORAGE_TYPE_NAMES.get(kind, "")] = _usage(
                ledger.group_type(group.name, kind),
                _limit(quota.type_marks(group, kind), "bytes"),
                of_types.get((group.name, kind)),
            )
    for (name, kind), delta in ledger.group_types.items():
        key = (name, STORAGE_TYPE_NAMES.get(kind, ""))
        if key not in report.group_types:
            report.group_types[key] = _usage(delta, None, of_types.get((name, kind)))
    for config in view.storages.values():
        name = config.global_unique_name
        limit = _limit(quota.storage_marks(config), "bytes")
        report.storages[name] = _usage(ledger.storage(name), limit, of_storages.get((name,)))
    return report


def effective(index: MetaIndex, view: RegistryView, group: InstanceGroup) -> int:
    """What a group could hold now: its capacity, or less when its storages are fuller than that.

    Quotas of several groups may add up to more than their storages hold.
    """
    ledger = index.shared.ledger
    free = 0
    for name in group.storage_candidates:
        config = view.storages.get(name)
        if config is None or not index.shared.storages.available(name):
            continue
        capacity = quota.storage_capacity(config)
        if capacity >= UNLIMITED:
            return quota.group_capacity(group)
        held = ledger.storage(name)
        free += max(0, capacity - held.counted - held.trash_bytes)
    return min(quota.group_capacity(group), ledger.group(group.name).counted + free)


def _read_cache(cache: ReadCache) -> ReadCacheUsage:
    return ReadCacheUsage(
        cache.used_bytes, cache.limit_bytes, len(cache.views), cache.used, cache.read
    )


def _reasons(
    counts: Iterable[tuple[tuple[object, ...], str, int]],
) -> dict[tuple[object, ...], dict[str, int]]:
    found: dict[tuple[object, ...], dict[str, int]] = {}
    for key, reason, count in counts:
        reasons = found.setdefault(key, {})
        reasons[reason] = reasons.get(reason, 0) + count
    return found


def _limit(marks: Marks, unit: str, effective: int | None = None) -> UsageLimit:
    capacity = None if marks.capacity >= UNLIMITED else marks.capacity
    if effective is not None and effective >= UNLIMITED:
        effective = None
    low = marks.low if marks.high is not None else None
    return UsageLimit(unit, capacity, effective, marks.high, low)


def _usage(delta: Delta, limit: UsageLimit | None, refusals: dict[str, int] | None) -> Usage:
    return Usage(*delta, limit=limit, refusals=refusals or {})
