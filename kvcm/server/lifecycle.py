"""A manager from start to stop.

Start: data directory, registry (schema check), first contents, index store, storages, use cases,
loops, listeners, ready. A registry that is away is waited for, within bounds; without the index
store the manager listens, is not ready, and its loops begin when the store is there. Stop: not
ready, no new calls, drain, then everything in reverse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import ConfigError, Unavailable
from kvcm.observability.trace_events import TraceEvents
from kvcm.registry.registry import Registry
from kvcm.server import bootstrap, http_routes, sockets, wiring
from kvcm.server.access_log import AccessLog
from kvcm.server.admin_service import ANSWERED_BY_ALL, AdminService
from kvcm.server.backends import BackendSet
from kvcm.server.calls import Context, Endpoint, endpoints_of
from kvcm.server.ceiling_metrics import CeilingMetrics
from kvcm.server.datadir import DataDir
from kvcm.server.event_metrics import EventMetrics
from kvcm.server.grpc_edge import GrpcListener, Services
from kvcm.server.http_edge import HttpApi, HttpListener
from kvcm.server.instruments import Instruments
from kvcm.server.leadership import Leadership
from kvcm.server.manager_metrics import ManagerMetrics
from kvcm.server.meta_service import MetaService
from kvcm.server.prometheus import Exporter
from kvcm.server.repair_metrics import RepairMetrics
from kvcm.server.settings import Settings
from kvcm.server.space_metrics import SpaceMetrics
from kvcm.server.storage_metrics import StorageMetrics
from kvcm.server.store_watch import StoreWatch
from kvcm.server.supervisor import Supervisor
from kvcm.server.usage_metrics import UsageMetrics

log = logging.getLogger(__name__)

META = meta_pb2.DESCRIPTOR.services_by_name["MetaService"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
META_TITLE = "kvcm meta"
ADMIN_TITLE = "kvcm admin"
_REGISTRY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ports:
    """The real ports; ``admin_rpc`` equals ``rpc`` when one listener serves both."""

    rpc: int
    http: int
    admin_rpc: int
    admin_http: int


class Manager:
    """One manager in the running event loop."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock | None = None,
        build_cache: wiring.BuildCache | None = None,
    ) -> None:
        self.settings = settings
        self.ready = False
        self.ports = Ports(0, 0, 0, 0)
        self._clock = clock or SystemClock()
        self._build_cache = build_cache or wiring.build_cache
        self._undo: list[Callable[[], Awaitable[None]]] = []
        self._grpc: list[GrpcListener] = []
        self._http: list[HttpListener] = []
        self._events: TraceEvents | None = None
        self._stopping = False
        self._led = asyncio.Event()
        self._refusal: ConfigError | None = None

    async def start(self) -> None:
        """Start everything; on failure what was started is stopped again.

        It returns when calls are taken. Without the index store that is before it is ready.

        Raises:
            ConfigError: something in the settings or around them does not fit; one line.
        """
        try:
            await self._start()
        except BaseException:
            # Cancelled, too: what is open already is closed.
            await self.stop()
            raise

    async def wait_ready(self) -> None:
        """Wait until the index store was there once.

        Raises:
            ConfigError: it came, and can never be used as configured; one line.
        """
        await self._led.wait()
        if self._refusal is not None:
            raise self._refusal

    async def stop(self) -> None:
        """Drain, within ``drain_s``, and stop. Idempotent."""
        self._stopping = True
        await self._set_ready(False)
        if self._events is not None:
            # A stream has no end to wait for.
            await self._events.end_streams()
        drain_s = self.settings.drain_s
        await asyncio.gather(*(listener.stop(drain_s) for listener in self._listeners()))
        self._grpc.clear()
        self._http.clear()
        while self._undo:
            try:
                await self._undo.pop()()
            except Exception:
                # The steps after it have things to close as well.
                log.exception("stopping: one step failed")

    def addresses(self) -> list[tuple[str, str]]:
        """What listens where, for people."""
        host, ports = self.settings.host, self.ports
        return [
            ("meta gRPC", sockets.shown(host, ports.rpc)),
            ("meta HTTP", f"http://{sockets.shown(host, ports.http)}"),
            ("admin gRPC", sockets.shown(host, ports.admin_rpc)),
            ("admin HTTP", f"http://{sockets.shown(host, ports.admin_http)}"),
        ]

    async def _start(self) -> None:
        settings, clock = self.settings, self._clock
        data_dir = DataDir(settings.data_dir)
        self._on_stop(_as_async(data_dir.release))

        registry = wiring.build_registry(settings, clock)
        # The last view stays readable for calls that are still draining.
        self._on_stop(registry.close)
        await self._open_registry(registry)
        created = await self._bootstrap(registry)

        store = wiring.build_store(settings, clock)
        self._on_stop(store.close)
        backends = wiring.build_backends(settings, clock)
        self._on_stop(backends.close)
        registry.subscribe(backends.follow)
        await backends.open(registry.view, new=created)

        access = AccessLog(settings.access_log, settings.log_format, clock)
        access.open()
        self._on_stop(access.close)
        instruments = Instruments(settings.metrics, clock, lambda: registry.view, access)
        timed = instruments.store(store)
        cache = self._build_cache(settings, clock, registry, timed, backends)
        if instruments.traffic is not None:
            cache.watchers.append(instruments.traffic)
        events = self._events = wiring.build_events(settings, clock, cache.watchers)
        self._on_stop(events.close)
        self._on_stop(cache.close)
        await cache.open()

        supervisor = Supervisor(clock, instruments.rounds)
        self._on_stop(supervisor.stop)

        def store_opened() -> None:
            supervisor.start(cache.loops)
            self._led.set()

        watch = StoreWatch(
            store,
            clock,
            changed=self._set_ready,
            opened=store_opened,
            refused=self._store_refused,
        )
        await watch.open()
        supervisor.start([backends, watch, events, *instruments.loops])
        await self._listen(registry, cache, backends, instruments, events)

    async def _open_registry(self, registry: Registry) -> None:
        clock, wait_s = self._clock, self.settings.registry_wait_s
        began = clock.monotonic()
        while True:
            try:
                return await registry.open()
            except Unavailable as error:
                waited = clock.monotonic() - began
                if waited >= wait_s:
                    raise ConfigError(f"{error} (waited {waited:.0f} s, registry_wait_s)") from None
                log.warning("%s; trying for %.0f s more", error, wait_s - waited)
            await clock.sleep(_REGISTRY_PAUSE_S)

    async def _set_ready(self, ready: bool) -> None:
        self.ready = ready and not self._stopping
        for listener in self._grpc:
            await listener.set_serving(self.ready)

    def _store_refused(self, error: ConfigError) -> None:
        self._refusal = error
        self._led.set()

    async def _bootstrap(self, registry: Registry) -> bool:
        path = self.settings.bootstrap
        storages, groups = bootstrap.read(path) if path else bootstrap.startup_defaults()
        created = await registry.bootstrap(storages, groups)
        if path and not created:
            log.info("bootstrap file %s was not loaded: the registry has contents", path)
        return created

    async def _listen(
        self,
        registry: Registry,
        cache: wiring.ManagedCache,
        backends: BackendSet,
        instruments: Instruments,
        events: TraceEvents,
    ) -> None:
        clock, stats = self._clock, instruments.calls
        node_id = f"{socket.gethostname()}-{clock.random_bytes(4).hex()}"
        leadership = Leadership(clock, node_id)
        meta = MetaService(registry, cache, backends.available)
        self._on_stop(lambda: _at_most(meta.drained(), self.settings.drain_s))
        self.metrics = self._exporter(cache, backends, leadership, instruments, events)
        admin = AdminService(
            *(registry, cache, backends, meta, leadership, stats, clock),
            is_well=lambda: self.ready,
            metrics=self.metrics.families,
        )
        context = Context(clock, stats, leadership.require, instruments.access)
        meta_calls = endpoints_of(context, META, meta_pb2, meta)
        admin_calls = endpoints_of(
            context, ADMIN, admin_pb2, admin, answered_by_all=ANSWERED_BY_ALL
        )
        rpc, admin_rpc = self._bind_grpc(meta_calls, admin_calls)
        http = self._bind_http(META_TITLE, META, meta_calls, self.settings.http_port)
        admin_http = self._bind_http(
            ADMIN_TITLE,
            ADMIN,
            admin_calls,
            self.settings.admin_http_port,
            usage=partial(cache.usage, ahead=True),
            metrics=self.metrics.text,
            repair=cache.repair,
            space=cache.space,
            ceilings=cache.ceilings,
            events=events,
        )
        self.ports = Ports(rpc, http, admin_rpc, admin_http)
        # Also what the gRPC health service says from the first call on.
        await self._set_ready(self.ready)
        await asyncio.gather(*(listener.start() for listener in self._listeners()))

    def _exporter(
        self,
        cache: wiring.ManagedCache,
        backends: BackendSet,
        leadership: Leadership,
        instruments: Instruments,
        events: TraceEvents,
    ) -> Exporter:
        return Exporter(
            [
                ManagerMetrics(self._clock, lambda: self.ready, lambda: leadership.is_leader),
                *instruments.collectors(),
                UsageMetrics(cache.usage, instruments.traffic),
                SpaceMetrics(cache.space),
                StorageMetrics(backends.statuses, backends.probe_timings),
                CeilingMetrics(cache.ceilings),
                EventMetrics(events),
                *([RepairMetrics(cache.repair)] if cache.repair is not None else []),
            ]
        )

    def _bind_grpc(
        self, meta_calls: Sequence[Endpoint], admin_calls: Sequence[Endpoint]
    ) -> tuple[int, int]:
        settings = self.settings
        meta: Services = {META.full_name: meta_calls}
        admin: Services = {ADMIN.full_name: admin_calls}
        if settings.rpc_port and settings.rpc_port == settings.admin_rpc_port:
            port = self._grpc_port({**meta, **admin}, settings.rpc_port)
            return port, port
        return (
            self._grpc_port(meta, settings.rpc_port),
            self._grpc_port(admin, settings.admin_rpc_port),
        )

    def _grpc_port(self, services: Services, port: int) -> int:
        settings = self.settings
        listener = GrpcListener(services, settings.host, port, settings.receive_bytes_max)
        self._grpc.append(listener)
        return listener.port

    def _bind_http(
        self, title: str, service: Any, calls: Sequence[Endpoint], port: int, **extra: Any
    ) -> int:
        api = HttpApi(calls, self._clock, self.settings.receive_bytes_max)
        sources = http_routes.Sources(ready=lambda: self.ready, error_body=api.error_body, **extra)
        api.others = http_routes.build_app(title, service, sources)
        listener = HttpListener(api, self.settings.host, port)
        self._http.append(listener)
        return listener.port

    def _listeners(self) -> list[GrpcListener | HttpListener]:
        return [*self._grpc, *self._http]

    def _on_stop(self, undo: Callable[[], Awaitable[None]]) -> None:
        self._undo.append(undo)


def _as_async(action: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        action()

    return run


async def _at_most(work: Awaitable[None], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
