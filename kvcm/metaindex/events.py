"""What happens to blocks, told to whoever watches: metrics, the hit-rate ceiling, trace events.

There is one event for each thing that happens to a request or an extent, never one per key, and
keys go along as they are. Nobody watching, no event is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum

import msgspec
import numpy as np

from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import Instance, QueryType, ReclaimPolicy
from kvcm.metaindex import bits
from kvcm.metaindex.entry import Entry
from kvcm.metaindex.layout import held_by, live_blocks, live_bytes
from kvcm.metaindex.records import Cause, Extent, Phase, State

_log = logging.getLogger(__name__)


class Reason(IntEnum):
    """How a write session ended, or why blocks went.

    A write session is FINISHED by its client, EXPIRED, ABANDONED (its client was gone before it got
    the answer), or ended by what took its blocks. Blocks go because they were EVICTED for room, or
    were older than a ttl (AGED), by RemoveCache or TrimCache (REMOVED, TRIMMED), with their storage
    or their instance (STORAGE, INSTANCE), because readers REPORTED them or repair found them gone
    (REPAIRED), or because a row names no more places (CROWDED). OTHER: nobody said.
    """

    OTHER = 0
    FINISHED = 1
    EXPIRED = 2
    ABANDONED = 3
    EVICTED = 4
    AGED = 5
    REMOVED = 6
    TRIMMED = 7
    STORAGE = 8
    INSTANCE = 9
    REPORTED = 10
    REPAIRED = 11
    CROWDED = 12


class LookedUp(msgspec.Struct, frozen=True):
    """GetCacheLocation was answered.

    ``batch`` are all keys asked for (hashed from ``tokens`` when the request brought none) and
    ``mask`` what the client has already. ``wanted`` from byte ``at`` of its data on are the other
    keys: so many ``blocks``, of which ``hits`` were answered. ``unreadable``: a prefix ended at a
    block on a storage that cannot be read.
    """

    instance: Instance
    query: QueryType
    batch: KeyBatch
    tokens: KeyBatch | None
    mask: BlockMask | None
    sw_size: int
    wanted: KeyBatch
    at: int
    blocks: int
    hits: int
    unreadable: bool = False


class WriteStarted(msgspec.Struct, frozen=True):
    """StartWriteCache was answered with a session.

    ``asked`` are all keys of the request and ``granted`` those to be written, both raw (8 bytes
    each); ``size`` is the bytes granted. ``mask`` is what need not be written. ``storage`` is empty
    when nothing was granted.
    """

    instance: Instance
    session_id: str
    asked: bytes
    tokens: KeyBatch | None
    mask: BlockMask
    granted: bytes
    size: int
    storage: str


class WriteRefused(msgspec.Struct, frozen=True):
    """A limit or admission let some of what a StartWriteCache lacks not through.

    ``reason`` as on the wire. One request may be cut for two reasons: two events. ``whole``: it was
    granted nothing.
    """

    instance: Instance
    reason: str
    keys: bytes
    storage: str
    whole: bool


class WriteFinished(msgspec.Struct, frozen=True):
    """A write session that was granted something is over.

    ``keys`` are all that it was granted, raw; empty if they are not known (so it is when the index
    store answered nothing and the record was found changed later). Sets of positions in it:
    ``held``, what it had until now (not what was removed meanwhile), ``success``, what the client
    said it wrote, ``published``, what is served from now on. Sizes in bytes: ``size`` of what it
    held, ``published_size``, and ``failed_size`` of what it held and did not write.
    """

    instance: Instance
    session_id: str
    how: Reason
    keys: bytes
    count: int
    held: int
    success: int
    published: int
    size: int
    published_size: int
    failed_size: int
    storage: str


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks of one extent stopped being served, or will not be.

    ``keys`` are raw, and empty when they are not known (see `WriteFinished`); ``size`` is their
    bytes. ``policy`` is their group's. ``was_open``: they were taken from a session that goes on.
    """

    instance: Instance
    reason: Reason
    keys: bytes
    blocks: int
    size: int
    storage: str
    policy: ReclaimPolicy
    was_open: bool = False


