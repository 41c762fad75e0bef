"""What the ceiling needs of the events of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvcm.cache.plan import ADMISSION
from kvcm.core import quota
from kvcm.core.keys import KeyBatch, KeyForm
from kvcm.core.types import Instance, InstanceGroup, QueryType, StorageConfig
from kvcm.metaindex.events import (
    BlocksRemoved,
    Cleared,
    Event,
    LookedUp,
    Reason,
    WriteFinished,
    WriteRefused,
    WriteStarted,
    keys_at,
)
from kvcm.observability.causes import Fate
from kvcm.observability.ceiling import Ceilings

_FAILED = (Reason.FINISHED, Reason.EXPIRED, Reason.ABANDONED, Reason.OTHER)
_TOLD_BEFORE = (Reason.TRIMMED, Reason.INSTANCE)
"""`Cleared` told when; their space is freed later, when the keys may be there again."""


class CeilingWatcher:
    """A watcher of the cache (`kvcm.metaindex.events`)."""

    def __init__(self, ceilings: Ceilings) -> None:
        self._ceilings = ceilings

    def __call__(self, event: Event) -> None:
        if isinstance(event, LookedUp):
            if event.query is QueryType.PREFIX_MATCH:
                self._ceilings.asked(
                    event.instance.uid,
                    event.instance.instance_group,
                    event.wanted,
                    event.at,
                    event.hits,
                    unreadable=event.unreadable,
                )
        elif isinstance(event, WriteStarted):
            self._became(event.instance, event.granted, Fate.WRITING)
        elif isinstance(event, WriteFinished):
            self._finished(event)
        elif isinstance(event, WriteRefused):
            self._became(event.instance, event.keys, _refusal(event.reason))
        elif isinstance(event, BlocksRemoved):
            self._removed(event)
        elif isinstance(event, Cleared) and event.reason is Reason.TRIMMED:
            self._ceilings.trimmed(event.instance.uid)

    def _finished(self, event: WriteFinished) -> None:
        self._became(event.instance, keys_at(event.keys, event.published), Fate.HELD)
        fate = Fate.FAILED if event.how in _FAILED else Fate.REMOVED
        failed = keys_at(event.keys, event.held & ~event.published)
        self._became(event.instance, failed, fate)

    def _removed(self, event: BlocksRemoved) -> None:
        if event.reason is Reason.EVICTED:
            self._became(event.instance, event.keys, Fate.EVICTED, event.size)
        elif event.reason not in _TOLD_BEFORE:
            self._became(event.instance, event.keys, Fate.REMOVED)

    def _became(self, instance: Instance, keys: bytes, fate: Fate, size: int = 0) -> None:
        if keys or size:
            batch = KeyBatch(KeyForm.RAW, keys)
            self._ceilings.became(instance.uid, instance.instance_group, batch, fate, size)


def _refusal(reason: str) -> Fate:
    if reason == ADMISSION:
        return Fate.REFUSED_ADMISSION
    return Fate.REFUSED_STORAGE if reason == "NO_STORAGE" else Fate.REFUSED_QUOTA


def capacities(
    groups: Iterable[InstanceGroup], storages: Mapping[str, StorageConfig]
) -> dict[str, int | None]:
    """Bytes that each group may hold, as far as anything says so."""
    found: dict[str, int | None] = {}
    for group in groups:
        on_storages = (quota.storage_capacity(storages.get(n)) for n in group.storage_candidates)
        size = min(quota.group_capacity(group), sum(on_storages) or quota.UNLIMITED)
        found[group.name] = size if size < quota.UNLIMITED else None
    return found
