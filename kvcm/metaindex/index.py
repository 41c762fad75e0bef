"""All instances' indexes of this leader, following the registry."""

from __future__ import annotations

from collections.abc import Iterable

from kvcm.core.types import Instance
from kvcm.metaindex.events import Cleared, Reason
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.shared import Shared


class MetaIndex:
    """Indexes by instance uid and, for those that take requests, by instance id."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.by_uid: dict[str, InstanceIndex] = {}
        self.by_id: dict[str, InstanceIndex] = {}
        self.uncounted: dict[str, InstanceIndex] = {}
        """By uid, instances whose usage the ledger may not know yet (home shards not claimed)."""

    def follow(self, instances: Iterable[Instance], closing: Iterable[Instance]) -> None:
        """Take over what the registry says: new, changed, closing and forgotten instances."""
        known: set[str] = set()
        by_id: dict[str, InstanceIndex] = {}
        for instance in instances:
            known.add(instance.uid)
            index = self._index(instance)
            by_id[instance.instance_id] = index
        for instance in closing:
            known.add(instance.uid)
            self._close(self._index(instance))
        self.by_id = by_id
        for uid in self.by_uid.keys() - known:
            self._drop(self.by_uid.pop(uid))

    def _close(self, index: InstanceIndex) -> None:
        if not index.closed and self.shared.watchers:
            self.shared.watchers.tell(Cleared(index.instance, Reason.INSTANCE))
        index.closed = True

    def _index(self, instance: Instance) -> InstanceIndex:
        index = self.by_uid.get(instance.uid)
        if index is None:
            index = self.by_uid[instance.uid] = InstanceIndex(self.shared, instance)
            self.uncounted[instance.uid] = index
        index.instance = instance
        if instance.trim > index.trim:
            index.raise_trim(instance.trim)
        return index

    def _drop(self, index: InstanceIndex) -> None:
        index.closed = True
        index.shards.release_all()
        self.uncounted.pop(index.uid, None)
        self.shared.refusals.forget(index.uid)
        self.shared.cache.clear_instance(index.rows)
        for extent_id in list(index.book.entries):
            index.book.forget(extent_id)
        index.trash.clear()
