"""Latency summaries are exact in count and maximum and close in their quantiles."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.optimizer.latency import LatencyHistogram

durations = st.lists(st.floats(2e-6, 100), min_size=1, max_size=200)


@given(durations, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_two_percent_above_the_exact_one(values, q):
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    ranked = sorted(values)
    exact = ranked[max(0, -(-int(q * 100 * len(values)) // 100) - 1)]
    assert exact * 0.999999 <= histogram.quantile(q) <= exact * 1.021
    assert histogram.max_s == max(values)


@given(durations, durations)
def test_merging_equals_recording_in_one_place(left, right):
    parts = [LatencyHistogram(), LatencyHistogram()]
    whole = LatencyHistogram()
    for values, part in zip((left, right), parts, strict=True):
        for value in values:
            part.add(value)
            whole.add(value)
    wire = msgspec.json.decode(msgspec.json.encode(parts[1]), type=LatencyHistogram)
    parts[0].merge(wire)
    assert parts[0].buckets == whole.buckets
    assert (parts[0].count, parts[0].max_s) == (whole.count, whole.max_s)
    assert parts[0].total_s == pytest.approx(whole.total_s)


def test_an_empty_histogram_reads_as_zero():
    assert LatencyHistogram().summary_ms() == {"count": 0, "p50": 0, "p99": 0, "max": 0, "mean": 0}


def test_a_duration_of_zero_is_counted():
    histogram = LatencyHistogram()
    histogram.add(0.0)
    assert histogram.count == 1
    assert histogram.quantile(0.5) == 0.0
