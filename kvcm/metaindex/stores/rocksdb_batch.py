"""What a RocksStore writes in one go."""

from __future__ import annotations

from collections.abc import Sequence

import rocksdict

from kvcm.metaindex.store import PlainWrite, ShardId
from kvcm.metaindex.stores.rocksdb_layout import META_TABLE, Meta


class Batch:
    """What several shards write at once: one entry of the log, and one fsync where asked for.

    ``metas`` are the shards' meta records afterwards, ``places`` where their results stand.
    """

    def __init__(self) -> None:
        self.raw = rocksdict.WriteBatch(raw_mode=True)
        self.metas: dict[ShardId, Meta] = {}
        self.places: list[int] = []
        self.writes = 0

    def add(self, shard: ShardId, meta: Meta, encoded: bytes, place: int) -> None:
        """A shard's new meta record."""
        self.metas[shard] = meta
        self.places.append(place)
        self.raw.put(meta.prefixes[META_TABLE], encoded)

    def extend(self, prefixes: Sequence[bytes], writes: Sequence[PlainWrite]) -> None:
        """A mutation's writes."""
        put, delete = self.raw.put, self.raw.delete
        for table, key, value in writes:
            if value is None:
                delete(prefixes[table] + key)
            else:
                put(prefixes[table] + key, value)
        self.writes += len(writes)
