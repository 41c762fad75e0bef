"""Looks at a manager through its admin HTTP port, for ``kvcm top``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import httpx

from kvcm.cli.admin_http import json_of
from kvcm.cli.top_frame import Counts, Sample, Series
from kvcm.cli.top_metrics import samples
from kvcm.client import AsyncAdminClient
from kvcm.client.addresses import ADMIN_PORTS, parse_address
from kvcm.client.retry import RetryPolicy
from kvcm.client.types import Metric
from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, KvcmError, NotLeader, Unavailable
from kvcm.core.types import StorageStatus

TIMEOUT_S = 3.0
"""Of each call: a manager that hangs is shown as lost soon."""


class Counter(NamedTuple):
    """A metric that goes into a field of `Counts`, when it has this label."""

    field: str
    label: tuple[str, str] | None = None


COUNTERS = {
    "kvcm_lookups_total": Counter("lookups"),
    "kvcm_lookup_blocks_total": Counter("blocks"),
    "kvcm_lookup_hit_blocks_total": Counter("hits"),
    "kvcm_lookup_hit_tokens_total": Counter("saved_tokens"),
    "kvcm_write_ended_bytes_total": Counter("written_bytes", ("outcome", "finished")),
    "kvcm_removed_bytes_total": Counter("evicted_bytes", ("reason", "evicted")),
}
"""By name; each by group and instance."""
LIMITED = frozenset({"kvcm_refused_writes_total", "kvcm_cut_writes_total"})
"""By group only: what counts as ``limited_writes``."""
_GAUGES = {
    "kvcm_start_timestamp_seconds",
    "kvcm_leadership_epoch",
    "kvcm_event_loop_lag_max_seconds",
}
_FREE = "kvcm_storage_free_bytes"
_NAMES = {*COUNTERS, *LIMITED, *_GAUGES, _FREE}


class Source:
    """One manager's admin HTTP port; belongs to one event loop."""

    def __init__(self, target: str, clock: Clock) -> None:
        """Nothing is connected before the first look.

        Raises:
            InvalidArgument: no address of HTTP.
        """
        text = (target if "://" in target else f"http://{target}").rstrip("/")
        address = parse_address(text, ADMIN_PORTS)
        if address.scheme != "http":
            raise InvalidArgument(f"{target}: give the admin HTTP port, as http://127.0.0.1:6492")
        self.url = str(address)
        self._clock = clock
        self._admin = AsyncAdminClient(
            self.url, timeout=TIMEOUT_S, retry=RetryPolicy(rounds_max=1), clock=clock
        )
        # A manager is reached directly; a proxy from the environment is meant for the web.
        self._http = httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)

    async def look(self) -> Sample:
        """Everything that is shown, as of now.

        Raises:
            KvcmError: the manager cannot be reached, or what answers is none.
        """
        metrics = [*samples(await self._text("/metrics"), _NAMES)]
        elapsed_s = self._clock.monotonic()
        return Sample(
            at_s=self._clock.now(),
            elapsed_s=elapsed_s,
            cluster=await self._admin.get_manager_cluster_info(),
            health=await self._admin.check_health(),
            usage=await self._document("/v1/usage") or {},
            ceiling=await self._document("/v1/ceiling"),
            storages=await self._storages(),
            counts=counts_of(metrics),
            gauges={m.name: _number(m) for m in metrics if m.name in _GAUGES},
            free_bytes={m.tags["storage"]: int(_number(m)) for m in metrics if m.name == _FREE},
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._admin.close()
        await self._http.aclose()

    async def _storages(self) -> tuple[StorageStatus, ...] | None:
        try:
            return await self._admin.list_storage()
        except NotLeader:
            return None

    async def _document(self, path: str) -> Mapping[str, Any] | None:
        reply = await self._get(path)
        if reply.status_code == httpx.codes.NOT_FOUND:
            return None
        value = json_of(reply)
        if reply.status_code != httpx.codes.OK or not isinstance(value, dict):
            raise KvcmError(f"{self.url}{path}: HTTP status {reply.status_code}, or no JSON object")
        return value

    async def _text(self, path: str) -> str:
        reply = await self._get(path)
        if reply.status_code != httpx.codes.OK:
            raise KvcmError(
                f"{self.url}{path}: HTTP status {reply.status_code}: not a KV cache manager's "
                "admin port?"
            )
        return reply.text

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._http.get(path)
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url}{path}: {error or type(error).__name__}") from error


def counts_of(metrics: Iterable[Metric]) -> Series | None:
    """Counters by group and instance; None when the manager does not count."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    counting = False
    for metric in metrics:
        if metric.name in LIMITED:
            field, instance = "limited_writes", ""
        elif (counter := COUNTERS.get(metric.name)) is not None:
            counting = True
            if counter.label and metric.tags.get(counter.label[0]) != counter.label[1]:
                continue
            field, instance = counter.field, metric.tags.get("instance_id", "")
        else:
            continue
        found = sums.setdefault((metric.tags.get("group", ""), instance), {})
        found[field] = found.get(field, 0.0) + _number(metric)
    return {key: Counts(**found) for key, found in sums.items()} if counting else None


def _number(metric: Metric) -> float:
    return float(metric.value) if isinstance(metric.value, int | float) else 0.0
