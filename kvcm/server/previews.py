"""The usage report with what the reclaimer would take next: both are known only here."""

from __future__ import annotations

from dataclasses import replace

from kvcm.cache.api import NextEviction, UsageReport
from kvcm.core import quota
from kvcm.core.types import STORAGE_TYPE_NAMES
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.pressure import Scope
from kvcm.reclaimer import preview
from kvcm.reclaimer.preview import Preview
from kvcm.registry.view import RegistryView


def look_ahead(report: UsageReport, index: MetaIndex, view: RegistryView) -> None:
    """Fill in ``next_eviction`` wherever a limit has a mark, or is exceeded."""
    shared, ledger = index.shared, index.shared.ledger

    def shown(found: Preview | None) -> NextEviction | None:
        if found is None:
            return None
        names = {u: index.by_uid[u].instance.instance_id for u in found.by_uid if u in index.by_uid}
        return NextEviction(
            found.planned,
            found.bytes,
            found.blocks,
            found.extents,
            found.complete,
            {names.get(uid, uid): size for uid, size in found.by_uid.items()},
        )

    for group in view.groups.values():
        name = group.name
        found = preview.of_scope(shared, Scope(name), quota.group_marks(group), ledger.group(name))
        report.groups[name] = replace(report.groups[name], next_eviction=shown(found))
        for entry in group.quota.quota_config if group.quota is not None else ():
            kind = entry.storage_type
            found = preview.of_scope(
                shared,
                Scope(name, storage_type=kind),
                quota.type_marks(group, kind),
                ledger.group_type(name, kind),
            )
            key = (name, STORAGE_TYPE_NAMES.get(kind, ""))
            report.group_types[key] = replace(report.group_types[key], next_eviction=shown(found))
    for instance_id, instance in index.by_id.items():
        of_group = view.groups.get(instance.group)
        if of_group is None or instance_id not in report.instances:
            continue
        found = preview.of_scope(
            shared,
            Scope(of_group.name, uid=instance.uid),
            quota.key_marks(of_group),
            ledger.instance(instance.uid),
        )
        usage = report.instances[instance_id]
        report.instances[instance_id] = replace(usage, next_eviction=shown(found))
    for config in view.storages.values():
        found = preview.of_storage(shared, config, view.groups.values())
        usage = report.storages[config.global_unique_name]
        report.storages[config.global_unique_name] = replace(usage, next_eviction=shown(found))
