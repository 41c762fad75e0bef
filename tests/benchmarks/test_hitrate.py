"""The hit-rate benchmark at small: what it measures with is right."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import hitrate


def chats(count: int, seed: int) -> list[tuple[float, tuple[int, ...]]]:
    """Chats that grow by a few blocks a turn, one request every three seconds."""
    dice = random.Random(seed)
    numbers = iter(range(1_000_000))
    open_chats: list[list[int]] = []
    requests: list[tuple[float, tuple[int, ...]]] = []
    for number in range(count):
        if not open_chats or dice.random() < 0.4:
            open_chats.append([])
        chat = dice.choice(open_chats[-8:])
        chat += [next(numbers) for _ in range(dice.randint(1, 9))]
        requests.append((3.0 * number, tuple(chat)))
    return requests


def lru_by_hand(chains: Sequence[Sequence[int]], capacity: int) -> float:
    """The same as `exact_lru` with a list."""
    cached: list[int] = []
    hits = asked = 0
    for chain in chains:
        asked += len(chain)
        for key in chain:
            if key not in cached:
                break
            hits += 1
        cached = [k for k in cached if k not in chain] + list(reversed(chain))
        cached = cached[-capacity:]
    return hits / asked


@pytest.mark.parametrize("capacity", [5, 40, 400])
def test_exact_lru_evicts_the_deepest_block_of_the_oldest_chain(capacity: int) -> None:
    chains = [chain for _, chain in chats(150, seed=3)]
    assert hitrate.exact_lru(chains, capacity) == lru_by_hand(chains, capacity)


@pytest.mark.parametrize("policy", sorted(hitrate.POLICIES))
async def test_a_replay_holds_no_more_than_its_capacity_and_all_of_it_can_be_found(
    policy: str, tmp_path: Path
) -> None:
    requests = chats(150, seed=4)
    blocks = hitrate.capacity_of(requests, 0.25)
    run = await hitrate.replay(requests, blocks, policy, tmp_path)
    assert run.asked == sum(len(chain) for _, chain in requests)
    assert run.written + run.refused + run.hits == run.asked
    assert blocks - 40 < run.serving <= run.highest <= blocks
    assert run.unreachable == 0
    if policy == "lru":
        exact = hitrate.exact_lru((chain for _, chain in requests), blocks)
        assert run.refused == 0
        assert abs(run.hits / run.asked - exact) < 0.03
    if policy == "tinylfu_lru":
        assert run.refused > 0


def test_requests_of_one_timestamp_keep_their_order(tmp_path: Path) -> None:
    rows = [(0, [1]), (0, [1, 2]), (3000, [3]), (3000, []), (3000, [4])]
    lines = [
        json.dumps({"timestamp": at, "input_length": 512 * len(ids), "hash_ids": ids})
        for at, ids in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    found = hitrate.requests_of(str(path))
    assert [chain for _, chain in found] == [(1,), (1, 2), (3,), (4,)]
    assert [at for at, _ in found] == [0.0, 0.001, 3.0, 3.001]
