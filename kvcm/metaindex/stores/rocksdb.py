"""RocksStore: the KVStore contract over an embedded RocksDB."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import rocksdict

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import KvcmError, OutcomeUnknown, Unavailable
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Compare,
    Fence,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Values,
)
from kvcm.metaindex.stores.common import Turn, add_counters, below, matches, pick, stale
from kvcm.metaindex.stores.rocksdb_batch import Batch
from kvcm.metaindex.stores.rocksdb_layout import (
    FIRST_SPACE,
    META_TABLE,
    Meta,
    after,
    decode_meta,
    point_between,
    shard_prefix,
    table_prefix,
    table_prefixes,
)
from kvcm.metaindex.stores.rocksdb_open import MIB, open_rocksdb

_KEYS_A_LOOK = 64
"""Keys read between two looks at the clock."""
_WRITES_A_BATCH = 256
"""Writes after which a batch goes to the store, about 1 ms of work."""
_RECORDS_A_LOOK = 16
"""Records read between two looks at the clock; some are tens of KiB."""
_RECORDS_NEAR = 8
"""Records behind a random point that a sample picks one of, against gaps between the keys."""


class RocksStore:
    """An index store in a directory of this machine, for one process at a time.

    Durability: with ``sync=False`` (the default) a commit is in the write-ahead log, handed to the
    kernel, before it is acknowledged. It survives any end of the process, ``kill -9`` included. A
    power loss or a kernel crash may lose the latest commits: always a suffix of them, across all
    shards, never one without those before it. A block retired in what was lost may then be answered
    again although its bytes are deleted; its readers fail to find them. With ``sync=True`` every
    commit waits for an fsync and survives a power loss too, at some milliseconds a commit on
    ordinary disks, during which the event loop stands still.

    Everything runs on the event loop, since the binding keeps the interpreter lock anyway. A
    shard's commit is one indivisible step of about 2 µs a write, so callers cut large ones; between
    shards, and within large reads, other tasks get their turn.

    Args:
        path: directory; made when missing, with its parents.
        sync: fsync every commit.
        cache_bytes: block cache, which holds index and filter blocks too.
        write_buffer_bytes: memtables; with the cache this bounds the store's memory.
    """

    read_ahead: int = 1

    def __init__(
        self,
        path: str | Path,
        *,
        sync: bool = False,
        cache_bytes: int = 128 * MIB,
        write_buffer_bytes: int = 64 * MIB,
        clock: Clock | None = None,
    ) -> None:
        self._path = Path(path)
        self._cache_bytes = cache_bytes
        self._write_buffer_bytes = write_buffer_bytes
        self._clock: Clock = clock or SystemClock()
        self._write_options = rocksdict.WriteOptions()
        self._write_options.sync = sync
        self._db: rocksdict.Rdict | None = None
        self._metas: dict[ShardId, Meta] = {}

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        get = self._open_db().get
        turn = Turn(self._clock)
        answers: list[Values | KvcmError] = []
        for shard, keys in shard_keys:
            join = table_prefix(shard, table).__add__
            values: Values = []
            for at in range(0, len(keys), _KEYS_A_LOOK):
                if turn.is_over():
                    await turn.give()
                    get = self._open_db().get
                # The binding's stubs know no list of bytes.
                part: Any = list(map(join, keys[at : at + _KEYS_A_LOOK]))
                with self._reading():
                    # A list is one crossing into the library for all of its keys.
                    found: Any = get(part) if len(part) > 1 else [get(part[0])]
                values += found
            answers.append(values)
        return answers

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        self._open_db()
        turn = Turn(self._clock)
        results: list[CommitResult] = []
        batch = Batch()
        for commit in commits:
            if turn.is_over() or batch.writes > _WRITES_A_BATCH or commit.shard in batch.metas:
                self._write_batch(batch, results)
                batch = Batch()
                if turn.is_over():
                    await turn.give()
            try:
                results.append(self._commit(commit, batch, len(results)))
            except KvcmError as error:
                results.append(CommitResult(error=error))
        self._write_batch(batch, results)
        return results

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        self._open_db()
        turn = Turn(self._clock)
        answers: list[Claim | Exception] = []
        for shard in shards:
            if turn.is_over():
                await turn.give()
            try:
                answers.append(self._claim(shard, fence))
            except KvcmError as error:
                answers.append(error)
        return answers

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        metas = map(self._meta, shards)
        return [0 if meta is None else meta.number for meta in metas]

    async def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Pages hold at most ``page`` records, fewer where more would hold the loop too long."""
        prefix = table_prefix(shard, table)
        start = prefix
        while records := self._page(prefix, start, max(page, 1)):
            yield records
            start = prefix + records[-1][0] + b"\0"
            await asyncio.sleep(0)

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        """A table of few records is drawn from exactly, a larger one at random points of its key
        range: so records behind wide gaps come up more often. Keys are best spread evenly.
        """
        prefix = table_prefix(shard, table)
        few: list[tuple[bytes, bytes]] = []
        async for part in self.scan(shard, table, page=2 * count + 1):
            few += part
            if len(few) > 2 * count:
                break
        last = self._last_key(prefix)
        if count <= 0 or last is None or few[-1][0] >= last:
            return pick(few, count, self._clock)
        turn = Turn(self._clock)
        found: dict[bytes, bytes] = {}
        for _ in range(count):
            if turn.is_over():
                await turn.give()
            self._find_other(prefix, point_between(few[0][0], last, self._clock), found)
        return list(found.items())

    async def count(self, shard: ShardId, table: Table) -> int:
        """Walks the table: about 0.5 s a million records, in slices."""
        prefix = table_prefix(shard, table)
        total = 0
        start: bytes | None = prefix
        while start is not None:
            number, start = self._count_from(prefix, start)
            total += number
            await asyncio.sleep(0)
        return total

    async def drop(self, shard: ShardId) -> None:
        prefix = shard_prefix(shard)
        batch = rocksdict.WriteBatch(raw_mode=True)
        batch.delete_range(prefix, after(prefix))
        self._metas.pop(shard, None)
        self._write(batch)

    async def spaces(self) -> list[bytes]:
        found: list[bytes] = []
        start: bytes | None = FIRST_SPACE
        while start is not None:
            start = self._spaces_from(start, found)
            await asyncio.sleep(0)
        return sorted(found)

    async def open(self) -> None:
        """Take the directory's lock and recover; returns at once when open already.

        Raises:
            ConfigError: the path is no directory or cannot be written, another process holds it, it
                holds another program's data or a newer format, or RocksDB cannot recover it.
        """
        if self._db is None:
            self._db = open_rocksdb(
                self._path,
                cache_bytes=self._cache_bytes,
                write_buffer_bytes=self._write_buffer_bytes,
            )

    async def close(self) -> None:
        """Write the memtables out and release the lock."""
        db, self._db = self._db, None
        self._metas.clear()
        if db is not None:
            db.flush()
            db.close()

    # Synchronous from here on: an iterator that outlived an await would keep the lock at close.

    def _open_db(self) -> rocksdict.Rdict:
        if self._db is None:
            raise Unavailable(f"the index store at {self._path} is not open")
        return self._db

    def _commit(self, commit: ShardCommit, batch: Batch, place: int) -> CommitResult:
        """Decide one element and add what it writes to ``batch``, as the ``place``-th result."""
        shard, fence, mutations = commit.shard, commit.fence, commit.mutations
        meta = self._meta(shard)
        if meta is None or meta.fence != fence:
            raise stale(shard, fence, None if meta is None else meta.fence)
        prefixes = meta.prefixes
        # What this commit changed so far; needed only where a later mutation compares.
        changed: dict[bytes, bytes | None] | None = None
        if any(mutation.compare for mutation in islice(mutations, 1, None)):
            changed = {}
        counters = dict(meta.counters)
        outcomes: list[Outcome] = []
        for mutation in mutations:
            if mutation.compare and not self._holds(prefixes, mutation.compare, changed):
                outcomes.append(Outcome.CONFLICT)
                continue
            if changed is not None:
                changed |= {prefixes[table] + key: value for table, key, value in mutation.writes}
            add_counters(counters, mutation.counters)
            outcomes.append(Outcome.APPLIED)
        if Outcome.APPLIED not in outcomes:
            return CommitResult(outcomes, meta.number)
        meta = Meta(prefixes, fence, meta.number + 1, counters)
        # Encoded first: it may be refused, and the batch holds other shards' writes.
        batch.add(shard, meta, meta.encode(), place)
        for mutation, outcome in zip(mutations, outcomes, strict=True):
            if outcome is Outcome.APPLIED:
                batch.extend(prefixes, mutation.writes)
        return CommitResult(outcomes, meta.number)

    def _write_batch(self, batch: Batch, results: list[CommitResult]) -> None:
        if not batch.metas:
            return
        try:
            self._write(batch.raw)
        except KvcmError as error:
            # It may be in the log all the same: forget, and read what is there next time.
            for shard in batch.metas:
                self._metas.pop(shard, None)
            for place in batch.places:
                results[place] = CommitResult(error=error)
        else:
            self._metas.update(batch.metas)

    def _holds(
        self,
        prefixes: Sequence[bytes],
        compare: Sequence[Compare],
        changed: dict[bytes, bytes | None] | None,
    ) -> bool:
        for table, key, expected, whole in compare:
            full = prefixes[table] + key
            value = changed[full] if changed and full in changed else self._get(full)
            if not matches(value, expected, whole):
                return False
        return True

    def _claim(self, shard: ShardId, fence: Fence) -> Claim:
        meta = self._meta(shard)
        if meta is None:
            prefixes = table_prefixes(shard)
            meta = Meta(prefixes, fence, 0, {})
        elif fence <= meta.fence:
            raise stale(shard, fence, meta.fence)
        else:
            meta = replace(meta, fence=fence)
        batch = Batch()
        batch.add(shard, meta, meta.encode(), 0)
        # As in `_write_batch`: a write that fails may have happened.
        self._metas.pop(shard, None)
        self._write(batch.raw)
        self._metas[shard] = meta
        return Claim(meta.number, dict(meta.counters))

    def _meta(self, shard: ShardId) -> Meta | None:
        meta = self._metas.get(shard)
        if meta is None:
            prefixes = table_prefixes(shard)
            value = self._get(prefixes[META_TABLE])
            if value is None:
                return None
            meta = self._metas[shard] = decode_meta(prefixes, value)
        return meta

    def _write(self, batch: rocksdict.WriteBatch) -> None:
        db = self._open_db()
        try:
            db.write(batch, self._write_options)
        except Exception as error:
            # The binding raises plain Exceptions; how far the batch came is not known.
            raise OutcomeUnknown(f"index store at {self._path}: {error}") from error

    def _get(self, key: bytes) -> bytes | None:
        db = self._open_db()
        with self._reading():
            value: bytes | None = db.get(key)
        return value

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The binding raises plain Exceptions with RocksDB's text.
            raise Unavailable(f"index store at {self._path}: {error}") from error

    # Iterators are not given bounds: the binding does not keep the bound's bytes alive.

    def _items(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        return cast(Iterator[tuple[bytes, bytes]], self._open_db().items(from_key=start))

    def _page(self, prefix: bytes, start: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """Up to ``limit`` records from ``start`` on, fewer when time is up; at least one if any."""
        turn = Turn(self._clock)
        items = self._items(start)
        skip = len(prefix)
        records: list[tuple[bytes, bytes]] = []
        with self._reading():
            while len(records) < limit:
                asked = min(_RECORDS_A_LOOK, limit - len(records))
                part = list(islice(items, asked))
                records += [(key[skip:], value) for key, value in part if key.startswith(prefix)]
                is_end = len(part) < asked or not part[-1][0].startswith(prefix)
                if is_end or turn.is_over():
                    break
        return records

    def _count_from(self, prefix: bytes, start: bytes) -> tuple[int, bytes | None]:
        """Records found in one slice of time, and where to go on; None at the end."""
        turn = Turn(self._clock)
        keys = cast(Iterator[bytes], self._open_db().keys(from_key=start))
        total = 0
        with self._reading():
            while True:
                part = list(islice(keys, _KEYS_A_LOOK))
                if len(part) < _KEYS_A_LOOK or not part[-1].startswith(prefix):
                    return total + sum(key.startswith(prefix) for key in part), None
                total += len(part)
                if turn.is_over():
                    return total, part[-1] + b"\0"

    def _last_key(self, prefix: bytes) -> bytes | None:
        cursor = self._open_db().iter()
        end = after(prefix)
        with self._reading():
            cursor.seek_for_prev(end)
            if cursor.valid() and cursor.key() == end:
                cursor.prev()
            key: bytes | None = cursor.key() if cursor.valid() else None
        if key is None or not key.startswith(prefix):
            return None
        return key[len(prefix) :]

    def _find_other(self, prefix: bytes, point: bytes, found: dict[bytes, bytes]) -> None:
        """Add one of the records behind ``point``, going round, that is not in ``found``."""
        skip = len(prefix)
        for start in (prefix + point, prefix):
            items = self._items(start)
            with self._reading():
                while part := list(islice(items, _RECORDS_NEAR)):
                    near = [item for item in part if item[0].startswith(prefix)]
                    if fresh := [item for item in near if item[0][skip:] not in found]:
                        key, value = fresh[below(len(fresh), self._clock)]
                        found[key[skip:]] = value
                        return
                    if len(near) < len(part):
                        break

    def _spaces_from(self, start: bytes, found: list[bytes]) -> bytes | None:
        """Add the spaces found in one slice of time; where to go on, None at the end."""
        turn = Turn(self._clock)
        cursor = self._open_db().iter()
        while not turn.is_over():
            cursor.seek(start)
            if not cursor.valid():
                return None
            key = cursor.key()
            prefix = key[: 1 + key[0]]
            found.append(prefix[1:])
            start = after(prefix)
        return start
