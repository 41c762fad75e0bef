"""What the background loops share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError, NotReady, StaleFence
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.metaindex.book import Entry
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Cause, Extent, Phase, State

_log = logging.getLogger(__name__)

PER_ROUND = 512
"""Extents that one round of a loop changes."""
BACKOFF_S_FIRST = 1.0


@dataclass(slots=True)
class Report:
    """What one round did."""

    done: int = 0
    failed: int = 0
    waiting: int = 0


class Loop(Protocol):
    """One background loop."""

    name: str
    period_s: float

    async def run_once(self, now: float) -> Report:
        """One bounded round at monotonic time ``now``."""


class Deleter(Protocol):
    """The half of a storage backend that frees bytes."""

    async def delete(self, names: Sequence[str]) -> list[Exception | None]: ...

    async def remove_instance(self, cluster_uid: str, instance_uid: str) -> None: ...


@dataclass(frozen=True, slots=True)
class DeleteOptions:
    """How bytes are deleted.

    ``tries_max``: failures in a row after which an object is a dead letter, tried again only
    every ``dead_letter_retry_s`` seconds or so. ``at_once``: delete calls under way over all
    storages; ``per_storage``: of one.
    """

    tries_max: int = 10
    dead_letter_retry_s: float = 3600.0
    at_once: int = 8
    per_storage: int = 2


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the loops need from outside.

    ``registered`` tells whether a storage is still configured. ``grace_s`` is the least time
    between retiring and deleting for a group; ``late_s`` how long a writer may still re-create an
    object after its session ended.
    """

    index: MetaIndex
    clock: Clock
    groups: Callable[[], Iterable[InstanceGroup]]
    storages: Callable[[], Iterable[StorageConfig]]
    backend: Callable[[str], Deleter | None]
    registered: Callable[[str], bool]
    grace_s: Callable[[str], float]
    late_s: float
    forget_instance: Callable[[str], Awaitable[None]]
    deletes: DeleteOptions = DeleteOptions()


def retire_with(index: InstanceIndex) -> Callable[[Extent, State], State | None]:
    """A decision that takes out whatever serves, and cancels what is open."""

    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is Phase.OPEN:
            return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.CANCELLED)
        if state.phase is Phase.SETTLED:
            return state.next(index.new_version(), phase=Phase.RETIRED, serving=0)
        return None

    return decide


class Away:
    """Shards that failed in this round: what lies in them waits, what lies in others goes on."""

    def __init__(self) -> None:
        self._shards: set[tuple[str, int]] = set()

    def __contains__(self, entry: Entry) -> bool:
        return (entry.uid, home_shard(entry.extent_id)) in self._shards

    def failed(self, what: str, entry: Entry, error: KvcmError) -> None:
        """Log a failure; one of the store keeps the round from the entry's shard."""
        _log.warning("%s extent %s: %s", what, entry.extent_id.hex(), error)
        if isinstance(error, NotReady | StaleFence):
            self._shards.add((entry.uid, home_shard(entry.extent_id)))
