"""What ``kvcm top`` shows at one moment, from two looks at a manager. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

from kvcm.client.types import ClusterInfo, Health
from kvcm.core.types import StorageStatus

WINDOWS = ("15m", "1h", "24h")


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of an instance, since the manager's start or since the look before."""

    lookups: float = 0.0
    blocks: float = 0.0
    hits: float = 0.0
    saved_tokens: float = 0.0
    written_bytes: float = 0.0
    evicted_bytes: float = 0.0
    limited_writes: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Sums."""
        return Counts(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    def since(self, before: Counts) -> Counts:
        """What came to each; a counter that fell began anew."""
        pairs = zip(_values(self), _values(before), strict=True)
        return Counts(*(now - then if now >= then else now for now, then in pairs))


def _values(counts: Counts) -> list[float]:
    return [getattr(counts, field.name) for field in fields(counts)]


Series = Mapping[tuple[str, str], Counts]
"""By group and instance id."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a manager.

    Attributes:
        at_s, elapsed_s: the wall clock, and a clock that never jumps.
        usage, ceiling: the documents of ``/v1/usage`` and ``/v1/ceiling``; None: it has none.
        storages: None when this manager does not tell, as one that does not lead.
        counts: None when it does not count (``metrics.enabled = false``).
        gauges: those without labels by name.
        free_bytes: by storage.
    """

    at_s: float
    elapsed_s: float
    cluster: ClusterInfo
    health: Health
    usage: Mapping[str, Any]
    ceiling: Mapping[str, Any] | None
    storages: Sequence[StorageStatus] | None
    counts: Series | None
    gauges: Mapping[str, float]
    free_bytes: Mapping[str, int]

    @property
    def started_s(self) -> float:
        """When the manager started: counters of another start cannot be compared."""
        return self.gauges.get("kvcm_start_timestamp_seconds", 0.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is shown: these groups and instances, or all; hit rates over ``window``."""

    groups: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()
    window: str = WINDOWS[0]


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, and the share of blocks asked for that were hits, between two looks; None: not
    known, or nothing was asked for. Writes that a limit refused or cut are known by group only."""

    lookups_per_s: float | None = None
    blocks_per_s: float | None = None
    hit_rate: float | None = None
    saved_tokens_per_s: float | None = None
    written_bytes_per_s: float | None = None
    evicted_bytes_per_s: float | None = None
    limited_writes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """``used`` and its limits, in ``unit`` (bytes, or blocks); None = no limit.

    Above ``high``, the watermark, eviction begins. ``bytes`` and ``blocks`` are held or being
    written; ``trash_bytes`` wait to be deleted.
    """

    unit: str
    used: int
    capacity: int | None
    high: int | None
    bytes: int
    blocks: int
    trash_bytes: int

    @property
    def of_mark(self) -> float | None:
        """``used`` as a share of the watermark, or of the capacity where there is no mark."""
        mark = self.high or self.capacity
        return self.used / mark if mark else None


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """A group (``instance`` empty, ``instances`` in it) or an instance. ``hit_rate`` and
    ``ceiling`` are those of the window."""

    group: str
    instance: str
    instances: int
    rates: Rates
    hit_rate: float | None
    ceiling: float | None
    space: Space


@dataclass(frozen=True, slots=True)
class StorageRow:
    """``state``: available, suspect, unavailable, disabled, only readable, or unknown."""

    name: str
    state: str
    reason: str
    space: Space
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything at one moment. ``over_s``: what the rates are taken over; None = no rates."""

    at_s: float
    over_s: float | None
    window: str
    node: str
    leader: str
    is_leader: bool
    is_healthy: bool
    epoch: int
    up_s: float
    loop_lag_max_s: float | None
    write_sessions: int
    groups: tuple[TrafficRow, ...]
    instances: tuple[TrafficRow, ...]
    storages: tuple[StorageRow, ...]
    notes: tuple[str, ...]


def frame(before: Sample | None, now: Sample, wanted: Wanted) -> Frame:
    """What to show of the later of two looks, with rates when both are of one manager's life."""
    over_s = _comparable(before, now)
    came = _came(before, now) if before is not None and over_s else None
    windows = _windows(now.ceiling, wanted.window)
    owners = {name: str(entry.get("group", "")) for name, entry in _part(now, "instances").items()}
    every = [
        _row(owners[name], name, 1, entry, came, over_s, windows)
        for name, entry in _part(now, "instances").items()
    ]
    chosen = [row for row in every if _is_wanted(row, wanted)]
    shown_groups = wanted.groups or (
        sorted({row.group for row in chosen}) if wanted.instances else ()
    )
    groups = [
        _row(name, "", list(owners.values()).count(name), entry, came, over_s, windows)
        for name, entry in _part(now, "groups").items()
        if not (wanted.groups or wanted.instances) or name in shown_groups
    ]
    return Frame(
        at_s=now.at_s,
        over_s=over_s,
        window=wanted.window,
        node=now.cluster.self_node_id,
        leader=now.cluster.leader_node_id,
        is_leader=now.health.is_leader,
        is_healthy=now.health.is_health,
        epoch=int(now.gauges.get("kvcm_leadership_epoch", 0)),
        up_s=max(0.0, now.at_s - now.started_s) if now.started_s else 0.0,
        loop_lag_max_s=now.gauges.get("kvcm_event_loop_lag_max_seconds"),
        write_sessions=int(now.usage.get("sessions", 0)),
        groups=tuple(sorted(groups, key=_busiest)),
        instances=tuple(sorted(chosen, key=_busiest)),
        storages=_storages(now),
        notes=tuple(_notes(before, now, wanted, every)),
    )