class Cleared(msgspec.Struct, frozen=True):
    """All that an instance held is dead from now on: TRIMMED, or the INSTANCE was removed.

    A `BlocksRemoved` follows for each extent when its space is freed.
    """

    instance: Instance
    reason: Reason


Event = LookedUp | WriteStarted | WriteRefused | WriteFinished | BlocksRemoved | Cleared
Watcher = Callable[[Event], None]


class Watchers(list[Watcher]):
    """Who is told. A watcher runs in the middle of a call: it keeps what it needs and returns."""

    def tell(self, event: Event) -> None:
        """Call them all."""
        for watcher in self:
            try:
                watcher(event)
            except Exception:
                # Whoever only looks on must not make a call fail, least of all half a commit.
                _log.exception("a watcher failed")


def keys_at(raw: bytes, positions: int) -> bytes:
    """The raw keys at a set of positions."""
    if positions == bits.ones(len(raw) // 8):
        return raw
    keys = np.frombuffer(raw, dtype="<i8")
    return keys[bits.to_flags(positions, len(keys))].tobytes()


class Changed(msgspec.Struct, frozen=True):
    """An extent's record went from one state to another.

    ``entry`` is as it was before. ``before`` is None when nobody saw that state; ``keyless``: the
    extent has zeros in place of its keys.
    """

    instance: Instance
    entry: Entry
    extent: Extent
    before: State | None
    state: State
    reason: Reason
    keyless: bool = False

    def event(
        self, session_of: Callable[[bytes], str], policy: ReclaimPolicy
    ) -> WriteFinished | BlocksRemoved | None:
        """What that means; None when no block changed its place."""
        was = self.entry.phase
        if was is Phase.OPEN and self.state.phase is not Phase.OPEN:
            return self._finished(session_of(self.extent.extent_id))
        return self._removed(policy) if was in (Phase.OPEN, Phase.SETTLED) else None

    def _live(self) -> int | None:
        before = self.before or self.entry.state
        if before is not None:
            return live_blocks(self.extent, before)
        everything = bits.ones(self.extent.count)
        return everything if self.entry.held.blocks == self.extent.count else None

    def _finished(self, session_id: str) -> WriteFinished:
        extent, state, live = self.extent, self.state, self._live()
        held = bits.ones(extent.count) if live is None else live
        published = state.serving if state.phase is Phase.SETTLED else 0
        return WriteFinished(
            self.instance,
            session_id,
            self._how(),
            b"" if self.keyless else extent.keys,
            extent.count,
            held,
            state.finished,
            published,
            self.entry.held.open_bytes,
            live_bytes(extent, published),
            live_bytes(extent, held & ~state.finished),
            extent.storage,
        )

    def _how(self) -> Reason:
        """What the record says counts: it may be found changed by somebody with another reason."""
        if self.state.phase is not Phase.ABORTED and self.state.finished_ms:
            return Reason.FINISHED
        if self.state.cause is Cause.EXPIRED:
            return Reason.ABANDONED if self.reason is Reason.ABANDONED else Reason.EXPIRED
        return self.reason

    def _removed(self, policy: ReclaimPolicy) -> BlocksRemoved | None:
        extent, held = self.extent, self.entry.held
        left = held_by(extent, self.state)
        blocks = held.blocks - left.blocks
        if blocks <= 0:
            return None
        live = self._live()
        keys = b""
        if live is not None and not self.keyless:
            keys = keys_at(extent.keys, live & ~live_blocks(extent, self.state))
        return BlocksRemoved(
            self.instance,
            self.reason,
            keys,
            blocks,
            held.open_bytes + held.serving_bytes - left.open_bytes - left.serving_bytes,
            extent.storage,
            policy,
            self.entry.phase is Phase.OPEN,
        )
