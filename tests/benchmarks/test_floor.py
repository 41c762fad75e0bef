"""A floor under the hot path: an order of magnitude lost shows here, a busy machine does not.

Counted is the processor time of the loop's thread, the best of several calls. What a machine really
does is measured by ``make bench`` and noted in benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.inprocess import local_calls
from benchmarks.profile import Profiler, What

KEYS = 4_400
EXTENT = 88
CALLS = 5


@pytest.fixture(params=["memory:", ""], ids=["memory", "rocksdb"])
async def profiler(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Profiler]:
    """A manager that holds a few chains, each looked up once."""
    async with local_calls(tmp_path, request.param) as local:
        found = Profiler(local, KEYS, EXTENT, filled=5 * KEYS)
        await found.fill()
        yield found


async def best_ms(profiler: Profiler, what: What) -> float:
    return min(took.cpu for took in await profiler.times(what, CALLS)) * 1e3


async def test_a_lookup_of_4400_cached_keys_walks_extents_not_blocks(profiler: Profiler) -> None:
    assert await best_ms(profiler, What.LOOKUP) < 4.4  # 1 M keys/s; about 0.4 ms when quiet


async def test_a_start_of_4400_new_keys_makes_no_store_call_a_key(profiler: Profiler) -> None:
    assert await best_ms(profiler, What.START) < 300  # about 30 ms when quiet


async def test_a_finish_of_4400_blocks_is_one_record(profiler: Profiler) -> None:
    assert await best_ms(profiler, What.FINISH) < 60  # about 3 ms when quiet
