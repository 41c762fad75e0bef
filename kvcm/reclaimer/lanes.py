"""What waits to be deleted, storage by storage: when each is due, and how often it failed."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Trash

ENTRIES_PER_BATCH = 64
NAMES_PER_BATCH = 128
"""Objects that one delete call names, some 2 ms of work; an entry with more goes alone."""


@dataclass(slots=True, eq=False)
class Pending:
    """One trash entry. ``failing_since`` is in epoch seconds, 0 while nothing failed."""

    index: InstanceIndex
    trash: Trash
    turn: int = 0
    tries: int = 0
    error: str = ""
    failing_since: float = 0.0
    is_busy: bool = False

    @property
    def objects(self) -> int:
        """Objects that it names."""
        return self.trash.objects.bit_count()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Trash that could not be deleted for long; ``since`` in epoch seconds."""

    instance: str
    extent: str
    objects: int
    size: int
    tries: int
    error: str
    since: float


@dataclass(frozen=True, slots=True)
class StorageTrash:
    """The trash of one storage: entries, objects and bytes in all, and of those that fail.

    ``again_*`` wait for their second delete, for a late writer; their bytes are free already.
    ``failing`` are retried with back-off, ``dead_letters`` slowly. ``tries``, ``error`` and
    ``since`` (epoch seconds) speak of the one that fails longest. ``calls`` are delete calls under
    way, ``late_calls`` those of them that take long.
    """

    storage: str
    entries: int
    objects: int
    size: int
    again_objects: int
    again_size: int
    failing: int
    dead_letters: int
    dead_letter_size: int
    tries: int
    error: str
    since: float
    calls: int
    late_calls: int
    letters: tuple[DeadLetter, ...]


@dataclass(slots=True)
class Sum:
    """Objects and bytes."""

    objects: int = 0
    size: int = 0

    def add(self, pending: Pending, sign: int) -> None:
        """Count an entry in (1) or out (-1)."""
        self.objects += sign * pending.objects
        self.size += sign * pending.trash.size


@dataclass(slots=True, eq=False)
class Lane:
    """One storage's queue. ``failing`` and ``dead`` are in the order in which they began to."""

    storage: str
    entries: dict[bytes, Pending] = field(default_factory=dict)
    failing: dict[bytes, Pending] = field(default_factory=dict)
    dead: dict[bytes, Pending] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    late: set[asyncio.Task[None]] = field(default_factory=set)
    backend: object = None
    first: Sum = field(default_factory=Sum)
    again: Sum = field(default_factory=Sum)
    woken_at: float = float("-inf")
    dead_size: int = 0
    _heap: list[tuple[float, int, Pending]] = field(default_factory=list)
    _turns: int = 0

    def push(self, pending: Pending, due: float) -> None:
        """Put an entry in, or give one that is in another time (monotonic seconds)."""
        key = pending.trash.key
        if self.entries.get(key) is not pending:
            self.remove(key)
            self.entries[key] = pending
            self._sum(pending).add(pending, 1)
        pending.is_busy = False
        self._turns += 1
        pending.turn = self._turns
        heapq.heappush(self._heap, (due, self._turns, pending))

    def remove(self, key: bytes) -> None:
        """Take an entry out."""
        pending = self.entries.pop(key, None)
        if pending is not None:
            self._sum(pending).add(pending, -1)
            self.failing.pop(key, None)
            if self.dead.pop(key, None) is not None:
                self.dead_size -= pending.trash.size
            pending.turn = 0

    def _sum(self, pending: Pending) -> Sum:
        return self.again if pending.trash.again else self.first

    def is_due(self, now: float) -> bool:
        """Whether ``take`` would give anything."""
        heap = self._heap
        while heap and heap[0][2].turn != heap[0][1]:
            heapq.heappop(heap)
        return bool(heap) and heap[0][0] <= now

    def take(self, now: float) -> list[Pending]:
        """The next batch of what is due."""
        batch: list[Pending] = []
        names = 0
        while len(batch) < ENTRIES_PER_BATCH and self.is_due(now):
            names += self._heap[0][2].objects
            if batch and names > NAMES_PER_BATCH:
                break
            pending = heapq.heappop(self._heap)[2]
            pending.turn = 0
            pending.is_busy = True
            batch.append(pending)
        return batch

    def failed(self, pending: Pending, error: str, now: float, tries_max: int) -> bool:
        """Count a failure at epoch second ``now``; whether the entry became a dead letter."""
        key = pending.trash.key
        pending.tries += 1
        pending.error = error
        pending.failing_since = pending.failing_since or now
        if pending.tries < tries_max:
            self.failing[key] = pending
            return False
        if key in self.dead:
            return False
        self.failing.pop(key, None)
        self.dead[key] = pending
        self.dead_size += pending.trash.size
        return True

    def wake(self, now: float) -> int:
        """Make everything that failed due now; how many entries that are."""
        woken = [p for p in self._failed() if not p.is_busy]
        for pending in woken:
            self.push(pending, now)
        return len(woken)

    def _failed(self) -> Iterator[Pending]:
        yield from self.dead.values()
        yield from self.failing.values()

    def report(self, letters_max: int) -> StorageTrash:
        """What there is now, with at most so many dead letters by name."""
        oldest = next(self._failed(), None)
        return StorageTrash(
            storage=self.storage,
            entries=len(self.entries),
            objects=self.first.objects,
            size=self.first.size,
            again_objects=self.again.objects,
            again_size=self.again.size,
            failing=len(self.failing),
            dead_letters=len(self.dead),
            dead_letter_size=self.dead_size,
            tries=oldest.tries if oldest else 0,
            error=oldest.error if oldest else "",
            since=oldest.failing_since if oldest else 0.0,
            calls=len(self.running),
            late_calls=len(self.late),
            letters=tuple(map(_letter, islice(self.dead.values(), letters_max))),
        )


def _letter(pending: Pending) -> DeadLetter:
    trash = pending.trash
    return DeadLetter(
        instance=pending.index.instance.instance_id,
        extent=trash.extent_id.hex(),
        objects=pending.objects,
        size=trash.size,
        tries=pending.tries,
        error=pending.error,
        since=pending.failing_since,
    )
