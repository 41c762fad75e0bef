"""A slice of a recorded trace, with real bytes: everything that can be hit is hit.

The traces are not part of the repository: set KVCM_TRACES, or put them into ../shared/traces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_harness import Site, result

from kvcm.optimizer.trace import ceiling, read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRACES = Path(os.environ.get("KVCM_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
WHOLE = {
    # requests, block requests, ceiling
    "mooncake_conversation": (12_031, 288_500, 0.36641),
    "mooncake_synthetic": (3_993, 121_877, 0.63960),
}


def trace_named(name: str) -> Path:
    path = TRACES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no trace at {path}")
    return path


@pytest.mark.parametrize(
    ("name", "skip", "limit"),
    [("mooncake_conversation", 200, 400), ("mooncake_synthetic", 3_600, 60)],
)
def test_a_slice_of_a_trace_reaches_its_ceiling_exactly(
    site: Site, name: str, skip: int, limit: int
) -> None:
    trace = trace_named(name)
    site.start()
    report = result(site.replay("--skip", skip, "--limit", limit, "--block-bytes", 256, trace))
    rows = read_trace(str(trace), skip=skip, limit=limit).rows
    best = ceiling(row.hash_ids for row in rows)
    blocks = report["blocks"]
    assert report["requests"] == len(rows) == limit
    assert blocks["asked"] == sum(len(row.hash_ids) for row in rows)
    assert (blocks["wrong"], blocks["lost"], blocks["refused"], blocks["failed"]) == (0, 0, 0, 0)
    assert blocks["hit"] == round(best.block_rate * blocks["asked"])
    assert blocks["written"] == best.distinct == site.usage()["serving_blocks"]
    assert report["hit_rate"]["blocks"] == report["ceiling"]["blocks"] > 0.1
    assert report["hit_rate"]["requests"] == report["ceiling"]["requests"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(WHOLE))
def test_a_whole_trace_reaches_its_ceiling_exactly(site: Site, name: str) -> None:
    requests, asked, rate = WHOLE[name]
    site.start()
    report = result(site.replay("--block-bytes", 256, trace_named(name)))
    assert report["requests"] == requests
    assert report["blocks"]["asked"] == asked
    assert report["blocks"]["wrong"] == report["blocks"]["lost"] == 0
    assert report["hit_rate"]["blocks"] == report["ceiling"]["blocks"]
    assert round(report["hit_rate"]["blocks"], 5) == rate
    assert site.stop() == 0
    assert site.audit().problems == []
