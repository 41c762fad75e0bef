"""`Traffic` for Prometheus.

The label is ``instance_id``: Prometheus itself puts ``instance`` on what it scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.core.clock import Clock
from kvcm.core.types import QueryType
from kvcm.metaindex.events import Reason
from kvcm.observability.traffic import OTHER, Asked, Counts, Traffic

LABELS = ("group", "instance_id")
_QUERIES = {
    QueryType.PREFIX_MATCH: "prefix",
    QueryType.BATCH_GET: "batch",
    QueryType.REVERSE_ROLL_SW_MATCH: "window",
}
_NOTHING_ASKED = Asked()
_HOW = ("finished", "expired", "abandoned", "cancelled")
_ENDED = ("finished", "failed", "expired", "abandoned", "cancelled")
_LIMITS = ("QUOTA_GROUP", "QUOTA_TYPE", "STORAGE_FULL", "MAX_KEY_COUNT", "NO_STORAGE", "ADMISSION")
_REMOVED = [r.name.lower() for r in Reason if r.name.lower() not in _HOW]

_LOOKUPS: tuple[tuple[str, str, Callable[[Asked], float]], ...] = (
    (
        "kvcm_lookup_hit_ratios",
        "Sum of each lookup's share of blocks that were hits. Divided by lookups that were not "
        "empty: the request-weighted hit rate.",
        lambda asked: asked.ratios,
    ),
    (
        "kvcm_lookup_blocks",
        "Blocks that lookups asked for, without masked ones.",
        lambda asked: asked.blocks,
    ),
    (
        "kvcm_lookup_hit_blocks",
        "Blocks that lookups asked for and were answered. Divided by blocks asked for: the "
        "block-weighted hit rate.",
        lambda asked: asked.hits,
    ),
    (
        "kvcm_lookup_missed_blocks",
        "Blocks that lookups asked for and were not answered.",
        lambda asked: asked.blocks - asked.hits,
    ),
    (
        "kvcm_lookup_tokens",
        "Tokens of blocks that lookups asked for: blocks times block size.",
        lambda asked: asked.tokens,
    ),
    (
        "kvcm_lookup_hit_tokens",
        "Tokens saved: those of blocks that were answered. Divided by tokens asked for: the "
        "token-weighted hit rate.",
        lambda asked: asked.hit_tokens,
    ),
)


class TrafficMetrics(Collector):
    """Counters by group and instance, and instances that are silent."""

    def __init__(self, traffic: Traffic, clock: Clock, silent_max: int) -> None:
        self._traffic = traffic
        self._clock = clock
        self._silent_max = silent_max

    def collect(self) -> Iterable[Metric]:
        self._traffic.refresh()
        counts = list(self._traffic.counts())
        yield from _lookups(counts)
        yield from _writes(counts)
        yield from _losses(counts)
        yield from self._silent()

    def _silent(self) -> Iterable[Metric]:
        silent = self._traffic.silent(self._clock.monotonic())
        number = GaugeMetricFamily(
            "kvcm_silent_instances",
            "Registered instances that have not looked up or written anything for "
            "metrics.silent_after_s.",
            labels=["group"],
        )
        for group in self._traffic.groups():
            number.add_metric([group], sum(g == group for g, _ in silent))
        yield number
        longest = GaugeMetricFamily(
            "kvcm_silent_instance",
            "1 for the silent instances that are so longest, metrics.instances_max of them.",
            labels=LABELS,
        )
        for group, instance_id in silent[: self._silent_max]:
            longest.add_metric([group, instance_id], 1)
        yield longest


def _lookups(counts: Iterable[Counts]) -> Iterable[Metric]:
    lookups = CounterMetricFamily(
        "kvcm_lookups",
        "Lookups answered, by query and outcome: all blocks asked for were hits (full), some "
        "(partial), none (miss), or it asked for none (empty).",
        labels=[*LABELS, "query", "outcome"],
    )
    others = [
        CounterMetricFamily(name, text, labels=[*LABELS, "query"]) for name, text, _ in _LOOKUPS
    ]
    for found in counts:
        for query, name in _QUERIES.items():
            asked = found.asked.get(query)
            if asked is None:
                if found.instance_id != OTHER:
                    continue
                asked = _NOTHING_ASKED
            labels = [found.group, found.instance_id, name]
            for outcome in ("full", "partial", "miss", "empty"):
                lookups.add_metric([*labels, outcome], getattr(asked, outcome))
            for family, (_, _, value) in zip(others, _LOOKUPS, strict=True):
                family.add_metric(labels, value(asked))
    yield lookups
    yield from others


def _writes(counts: Iterable[Counts]) -> Iterable[Metric]:
    starts = CounterMetricFamily(
        "kvcm_write_starts",
        "Write sessions begun, by what was granted (blocks, nothing).",
        labels=[*LABELS, "granted"],
    )
    blocks = CounterMetricFamily(
        "kvcm_write_granted_blocks", "Blocks granted to be written.", labels=LABELS
    )
    size = CounterMetricFamily(
        "kvcm_write_granted_bytes", "Bytes granted to be written.", labels=LABELS
    )
    ends = CounterMetricFamily(
        "kvcm_write_ends",
        "Write sessions with blocks that ended: by their client (finished), by time-out (expired), "
        "because the client was gone (abandoned), or with what took their blocks (cancelled).",
        labels=[*LABELS, "how"],
    )
    for found in counts:
        labels = [found.group, found.instance_id]
        for granted in ("blocks", "nothing"):
            starts.add_metric([*labels, granted], found.starts[granted])
        blocks.add_metric(labels, found.granted_blocks)
        size.add_metric(labels, found.granted_bytes)
        for how in _HOW:
            ends.add_metric([*labels, how], found.ends[how])
    yield from (starts, blocks, size, ends)


def _losses(counts: Iterable[Counts]) -> Iterable[Metric]:
    families = [
        _Split(
            "kvcm_write_ended_blocks",
            "Blocks whose write ended: served from now on (finished), not written (failed), or "
            "lost with their session (expired, abandoned, cancelled).",
            "outcome",
            _ENDED,
            lambda found: found.ended_blocks,
        ),
        _Split(
            "kvcm_write_ended_bytes",
            "Bytes of blocks whose write ended; outcomes as for the blocks.",
            "outcome",
            _ENDED,
            lambda found: found.ended_bytes,
        ),
        _Split(
            "kvcm_write_refused_blocks",
            "Missing blocks that a limit or admission did not let through, by reason.",
            "reason",
            _LIMITS,
            lambda found: found.refused_blocks,
        ),
        _Split(
            "kvcm_removed_blocks",
            "Blocks that stopped being served, by reason: evicted for room, older than a ttl "
            "(aged), removed or trimmed by call, gone with their storage or instance, reported by "
            "readers, found missing by repair (repaired), one place too many for a key (crowded).",
            "reason",
            _REMOVED,
            lambda found: found.removed_blocks,
        ),
        _Split(
            "kvcm_removed_bytes",
            "Bytes of blocks that stopped being served; reasons as for the blocks.",
            "reason",
            _REMOVED,
            lambda found: found.removed_bytes,
        ),
    ]
    for found in counts:
        for family in families:
            family.add(found)
    for family in families:
        yield family.metric


class _Split:
    """A counter with one more label; an instance has samples only of what happened to it."""

    def __init__(
        self,
        name: str,
        text: str,
        label: str,
        known: Iterable[str],
        value: Callable[[Counts], Mapping[str, int]],
    ) -> None:
        self.metric = CounterMetricFamily(name, text, labels=[*LABELS, label])
        self._zeros = dict.fromkeys(known, 0)
        self._value = value

    def add(self, found: Counts) -> None:
        zeros = self._zeros if found.instance_id == OTHER else {}
        for name, count in {**zeros, **self._value(found)}.items():
            self.metric.add_metric([found.group, found.instance_id, name], count)
