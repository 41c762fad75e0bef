"""What the parts of a repair run share: surroundings, options, report, reading raw records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvcm.core.clock import Clock
from kvcm.core.errors import CorruptRecord
from kvcm.core.limits import HOME_SHARDS
from kvcm.metaindex import records
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Extent, Phase, State
from kvcm.metaindex.store import ShardId, Table, Values, values_of
from kvcm.metaindex.stores.common import Turn
from kvcm.reclaimer.base import Surroundings
from kvcm.reclaimer.repair_report import RepairOptions, RepairReport
from kvcm.registry.view import RegistryView
from kvcm.storage_backends.base import DataStorageBackend

FINDINGS_MAX = 200_000
"""Findings a kind that one run mends; the next one takes the others."""
SHARE_MAX = 0.05
"""A larger part of a storage is never given up without a human (design.md §5)."""


class Lost(Enum):
    """Why an extent cannot be read."""

    ABSENT = "absent"
    UNREADABLE = "unreadable"


Found = tuple[Extent, State]


@dataclass(frozen=True, slots=True)
class RepairPorts:
    """What repair needs beyond the loops' surroundings."""

    around: Surroundings
    view: Callable[[], RegistryView]
    backend: Callable[[str], DataStorageBackend | None]
    available: Callable[[str], bool]


@dataclass(slots=True)
class Scope:
    """One run."""

    ports: RepairPorts
    options: RepairOptions
    report: RepairReport
    broken: dict[str, set[bytes]] = field(default_factory=dict)
    """Extents that do not read, by instance uid."""

    @property
    def around(self) -> Surroundings:
        return self.ports.around

    @property
    def clock(self) -> Clock:
        return self.ports.around.clock

    def turn(self) -> Turn:
        """Tells when the event loop is due to the others."""
        return Turn(self.clock)

    def indexes(self) -> list[InstanceIndex]:
        """The instances to look at: claimed, loaded, not about to be removed."""
        return [
            index
            for index in self.around.index.by_uid.values()
            if index.loaded and not index.closed and self._is_meant(index)
        ]

    def unloaded(self) -> list[str]:
        """Ids of instances that cannot be looked at yet."""
        indexes = self.around.index.by_uid.values()
        return [
            i.instance.instance_id
            for i in indexes
            if not i.loaded and not i.closed and self._is_meant(i)
        ]

    def _is_meant(self, index: InstanceIndex) -> bool:
        wanted = self.options.instance
        return not wanted or wanted in (index.uid, index.instance.instance_id)

    def storages(self) -> list[str]:
        """The storages to look at."""
        names = list(self.ports.view().storages)
        return [n for n in names if not self.options.storage or n == self.options.storage]

    def is_live(self, index: InstanceIndex) -> bool:
        """Whether an instance still is what it was when it was looked at."""
        return self.around.index.by_uid.get(index.uid) is index and not index.closed

    def grace_s(self) -> float:
        """Seconds that bytes outlive the commit that gave them up, in any group."""
        groups = [group.name for group in self.around.groups()]
        return max((self.around.grace_s(name) for name in groups), default=0.0)

    def age_s_min(self) -> float:
        """A younger file may still have a writer that nobody knows of any more."""
        return self.around.late_s + self.grace_s()

    def is_excess(self, part: int, whole: int) -> bool:
        """Whether so much is only given up with a human's consent."""
        return part > whole * SHARE_MAX and not self.options.force


async def get_many(
    index: InstanceIndex, asked: Sequence[tuple[int, Sequence[bytes]]], table: Table
) -> list[Values]:
    """Records by shard number, from claimed shards.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: a shard.
    """
    await index.shards.ensure(number for number, _ in asked)
    keys: list[tuple[ShardId, Sequence[bytes]]] = [(index.shards.id(n), k) for n, k in asked]
    return values_of(await index.shared.store.get_many(keys, table))


async def read_extents(
    index: InstanceIndex, extent_ids: Iterable[bytes]
) -> dict[bytes, Found | Lost]:
    """Extents as stored, past every cache; unlike other reads it tells absent from unreadable.

    The parts of a record are not read at one moment: one that is just being made or forgotten may
    seem unreadable.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: a shard.
    """
    groups: dict[int, list[bytes]] = {}
    for extent_id in dict.fromkeys(extent_ids):
        groups.setdefault(home_shard(extent_id), []).append(extent_id)
    parts = list(groups.items())
    if not parts:
        return {}
    states = await get_many(index, parts, Table.STATES)
    heads = [(n, [records.chunk_key(e, 0) for e in ids]) for n, ids in parts]
    firsts = await get_many(index, heads, Table.EXTENTS)
    out: dict[bytes, Found | Lost] = {}
    more: list[tuple[Extent, int, State]] = []
    turn = Turn(index.clock)
    for (_, ids), shard_states, shard_firsts in zip(parts, states, firsts, strict=True):
        for extent_id, raw_state, first in zip(ids, shard_states, shard_firsts, strict=True):
            if turn.is_over():
                await turn.give()
            if raw_state is None and first is None:
                out[extent_id] = Lost.ABSENT
                continue
            out[extent_id] = Lost.UNREADABLE
            try:
                state = records.decode_state(extent_id, raw_state or b"")
                head, count = records.decode_header(extent_id, first or b"")
            except CorruptRecord:
                continue
            if head.count == count:
                out[extent_id] = head, state
            else:
                more.append((head, count, state))
    for head, count, state in more:
        keys = [records.chunk_key(head.extent_id, i) for i in range(1, records.chunk_count(count))]
        (rest,) = await get_many(index, [(home_shard(head.extent_id), keys)], Table.EXTENTS)
        try:
            out[head.extent_id] = records.join_chunks(head, count, rest), state
        except CorruptRecord:
            continue
    return out


async def read_trash(index: InstanceIndex) -> dict[bytes, int]:
    """By extent, the objects that wait in the trash, as a bit set; what does not parse is left out.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: the store.
    """
    found: dict[bytes, int] = {}
    await index.shards.ensure(range(HOME_SHARDS))
    for number in range(HOME_SHARDS):
        async for page in index.shared.store.scan(index.shards.id(number), Table.TRASH):
            for key, value in page:
                try:
                    trash = records.decode_trash(key, value)
                except CorruptRecord:
                    continue
                found[trash.extent_id] = found.get(trash.extent_id, 0) | trash.objects
    return found


def is_over(phase: Phase) -> bool:
    """Whether an extent's blocks are gone, and its records about to go."""
    return phase in (Phase.RETIRED, Phase.ABORTED)
