"""What measures a manager, made before what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.registry import Collector

from kvcm.core.clock import Clock
from kvcm.core.types import Instance
from kvcm.metaindex.store import KVStore
from kvcm.observability.instrumented import InstrumentedStore
from kvcm.observability.rounds import LoopLag, Rounds
from kvcm.observability.traffic import Traffic
from kvcm.observability.traffic_metrics import TrafficMetrics
from kvcm.registry.view import RegistryView
from kvcm.server.access_log import AccessLog
from kvcm.server.callstats import CallStats
from kvcm.server.settings import MetricsOptions
from kvcm.server.supervisor import Loop


class Instruments:
    """Calls, rounds and the event loop are always measured; the rest when metrics are enabled.

    Attributes:
        loops: to be run in the background.
        traffic: to be told what happens to blocks; None when that is not counted.
        access: to be told of calls; None when it is off.
    """

    def __init__(
        self,
        options: MetricsOptions,
        clock: Clock,
        view: Callable[[], RegistryView],
        access: AccessLog,
    ) -> None:
        self._options = options
        self._clock = clock
        self.calls = CallStats()
        self.rounds = Rounds(clock)
        self.traffic: Traffic | None = None
        self._lag = LoopLag()
        self._store: InstrumentedStore | None = None
        self.access = access if access.enabled else None
        self._access = access
        self.loops: list[Loop] = [self._lag, *([access] if access.enabled else [])]
        if options.enabled:
            self.traffic = Traffic(
                lambda: _registered(view()),
                clock.monotonic,
                instances_max=options.instances_max,
                groups_max=options.groups_max,
                silent_after_s=options.silent_after_s,
            )
            self.loops.append(self.traffic)

    def store(self, store: KVStore) -> KVStore:
        """The store, with its calls timed."""
        if not self._options.enabled:
            return store
        self._store = InstrumentedStore(store, self._clock)
        return self._store

    def collectors(self) -> Iterable[Collector]:
        """What they tell."""
        yield from (self.calls, self.rounds, self._lag, self._access)
        if self._store is not None:
            yield self._store
        if self.traffic is not None:
            yield TrafficMetrics(self.traffic, self._clock, self._options.instances_max)


def _registered(
    view: RegistryView,
) -> tuple[Iterable[str], Iterable[Instance], Iterable[Instance]]:
    return view.groups, view.instances.values(), view.closing
