"""What the edges ask of the cache use cases and what they get: plain values, no protobuf.

``body`` in the answers holds the response's ``locations`` entries already in wire form: for PROTO
the concatenation of ``locations`` fields (tag 2 in GetCacheLocation and GetCacheMeta, tag 4 in
StartWriteCache, each with tag and length); for JSON the comma-joined objects without brackets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, ReportOutcome, TrimStrategy


class WireForm(IntEnum):
    """The form in which an answer's locations are encoded."""

    PROTO = 0
    JSON = 1


@dataclass(slots=True)
class KeysRequest:
    """Keys of an instance: ``keys``, or ``token_ids`` when no keys are given (wire.md §3)."""

    instance_id: str
    keys: KeyBatch
    token_ids: KeyBatch | None = None
    """Token ids are int64 in the same packed or raw form; used only when ``keys`` is empty."""
    form: WireForm = WireForm.PROTO


@dataclass(slots=True)
class LookupRequest(KeysRequest):
    """GetCacheLocation."""

    query: QueryType | int = QueryType.PREFIX_MATCH
    mask: BlockMask | None = None
    sw_size: int = 0
    spec_names: tuple[str, ...] = ()
    multi_storage: bool = False


@dataclass(slots=True)
class LookupAnswer:
    """``pieces`` joined are the answer's body. ``hits`` counts matched keys that were returned,
    ``asked`` all keys of the request."""

    pieces: Sequence[bytes]
    hits: int
    asked: int

    @property
    def body(self) -> bytes:
        """The body in one piece; the transports join it with what stands around it instead."""
        return b"".join(self.pieces)


@dataclass(slots=True)
class MetaRequest(KeysRequest):
    """GetCacheMeta."""

    mask: BlockMask | None = None
    detail_level: int = 0


@dataclass(slots=True)
class MetaAnswer:
    """One location (in ``body``) and one JSON string for every unmasked key."""

    body: bytes
    metas: list[str]


@dataclass(slots=True)
class StartWriteRequest(KeysRequest):
    """StartWriteCache."""

    group_names: tuple[str, ...] = ()
    write_timeout_seconds: int = 0
    multi_storage: bool = False


@dataclass(slots=True)
class StartWriteAnswer:
    """``mask`` True = need not be written. ``reason`` is set when a limit cut the grant."""

    session_id: str
    mask: BlockMask
    body: bytes
    granted: int
    reason: str = ""


@dataclass(slots=True)
class FinishWriteRequest:
    """FinishWriteCache; ``success`` None = the message had no success_blocks."""

    instance_id: str
    session_id: str
    success: BlockMask | None


@dataclass(slots=True)
class RemoveRequest(KeysRequest):
    """RemoveCache; masked keys are kept."""

    mask: BlockMask | None = None


@dataclass(slots=True)
class TrimRequest:
    """TrimCache; timestamps in epoch seconds, by finish time, [begin, end)."""

    instance_id: str
    strategy: TrimStrategy | int
    begin_timestamp: int = 0
    end_timestamp: int = 0


@dataclass(slots=True)
class ReportRequest(KeysRequest):
    """ReportCacheError: one location a key, URI by spec name as a lookup answered them.

    A location without a URI reports nothing. ``kinds``: one a key, or one for all. ``reader``: who
    could not read, such as a host; all without one count as the same.
    """

    locations: Sequence[Mapping[str, str]] = ()
    kinds: Sequence[int] = ()
    reader: str = ""


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """One outcome a key, in order."""

    outcomes: Sequence[ReportOutcome]


@dataclass(frozen=True, slots=True)
class UsageLimit:
    """A limit in its ``unit`` (``bytes``, or ``blocks`` of an instance); None = there is none.

    ``effective``: of a group, what it could hold now, less than ``capacity`` when its storages are
    too full for that. Above ``high`` eviction takes usage down to ``low``.
    """

    unit: str
    capacity: int | None
    effective: int | None
    high: int | None
    low: int | None


@dataclass(frozen=True, slots=True)
class NextEviction:
    """What the next eviction for a limit would take if nothing were used meanwhile.

    ``planned`` is how much must go, in the limit's unit: now, or once the mark is crossed. The rest
    describes the extents that are first in line for it; ``complete`` tells whether they are all.
    ``instances``: bytes by instance id.
    """

    planned: int
    bytes: int
    blocks: int
    extents: int
    complete: bool
    instances: dict[str, int]


