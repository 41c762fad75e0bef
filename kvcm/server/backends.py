"""The opened storages, by name; follows the registry and tries failed ones again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError, StorageError
from kvcm.core.types import StorageConfig
from kvcm.registry.view import RegistryView
from kvcm.storage_backends.base import DataStorageBackend

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 10.0

Build = Callable[[StorageConfig], DataStorageBackend]


@dataclass(slots=True)
class _Slot:
    config: StorageConfig
    backend: DataStorageBackend | None = None
    closed: DataStorageBackend | None = None
    healthy: bool = False
    detail: str = "not opened yet"
    work: asyncio.Task[None] | None = None


class BackendSet:
    """Backends of the registered storages.

    A storage that cannot be opened does not keep the others from serving: it shows as unavailable
    and is tried again by ``run_once``.
    """

    name = "storages"

    def __init__(self, build: Build, clock: Clock, period_s: float) -> None:
        self.period_s = period_s
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
        """Enabled, open, and the last probe succeeded."""
        slot = self._slots.get(name)
        return slot is not None and slot.healthy and slot.config.enabled

    def detail(self, name: str) -> str:
        """Why the storage is not healthy; empty when it is."""
        slot = self._slots.get(name)
        return slot.detail if slot is not None else "unknown storage"

    async def open(self, view: RegistryView) -> None:
        """Open all storages of a view, each in its own time; failures are logged."""
        self.follow(view)
        await asyncio.gather(*(s.work for s in self._slots.values() if s.work is not None))

    async def try_open(self, config: StorageConfig) -> DataStorageBackend:
        """A backend that is open already; `adopt` it once its storage is stored.

        Raises:
            StorageError, InvalidArgument, Unsupported: it cannot be used.
        """
        backend = self._build(config)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await backend.open()
        except TimeoutError:
            raise StorageError(
                f"storage {config.global_unique_name!r} did not open within {OPEN_TIMEOUT_S} s"
            ) from None
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
                fresh.backend, fresh.healthy, fresh.detail = opened, True, ""
                continue
            if opened is not None:
                self._close_later(opened)
            self._start(fresh)

    async def run_once(self, now: float) -> None:
        """Probe the open storages and open the others again.

        One that hangs holds up nobody: its work goes on, and it is unavailable meanwhile.
        """
        for slot in self._slots.values():
            if slot.work is None or slot.work.done():
                self._start(slot)
        running = [slot.work for slot in self._slots.values() if slot.work is not None]
        if running:
            await asyncio.wait(running, timeout=PROBE_TIMEOUT_S)
        for slot in self._slots.values():
            if slot.work is not None and not slot.work.done():
                self._set_health(slot, False, f"no answer within {PROBE_TIMEOUT_S} s")

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
            await asyncio.wait(self._closing, timeout=PROBE_TIMEOUT_S)

    def _start(self, slot: _Slot) -> None:
        slot.work = asyncio.ensure_future(self._check(slot))

    async def _check(self, slot: _Slot) -> None:
        """Open, or probe; never raises."""
        try:
            if slot.backend is None:
                slot.backend = await self.try_open(slot.config)
                self._set_health(slot, True, "")
                return
            result = await slot.backend.probe()
            self._set_health(slot, result.available, result.detail)
        except KvcmError as error:
            self._set_health(slot, False, str(error))
        except Exception as error:
            # A backend is a plug-in: whatever it raises means that it cannot be used now.
            log.exception("storage %r: probe failed", slot.config.global_unique_name)
            self._set_health(slot, False, str(error))

    def _set_health(self, slot: _Slot, healthy: bool, detail: str) -> None:
        name = slot.config.global_unique_name
        if healthy != slot.healthy or (not healthy and detail != slot.detail):
            if healthy:
                log.info("storage %r is available", name)
            else:
                log.warning("storage %r is not available: %s", name, detail)
        slot.healthy, slot.detail = healthy, detail

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
