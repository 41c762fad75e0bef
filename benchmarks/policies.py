"""Hit rates of the eviction policies on a request trace, beside exact LRU per block.

Offline, with the order and the policies that the manager runs, over stand-ins for extents: what one
request misses is one extent. ``python -m benchmarks.policies TRACE...``.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcm.core.types import ReclaimPolicy
from kvcm.metaindex.entry import Entry
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.policy import Policy
from kvcm.metaindex.records import Extent, Phase, Run, State

SHARES = (0.05, 0.10, 0.25, 0.50)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: its blocks from the first on, each named by its whole prefix."""

    at_ms: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[Request]:
    """A trace with ``timestamp`` (ms) and ``hash_ids`` a line."""
    with path.open(encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        return [Request(int(row["timestamp"]), tuple(row["hash_ids"])) for row in rows]


def distinct(trace: Iterable[Request]) -> int:
    """Blocks that occur."""
    return len({block for request in trace for block in request.blocks})


def stand_in(number: int, now_ms: int, blocks: int, depth: int) -> Entry:
    """A settled extent of so many blocks, for an order."""
    extent = Extent(
        extent_id=number.to_bytes(12, "big"),
        keys=b"",
        storage="s",
        storage_type=1,
        descriptor=b"",
        specs=(),
        spec_sets=(0,),
        subset_of=b"",
        trim=0,
        runs=(Run(0, depth, None, 0),),
        started_ms=now_ms,
        timeout_s=1,
    )
    state = State(b"", Phase.SETTLED, now_ms, finished_ms=now_ms)
    return Entry("i", extent, state, Delta(serving_blocks=blocks))


Admit = Callable[[Request, Sequence[int], int], int]
"""Of a request's missing blocks, how many leading ones are written; the last argument is how many
blocks must go for all of them."""


class Cache:
    """Extents under one policy.

    Args:
        capacity: blocks.
        points: hysteresis, a fraction: eviction goes on until so much of the capacity is free.
    """

    def __init__(
        self, policy: Policy, capacity: int, *, points: float = 0.0, admit: Admit | None = None
    ) -> None:
        self.order = EvictionOrder(policy)
        self.order.resize(capacity)
        self.capacity = capacity
        self.low = int(capacity * (1 - points))
        self.used = 0
        self.blocks: dict[int, Entry] = {}
        self.unreachable = 0
        self._keys: dict[Entry, tuple[int, ...]] = {}
        self._admit = admit
        self._made = 0

    def request(self, request: Request) -> int:
        """Look a prompt up, write what is missing; the number of blocks found."""
        blocks = request.blocks
        found = next((i for i, b in enumerate(blocks) if b not in self.blocks), len(blocks))
        present = [self.blocks[b] for b in blocks if b in self.blocks]
        self.unreachable += len(present) - found
        used = list(dict.fromkeys(present))
        self.order.touch(used, request.at_ms)
        missing = [b for b in blocks[found:] if b not in self.blocks]
        if self._admit is not None and missing:
            excess = max(0, self.used + len(missing) - self.capacity)
            missing = missing[: self._admit(request, missing, excess)]
        if missing:
            self._write(request, tuple(missing), used[-1:], found)
        if self.used > self.capacity:
            self._evict()
        return found

    def _write(
        self, request: Request, missing: tuple[int, ...], parents: Sequence[Entry], depth: int
    ) -> None:
        self._made += 1
        entry = stand_in(self._made, request.at_ms, len(missing), depth)
        self.order.link(entry, parents)
        self.order.granted(len(missing))
        self.order.touch((entry,), request.at_ms, write=True)
        self.order.add(entry)
        self._keys[entry] = missing
        self.blocks.update(dict.fromkeys(missing, entry))
        self.used += len(missing)

    def _evict(self) -> None:
        while self.used > self.low:
            victims = self.order.coldest(8)
            if not victims and not self.order.behind:
                return
            for victim in victims:
                if self.used <= self.low:
                    break
                for block in self._keys.pop(victim):
                    del self.blocks[block]
                    self.used -= 1
                self.order.leave(victim)


class ExactLru:
    """LRU per block; the deepest of a request count as the least recently used of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def request(self, request: Request) -> int:
        """As ``Cache.request``."""
        order, blocks = self._order, request.blocks
        found = next((i for i, b in enumerate(blocks) if b not in order), len(blocks))
        for block in reversed(blocks):
            order[block] = None
            order.move_to_end(block)
        while len(order) > self.capacity:
            order.popitem(last=False)
        return found


def hit_rate(cache: Cache | ExactLru, trace: Sequence[Request]) -> float:
    """Blocks found of all blocks asked for."""
    asked = sum(len(request.blocks) for request in trace)
    return sum(map(cache.request, trace)) / asked


def main() -> None:
    """Print a table per trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--points", type=float, default=0.05, help="hysteresis of the second rows")
    args = parser.parse_args()
    for path in args.traces:
        trace = read_trace(path)
        total = distinct(trace)
        print(f"{path.name}: {total} blocks", *(f"{share:>7.0%}" for share in SHARES))
        sizes = [int(total * share) for share in SHARES]
        _print("exact LRU per block", [hit_rate(ExactLru(size), trace) for size in sizes])
        for points in (0.0, args.points):
            for kind in (ReclaimPolicy.LRU, ReclaimPolicy.LFU):
                caches = [Cache(Policy(kind), size, points=points) for size in sizes]
                name = f"{kind.name}, {points:.0%} hysteresis"
                _print(name, [hit_rate(cache, trace) for cache in caches])
                assert not any(cache.unreachable for cache in caches)


def _print(name: str, rates: Sequence[float]) -> None:
    print(f"  {name:<22}", *(f"{rate:7.4f}" for rate in rates))


if __name__ == "__main__":
    main()