@dataclass(frozen=True, slots=True)
class Usage:
    """Space of one instance, group, storage or storage type, in bytes and blocks (design §5).

    ``refusals``: writes that a limit refused or cut, by reason, since the start.
    """

    open_bytes: int = 0
    serving_bytes: int = 0
    dead_bytes: int = 0
    trash_bytes: int = 0
    open_blocks: int = 0
    serving_blocks: int = 0
    limit: UsageLimit | None = None
    refusals: dict[str, int] = field(default_factory=dict)
    next_eviction: NextEviction | None = None

    @property
    def counted_bytes(self) -> int:
        """What limits and watermarks count: open + serving + dead."""
        return self.open_bytes + self.serving_bytes + self.dead_bytes


@dataclass(frozen=True, slots=True)
class AdmissionUsage:
    """What TinyLFU admission did in a group since the start.

    ``admitted`` and ``refused`` count blocks that were compared with what they would displace;
    ``uncounted`` requests whose keys were not counted because too many waited. ``ready``: it
    judges; until its first sample period is over it lets everything in.
    """

    ready: bool
    admitted: int
    refused: int
    uncounted: int


@dataclass(frozen=True, slots=True)
class ReadCacheUsage:
    """Records and encoded answers in memory. ``used`` counts extents that prefix lookups went
    over since the start, ``read`` those that were read from the index store for any call."""

    used_bytes: int = 0
    limit_bytes: int = 0
    extents: int = 0
    used: int = 0
    read: int = 0


@dataclass(slots=True)
class UsageReport:
    """Usage by instance id, group, storage name and (group, storage type name).

    ``refused`` and ``cut``: writes of which a limit let nothing, or only a part, through, by
    (group, reason). ``overdue``: write sessions past their deadline that have not been ended yet.
    ``epoch``: the leader's.
    """

    instances: dict[str, Usage] = field(default_factory=dict)
    uids: dict[str, str] = field(default_factory=dict)
    """Of those in ``instances``."""
    owners: dict[str, str] = field(default_factory=dict)
    """Their groups."""
    groups: dict[str, Usage] = field(default_factory=dict)
    storages: dict[str, Usage] = field(default_factory=dict)
    group_types: dict[tuple[str, str], Usage] = field(default_factory=dict)
    refused: dict[tuple[str, str], int] = field(default_factory=dict)
    cut: dict[tuple[str, str], int] = field(default_factory=dict)
    admission: dict[str, AdmissionUsage] = field(default_factory=dict)
    """By group, of those that asked for it."""
    error_reports: dict[tuple[str, str], int] = field(default_factory=dict)
    """Blocks that readers reported since the start, by (kind, outcome)."""
    read_cache: ReadCacheUsage = ReadCacheUsage()
    epoch: int = 0
    sessions: int = 0
    overdue: int = 0
    extents: int = 0
    quarantined: int = 0
    """Times a record that does not parse was met; the log names each."""


class CacheService(Protocol):
    """The use cases. Every call may raise any KvcmError; see core/errors.py for the codes.

    A ``start_write`` that is cancelled frees what it granted. A caller that finds after it that its
    client is gone calls ``abandon``, so that the grant is freed at once.
    """

    async def lookup(self, request: LookupRequest) -> LookupAnswer: ...

    async def get_meta(self, request: MetaRequest) -> MetaAnswer: ...

    async def start_write(self, request: StartWriteRequest) -> StartWriteAnswer: ...

    async def finish_write(self, request: FinishWriteRequest) -> None: ...

    async def abandon(self, instance_id: str, session_id: str) -> None: ...

    async def remove(self, request: RemoveRequest) -> None: ...

    async def trim(self, request: TrimRequest) -> None: ...

    async def report(self, request: ReportRequest) -> ReportAnswer: ...

    async def remove_instance(self, instance_id: str, group: str | None) -> None:
        """Close the instance and free it in the background; InstanceNotExist."""

    def prepare_instance(self, instance_id: str) -> None:
        """Called after a registration: makes folders, claims shards, in the background."""

    def storage_blocks(self, storage: str) -> int:
        """Blocks (open and serving) on a storage, over all groups."""

    async def drop_storage(self, storage: str) -> None:
        """Forget all blocks of a storage (they become misses); after a forced remove/update."""

    def busy_instance_uids(self) -> set[str]:
        """Uids of instances that hold blocks or open sessions."""

    def usage(self, *, ahead: bool = False) -> UsageReport:
        """Space as it is now.

        Args:
            ahead: with what the next evictions would take.
        """
