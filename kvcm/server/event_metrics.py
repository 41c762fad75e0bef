"""Metrics of trace events: what was recorded, streamed and lost."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.observability.trace_events import TraceEvents


class EventMetrics(Collector):
    """Counts of the recording and of the stream; read when scraped."""

    def __init__(self, events: TraceEvents) -> None:
        self._events = events

    def collect(self) -> Iterable[Metric]:
        counts, stream = self._events.counts, self._events.stream
        recorded = CounterMetricFamily(
            "kvcm_trace_events",
            "Trace events: recorded in files; dropped before they were recorded or streamed "
            "because too many waited; failed, because they could not be written.",
            labels=["outcome"],
        )
        recorded.add_metric(["recorded"], counts.recorded)
        recorded.add_metric(["dropped"], counts.dropped)
        recorded.add_metric(["failed"], counts.failed)
        yield recorded
        yield GaugeMetricFamily(
            "kvcm_event_subscribers", "Open streams of events.", value=len(stream.subscribers)
        )
        yield CounterMetricFamily(
            "kvcm_event_stream_dropped",
            "Events that a subscriber missed, for each that did.",
            value=stream.dropped,
        )