def _comparable(before: Sample | None, now: Sample) -> float | None:
    """Seconds between the looks when their counters can be compared."""
    if before is None or before.counts is None or now.counts is None:
        return None
    passed = now.elapsed_s - before.elapsed_s
    return passed if passed > 0 and before.started_s == now.started_s else None


def _came(before: Sample, now: Sample) -> Series:
    """A series that was not there before began at 0 meanwhile."""
    old: Series = before.counts or {}
    return {key: counts.since(old.get(key, Counts())) for key, counts in (now.counts or {}).items()}


def _is_wanted(row: TrafficRow, wanted: Wanted) -> bool:
    return (not wanted.groups or row.group in wanted.groups) and (
        not wanted.instances or row.instance in wanted.instances
    )


def _row(
    group: str,
    instance: str,
    instances: int,
    entry: Mapping[str, Any],
    came: Series | None,
    over_s: float | None,
    windows: Mapping[tuple[str, str], Mapping[str, Any]],
) -> TrafficRow:
    window = windows.get((group, instance))
    rates = _rates(_chosen(came, group, instance), over_s)
    return TrafficRow(
        group=group,
        instance=instance,
        instances=instances,
        rates=replace(rates, limited_writes_per_s=None) if instance else rates,
        hit_rate=float(window["hit_rate"]) if window else None,
        ceiling=float(window["ceiling"]) if window else None,
        space=_space(entry),
    )


def _chosen(came: Series | None, group: str, instance: str) -> Counts | None:
    """Of an instance, or of all series of its group; None: it has no counts of its own."""
    if came is None:
        return None
    if instance:
        return came.get((group, instance))
    found = [counts for (owner, _), counts in came.items() if owner == group]
    return reduce(Counts.plus, found) if found else None


def _rates(came: Counts | None, over_s: float | None) -> Rates:
    if came is None or not over_s:
        return Rates()
    return Rates(
        lookups_per_s=came.lookups / over_s,
        blocks_per_s=came.blocks / over_s,
        hit_rate=came.hits / came.blocks if came.blocks else None,
        saved_tokens_per_s=came.saved_tokens / over_s,
        written_bytes_per_s=came.written_bytes / over_s,
        evicted_bytes_per_s=came.evicted_bytes / over_s,
        limited_writes_per_s=came.limited_writes / over_s,
    )


def _windows(
    ceiling: Mapping[str, Any] | None, name: str
) -> dict[tuple[str, str], Mapping[str, Any]]:
    """By group and instance; windows nothing was asked for in are left out."""
    return {
        (scope["group"], scope["instance"]): window
        for scope in (ceiling or {}).get("scopes", [])
        for window in scope["windows"]
        if window["window"] == name and window["blocks"]
    }


def _space(entry: Mapping[str, Any]) -> Space:
    limit = entry.get("limit") or {}
    unit = str(limit.get("unit", "bytes"))
    size = int(entry.get("counted_bytes", 0))
    blocks = int(entry.get("serving_blocks", 0)) + int(entry.get("open_blocks", 0))
    return Space(
        unit=unit,
        used=blocks if unit == "blocks" else size,
        capacity=limit.get("capacity"),
        high=limit.get("high"),
        bytes=size,
        blocks=blocks,
        trash_bytes=int(entry.get("trash_bytes", 0)),
    )


def _storages(now: Sample) -> tuple[StorageRow, ...]:
    configs = {config.global_unique_name: config for config in now.storages or ()}
    used = _part(now, "storages")
    rows = []
    for name in sorted(configs.keys() | used.keys()):
        state, reason = _state(configs.get(name))
        space = _space(used.get(name, {}))
        rows.append(StorageRow(name, state, reason, space, now.free_bytes.get(name)))
    return tuple(rows)


def _state(config: StorageStatus | None) -> tuple[str, str]:
    if config is None:
        return "unknown", ""
    if not config.enabled:
        return "disabled", ""
    if config.unavailable_reason:
        return "unavailable", config.unavailable_reason
    if config.unwritable_reason:
        return "only readable", config.unwritable_reason
    return config.health or "available", ""


def _notes(
    before: Sample | None, now: Sample, wanted: Wanted, every: Sequence[TrafficRow]
) -> Iterable[str]:
    if not now.health.is_health:
        yield "the manager is not ready"
    if not now.cluster.leader_node_id:
        yield "no leader"
    if now.storages is None:
        yield "this manager does not lead and does not tell the storages' states"
    if now.counts is None:
        yield "no rates: the manager's metrics.enabled is false"
    elif before is not None and before.started_s != now.started_s:
        yield "the manager was started anew"
    if now.ceiling is None:
        yield "no ceiling: the manager's ceiling.enabled is false"
    for name in wanted.groups:
        if name not in _part(now, "groups"):
            yield f"no group {name!r}"
    for name in wanted.instances:
        if name not in {row.instance for row in every}:
            yield f"no instance {name!r}"


def _busiest(row: TrafficRow) -> tuple[float, int, str, str]:
    return (-(row.rates.blocks_per_s or 0.0), -row.space.bytes, row.group, row.instance)


def _part(now: Sample, name: str) -> Mapping[str, Mapping[str, Any]]:
    part: Mapping[str, Mapping[str, Any]] = now.usage.get(name) or {}
    return part
