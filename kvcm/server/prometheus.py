"""The manager's metrics as a whole: one registry for ``GET /metrics`` and GetMetrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """What all collectors tell, each time anew."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self._registry.register(collector)

    def families(self) -> list[Metric]:
        """All metrics at one moment."""
        return list(self._registry.collect())

    async def text(self) -> bytes:
        """The current text of ``/metrics``; others have their turn while it is written."""
        parts = []
        for family in self.families():
            parts.append(generate_latest(_Only(family)))
            await asyncio.sleep(0)
        return b"".join(parts)


class _Only(CollectorRegistry):
    """A registry of one metric that was collected before."""

    def __init__(self, family: Metric) -> None:
        super().__init__(auto_describe=False)
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
