"""What all instances of one index share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcm.core.clock import Clock
from kvcm.core.types import StorageType
from kvcm.metaindex.events import Watchers
from kvcm.metaindex.ids import make_extent_id
from kvcm.metaindex.ledger import Ledger
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.ports import StorageSet
from kvcm.metaindex.pressure import Pressure, Refusals
from kvcm.metaindex.readcache import ReadCache
from kvcm.metaindex.records import Quarantine, Trash
from kvcm.metaindex.shards import ClaimNumbers
from kvcm.metaindex.store import KVStore

if TYPE_CHECKING:
    from kvcm.metaindex.instance import InstanceIndex


class Shared:
    """Store, clock, caches and totals of one leader."""

    def __init__(
        self,
        store: KVStore,
        storages: StorageSet,
        clock: Clock,
        *,
        epoch: int,
        cluster_uid: str,
        secret: bytes,
        cache_bytes: int,
        watchers: Watchers | None = None,
    ) -> None:
        self.store = store
        self.storages = storages
        self.clock = clock
        self.epoch = epoch
        self.cluster_uid = cluster_uid
        self.secret = secret
        self.numbers = ClaimNumbers(epoch)
        self.cache = ReadCache(cache_bytes)
        self.ledger = Ledger()
        self.pressure = Pressure()
        self.refusals = Refusals()
        self.quarantine = Quarantine()
        self.watchers = Watchers() if watchers is None else watchers
        self.storage_types: dict[str, StorageType] = {}
        self.on_trash: Callable[[InstanceIndex, Trash], None] = lambda _index, _trash: None
        self._orders: dict[str, EvictionOrder] = {}
        self._extents_made = 0

    def order_of(self, group: str) -> EvictionOrder:
        """The eviction order of a group."""
        return self._orders.setdefault(group, EvictionOrder())

    def type_of(self, storage: str) -> StorageType:
        """Type of a storage by name; UNSPECIFIED when it was never known."""
        return self.storage_types.get(storage, StorageType.UNSPECIFIED)

    def new_extent_id(self) -> bytes:
        """An extent id, unique for ever."""
        self._extents_made += 1
        return make_extent_id(self.epoch, self._extents_made, self.clock.random_bytes(4))
