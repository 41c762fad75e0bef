"""The opened storages, by name; follows the registry and tries failed ones again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvcm.core import health, limits
from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError, StorageError
from kvcm.core.health import Breaker, Health, HealthState
from kvcm.core.types import StorageConfig
from kvcm.observability.histogram import Timings
from kvcm.registry.view import RegistryView
from kvcm.storage_backends.base import DataStorageBackend

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 30.0

Build = Callable[[StorageConfig], DataStorageBackend]


@dataclass(slots=True)
class _Slot:
    config: StorageConfig
    backend: DataStorageBackend | None = None
    closed: DataStorageBackend | None = None
    health: Health = health.UNAVAILABLE
    breaker: Breaker = field(default_factory=Breaker)
    state: HealthState = HealthState.UNAVAILABLE
    """What probes and readers say together."""
    detail: str = "not opened yet"
    free_bytes: int | None = None
    unwritable: str = ""
    since: float | None = None
    """When it came back; None when it has been there since the set was opened."""
    work: asyncio.Task[None] | None = None
    begun: float = -math.inf
    """When ``work`` was."""
    new: bool = False
    """Its place is to be made first."""
    changes: Counter[HealthState] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class StorageHealth:
    """How a storage is, for operators. ``changes``: how often it came into each state since it was
    registered or the manager started."""

    config: StorageConfig
    state: HealthState
    detail: str
    free_bytes: int | None
    unwritable: str
    breaker_open: bool
    changes: Counter[HealthState]


class BackendSet:
    """Backends of the registered storages.

    A storage that cannot be opened does not keep the others from serving: it shows as unavailable
    and is tried again by ``run_once``.

    Args:
        period_s: between two probes of a storage.
        timeout_s: a probe that takes longer counts as hung.
    """

    name = "storages"

    def __init__(
        self,
        build: Build,
        clock: Clock,
        *,
        period_s: float,
        timeout_s: float = limits.PROBE_TIMEOUT_S_DEFAULT,
    ) -> None:
        self.probe_timings = Timings()
        """Durations by (storage, result), of those that hang so far."""
        self.period_s = period_s
        self.wakeup = asyncio.Event()
        self._timeout_s = timeout_s
        self._build = build
        self._clock = clock
        self._slots: dict[str, _Slot] = {}
        self._opened: dict[str, DataStorageBackend] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def get(self, name: str) -> DataStorageBackend | None:
        """The backend; None for an unknown storage or one that cannot be built.

        While it is not open its pure methods work all the same: blocks on it can be given up, and
        their addresses must be known for that. All others raise StorageError.
        """
        slot = self._slots.get(name)
        if slot is None or slot.backend is not None:
            return slot.backend if slot is not None else None
        if slot.closed is None:
            try:
                slot.closed = self._build(slot.config)
            except KvcmError:
                return None
        return slot.closed

    def available(self, name: str) -> bool:
        """Enabled, open, and neither its probes nor its readers say otherwise."""
        slot = self._slots.get(name)
        return (
            slot is not None and slot.state is not HealthState.UNAVAILABLE and slot.config.enabled
        )

    def writable(self, name: str) -> bool:
        """Available, and not full or read-only."""
        return self.available(name) and not self._slots[name].unwritable

    def unwritable(self, name: str) -> str:
        """Why the storage takes no writes though it may be read; empty when it does."""
        slot = self._slots.get(name)
        return slot.unwritable if slot is not None else ""

    def free_bytes(self, name: str) -> int | None:
        """Free on the storage itself at its last probe; None when it does not tell."""
        slot = self._slots.get(name)
        return slot.free_bytes if slot is not None else None

    def available_for_s(self, name: str) -> float:
        """Seconds since the storage came back; infinite when it was never away."""
        slot = self._slots.get(name)
        if slot is None or slot.since is None:
            return math.inf
        return self._clock.monotonic() - slot.since

    def statuses(self) -> Iterator[StorageHealth]:
        """Of all storages."""
        now = self._clock.monotonic()
        for slot in self._slots.values():
            yield StorageHealth(
                slot.config,
                slot.state,
                slot.detail,
                slot.free_bytes,
                slot.unwritable,
                slot.breaker.is_open(now),
                slot.changes,
            )

    def complain(self, name: str, reader: str) -> None:
        """A reader could not read what lies there: the storage is probed soon, and when enough
        readers say so it is left alone for a while."""
        slot = self._slots.get(name)
        if slot is None or slot.state is HealthState.UNAVAILABLE:
            return
        now = self._clock.monotonic()
        if slot.breaker.complain(reader, now):
            held = slot.breaker.open_until - now
            readers = limits.BREAKER_READERS
            self._judge(slot, f"{readers} readers could not read it; left alone for {held:g} s")
        elif now - slot.begun >= limits.PROBE_AGAIN_S:
            slot.begun = -math.inf
            self.wakeup.set()

    def state(self, name: str) -> HealthState:
        """What probes and readers say."""
        slot = self._slots.get(name)
        return slot.state if slot is not None else HealthState.UNAVAILABLE

    def unavailable_reason(self, name: str) -> str:
        """Why the storage cannot be used; empty when it can, were it enabled."""
        slot = self._slots.get(name)
        if slot is None:
            return "unknown storage"
        return slot.detail if slot.state is HealthState.UNAVAILABLE else ""

    async def open(self, view: RegistryView, *, new: bool = False) -> None:
        """Open all storages of a view, each in its own time; failures are logged, and one that
        hangs is not waited for longer than a probe. ``new``: they were registered just now."""
        self.follow(view)
        for slot in self._slots.values():
            slot.new = new
        await self._wait()
        for slot in self._slots.values():
            slot.since = None

    def create(self, names: Iterable[str]) -> None:
        """Have the places of storages made that were registered without `try_open`, as soon as
        that can be done."""
        for name in names:
            slot = self._slots.get(name)
            if slot is not None and slot.backend is None and slot.work is not None:
                slot.new = True
                slot.work.add_done_callback(lambda _: self.wakeup.set())

    async def try_open(self, config: StorageConfig, *, new: bool = False) -> DataStorageBackend:
        """A backend that is open already; `adopt` it once its storage is stored. ``new``: its
        place is made first.

        Raises:
            StorageError, InvalidArgument, Unsupported: it cannot be used.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                return await self._open(config, new=new)
        except TimeoutError:
            raise StorageError(
                f"storage {config.global_unique_name!r} did not open within {OPEN_TIMEOUT_S} s"
            ) from None

    async def _open(self, config: StorageConfig, *, new: bool) -> DataStorageBackend:
        backend = self._build(config)
        try:
            if new:
                await backend.create()
            await backend.open()
        except BaseException:
            # Cancelled, too: what it has begun, threads for one, would add up with each attempt.
            self._close_later(backend)
            raise
        return backend

    def adopt(self, backend: DataStorageBackend) -> None:
        """Use an opened backend when its storage shows up in the next view."""
        self._opened[backend.config.global_unique_name] = backend

    def disown(self, backend: DataStorageBackend) -> None:
        """Close a backend from `try_open` whose storage was not stored after all."""
        if self._opened.get(backend.config.global_unique_name) is backend:
            del self._opened[backend.config.global_unique_name]
        self._close_later(backend)

    def follow(self, view: RegistryView) -> None:
        """Bring the set in line with a view; opening goes on in the background."""
        if self._is_closed:
            return
        for name in self._slots.keys() - view.storages.keys():
            self._drop(self._slots.pop(name))
            for result in ("good", "bad"):
                self.probe_timings.pop((name, result), None)
        for name, config in view.storages.items():
            slot = self._slots.get(name)
            if slot is not None and _same_place(slot.config, config):
                slot.config = config
                continue
            if slot is not None:
                self._drop(slot)
            self._slots[name] = fresh = _Slot(config)
            opened = self._opened.pop(name, None)
            if opened is not None and _same_place(opened.config, config):
                fresh.backend, fresh.health = opened, health.AVAILABLE
                self._judge(fresh, "")
                continue
            if opened is not None:
                self._close_later(opened)
            self._start(fresh)

    async def run_once(self, now: float) -> None:
        """Probe the open storages and open the others again, where it is time for that.

        One that hangs holds up nobody: its work goes on, and it is unavailable meanwhile.
        """
        self.wakeup.clear()
        for slot in self._slots.values():
            if slot.work is None or slot.work.done():
                self._start(slot)
        await self._wait()

    async def _wait(self) -> None:
        """Until what was begun is done, or hangs."""
        now = self._clock.monotonic()
        waited = [
            slot
            for slot in self._slots.values()
            if slot.work is not None and now - slot.begun < self._timeout_s
        ]
        if waited:
            tasks = [slot.work for slot in waited if slot.work is not None]
            await asyncio.wait(tasks, timeout=self._timeout_s)
        for slot in waited:
            if slot.work is not None and not slot.work.done():
                slot.health = health.failed(slot.health, hung=True)
                self._count_probe(slot, good=False, seconds=self._timeout_s)
                self._judge(slot, f"no answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Close all. Idempotent."""
        self._is_closed = True
        slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            self._drop(slot)
        for backend in self._opened.values():
            self._close_later(backend)
        self._opened.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._timeout_s)

    def _start(self, slot: _Slot) -> None:
        slot.begun = self._clock.monotonic()
        slot.work = asyncio.ensure_future(self._check(slot))

    async def _check(self, slot: _Slot) -> None:
        """Open, or probe; never raises."""
        try:
            if slot.backend is None:
                # Without a time-out: while this hangs it is not begun again, so a hung mount holds
                # no more threads than one attempt.
                slot.backend = await self._open(slot.config, new=slot.new)
                slot.new = False
                slot.health = health.OPENED
            await self._probe(slot, slot.backend)
            if slot.health.state is HealthState.SUSPECT:
                # At once: a storage that fails must be out of use within one period.
                await self._probe(slot, slot.backend)
        except KvcmError as error:
            slot.health = health.UNAVAILABLE
            self._judge(slot, str(error))
        except Exception as error:
            # A backend is a plug-in: whatever it raises means that it cannot be used now.
            log.exception("storage %r: probe failed", slot.config.global_unique_name)
            slot.health = health.UNAVAILABLE
            self._judge(slot, str(error))

    async def _probe(self, slot: _Slot, backend: DataStorageBackend) -> None:
        began = self._clock.monotonic()
        result = await backend.probe()
        seconds = self._clock.monotonic() - began
        self._count_probe(slot, good=result.available, seconds=seconds)
        if result.available:
            slot.free_bytes = result.free_bytes
            self._set_unwritable(slot, result.unwritable)
            slot.health = health.succeeded(slot.health)
            usable = slot.health.usable
            self._judge(slot, "" if usable else "its probes succeed again, not yet often enough")
        else:
            slot.health = health.failed(slot.health)
            self._judge(slot, result.detail)

    def _count_probe(self, slot: _Slot, *, good: bool, seconds: float) -> None:
        result = "good" if good else "bad"
        self.probe_timings[slot.config.global_unique_name, result].observe(seconds)

    def _set_unwritable(self, slot: _Slot, reason: str) -> None:
        name = slot.config.global_unique_name
        if reason and reason != slot.unwritable:
            log.warning("storage %r takes no writes: %s", name, reason)
        elif slot.unwritable and not reason:
            log.info("storage %r takes writes again", name)
        slot.unwritable = reason

    def _judge(self, slot: _Slot, detail: str) -> None:
        """Conclude the state from probes and readers."""
        now, name = self._clock.monotonic(), slot.config.global_unique_name
        state = slot.health.state
        if state is not HealthState.UNAVAILABLE and slot.breaker.is_open(now):
            state, detail = HealthState.UNAVAILABLE, detail or slot.detail
        if state is not slot.state:
            slot.changes[state] += 1
            if slot.state is HealthState.UNAVAILABLE:
                slot.since = now
        if state is HealthState.AVAILABLE:
            if slot.state is not state:
                log.info("storage %r is available", name)
        elif (state, detail) != (slot.state, slot.detail):
            log.warning("storage %r is %s: %s", name, state.name.lower(), detail)
        slot.state, slot.detail = state, detail

    def _drop(self, slot: _Slot) -> None:
        if slot.work is not None:
            slot.work.cancel()
        if slot.backend is not None:
            self._close_later(slot.backend)

    def _close_later(self, backend: DataStorageBackend) -> None:
        task = asyncio.ensure_future(_close(backend))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _same_place(a: StorageConfig, b: StorageConfig) -> bool:
    return (a.type, a.spec) == (b.type, b.spec)


async def _close(backend: DataStorageBackend) -> None:
    try:
        await backend.close()
    except Exception:
        # It is gone either way, and the others are to be closed too.
        log.exception("storage %r did not close", backend.config.global_unique_name)
