"""Loading an instance's extents into the leader's table."""

from __future__ import annotations

import abc
import asyncio
from dataclasses import replace

from kvcm.core.errors import CorruptRecord
from kvcm.core.limits import HOME_SHARDS
from kvcm.metaindex import records
from kvcm.metaindex.book import Entry
from kvcm.metaindex.ids import EXTENT_ID_BYTES, home_shard
from kvcm.metaindex.layout import held_by
from kvcm.metaindex.reading import InstanceReader
from kvcm.metaindex.records import Extent, Phase, Trash, Use
from kvcm.metaindex.store import Table
from kvcm.metaindex.stores.common import Turn

_SCAN_PAGE = 128
_LINKS_PER_STEP = 256
_UNUSED = Use()


class InstanceLoader(InstanceReader):
    """An instance that can be claimed and loaded."""

    @abc.abstractmethod
    def _trash_found(self, trash: Trash) -> None:
        """Trash is in the store whose bytes are still to be deleted."""

    async def load(self) -> None:
        """Claim the home shards and read their extents into memory; once, however often called.

        Raises:
            Unavailable, OutcomeUnknown, StaleFence: the store; call again.
        """
        async with self._loading:
            if self.loaded:
                return
            await self.shards.ensure(range(HOME_SHARDS))
            for number in range(HOME_SHARDS):
                await self._load_shard(number)
            await self._link()
            self.loaded = True

    async def _load_shard(self, number: int) -> None:
        shard = self.shards.id(number)
        store = self.shared.store
        self._generation[number] += 1
        # First of all: an extent that turns out to be over may be forgotten from then on, unless
        # its trash is known.
        await self._load_trash(number)
        known: list[bytes] = []
        if number in self._read_before:
            known = [e for e in self.book.entries if home_shard(e) == number]
        self._read_before.add(number)
        turn = Turn(self.clock)
        headers: dict[bytes, Extent] = {}
        counts: dict[bytes, int] = {}
        async for page in store.scan(shard, Table.EXTENTS, page=_SCAN_PAGE):
            for key, value in page:
                if turn.is_over():
                    await turn.give()
                if key[EXTENT_ID_BYTES:] == b"\0\0":
                    self._read_header(key[:EXTENT_ID_BYTES], value, headers, counts)
        uses: dict[bytes, Use] = {}
        async for page in store.scan(shard, Table.DUE):
            uses.update((k, records.decode_use(v)) for k, v in page)
        found: set[bytes] = set()
        async for page in store.scan(shard, Table.STATES, page=_SCAN_PAGE):
            for key, value in page:
                if turn.is_over():
                    await turn.give()
                extent = headers.get(key)
                if extent is not None and self._load_entry(extent, value, uses.get(key, _UNUSED)):
                    found.add(key)
        for extent_id in known:
            if extent_id not in found:
                self.book.forget(extent_id)
                self.shared.cache.invalidate(extent_id)
        if self.loaded:
            await self._link()

    async def _load_trash(self, number: int) -> None:
        found: dict[bytes, Trash] = {}
        before = [k for k in self.trash if home_shard(k) == number]
        async for page in self.shared.store.scan(self.shards.id(number), Table.TRASH):
            for key, value in page:
                try:
                    found[key] = records.decode_trash(key, value)
                except CorruptRecord as error:
                    self.shared.quarantine.add(error)
        # What came meanwhile was not there to be found.
        for key in before:
            if key not in found:
                self.trash.pop(key, None)
        for key, trash in found.items():
            if self.trash.get(key) != trash:
                self.trash[key] = trash
                self._trash_found(trash)

    def _read_header(
        self, extent_id: bytes, value: bytes, headers: dict[bytes, Extent], counts: dict[bytes, int]
    ) -> None:
        try:
            header, count = records.decode_header(extent_id, value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return
        # Only the header matters here; a stand-in for the keys keeps ``count`` right.
        headers[extent_id] = replace(header, keys=bytes(8 * count))
        counts[extent_id] = count

    def _load_entry(self, extent: Extent, value: bytes, use: Use) -> bool:
        try:
            state = records.decode_state(extent.extent_id, value)
        except CorruptRecord as error:
            self.shared.quarantine.add(error)
            return False
        # A view made before its entry was known would never be stamped, nor count as written.
        self.shared.cache.invalidate(extent.extent_id)
        known = self.book.entries.get(extent.extent_id)
        if known is not None and known.phase <= state.phase:
            # The same object goes on: sessions pin it and others build on it.
            opened, known.opened = known.opened, None
            self._follow(known, opened or extent, state, known.state, keyless=opened is None)
            known.state = None
            return True
        entry = Entry(self.uid, extent, state, held_by(extent, state))
        entry.stamp_ms, entry.heat = max(use.stamp_ms, state.stamp_ms), use.heat
        deadline = self.clock.monotonic() + extent.timeout_s
        entry.keep_until = deadline
        self.book.add_unlinked(entry, extent.runs, extent.followers, use.parents)
        if state.phase is Phase.OPEN:
            self.book.expect(entry, deadline)
        elif state.phase is not Phase.SETTLED:
            self.ended.append(entry)
        return True

    async def _link(self) -> None:
        """Find what each extent that was read builds on; only then may the first be evicted."""
        read = list(self.book.unlinked)
        for step in (self.book.link_up, self.book.follow_up, self.book.admit):
            for number, entry in enumerate(read):
                step(entry)
                if number % _LINKS_PER_STEP == 0:
                    await asyncio.sleep(0)
