"""Keys in chains, and the requests that ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcm._pb import meta_pb2 as pb

Keys = npt.NDArray[np.int64]

INSTANCE = "bench"
GROUP = "bench"
STORAGE = "bench"
SPEC = "tp0"
BLOCK_TOKENS = 16
BLOCK_BYTES = 65_536
SIZES = (1, 64, 1_024, 4_400, 10_000)
"""Keys of one request."""
EXTENTS = (4, 32, 88)
"""Blocks of one StartWrite."""


@dataclass(frozen=True)
class Chain:
    """A chain of keys, written ``extent`` blocks at a time; asked for from its first key on."""

    keys: Keys
    extent: int

    def extents(self) -> Iterator[tuple[Keys, Keys]]:
        """Each extent's keys, and the key just before them (none at the head)."""
        for start in range(0, len(self.keys), self.extent):
            yield self.keys[start : start + self.extent], self.keys[max(start - 1, 0) : start]


class Chains:
    """About ``total`` random keys, an equal share for each request size.

    A share consists of chains just long enough for its size, so that requests of every size begin
    at the head of a chain, as those of engines do, and still spread over many keys.
    """

    def __init__(
        self, total: int, extent: int, sizes: Sequence[int] = SIZES, seed: int = 1
    ) -> None:
        self._random = np.random.default_rng(seed)
        self.extent = extent
        self.by_size: dict[int, list[Chain]] = {}
        for size in sizes:
            length = -(-size // extent) * extent
            count = max(1, total // len(sizes) // length)
            self.by_size[size] = [Chain(self.new_keys(length), extent) for _ in range(count)]

    def new_keys(self, count: int) -> Keys:
        """Keys that were never used before."""
        info = np.iinfo(np.int64)
        return self._random.integers(info.min, info.max, count, dtype=np.int64, endpoint=True)

    def all(self) -> list[Chain]:
        """Every chain, shuffled, so that neighbours in time are not neighbours in a chain."""
        chains = [chain for share in self.by_size.values() for chain in share]
        return [chains[i] for i in self._random.permutation(len(chains))]

    def pick(self, size: int, count: int) -> list[Keys]:
        """The first ``size`` keys of ``count`` random chains, different ones while they last."""
        share = self.by_size[size]
        picked = self._random.choice(len(share), count, replace=count > len(share))
        return [share[i].keys[:size] for i in picked]

    @property
    def total(self) -> int:
        """Keys in all chains."""
        return sum(len(chain.keys) for share in self.by_size.values() for chain in share)


def lookup_message(keys: Keys) -> pb.GetCacheLocationRequest:
    """A prefix lookup as an engine sends it."""
    return pb.GetCacheLocationRequest(
        trace_id="bench",
        instance_id=INSTANCE,
        query_type=pb.QT_PREFIX_MATCH,
        block_keys=keys.tolist(),
    )


def start_message(keys: Keys) -> pb.StartWriteCacheRequest:
    """A StartWrite of these keys."""
    return pb.StartWriteCacheRequest(
        trace_id="bench",
        instance_id=INSTANCE,
        block_keys=keys.tolist(),
        write_timeout_seconds=60,
    )


def finish_message(session: str, count: int) -> pb.FinishWriteCacheRequest:
    """Success of all ``count`` granted blocks, one bool each, as the connectors send it."""
    mask = pb.BlockMask(bool_masks=pb.BoolMasksType(values=[True] * count))
    return pb.FinishWriteCacheRequest(
        trace_id="bench", instance_id=INSTANCE, write_session_id=session, success_blocks=mask
    )


def bootstrap_document(root: str, key_count_max: int = 4_000_000) -> dict[str, object]:
    """Storages and groups of a manager under measurement: the startup defaults with room enough
    that no limit cuts in. An instance has a shard for 262,144 of ``key_count_max``."""
    return {
        "storages": [
            {
                "global_unique_name": STORAGE,
                "nfs": {"root_path": f"{root}/", "key_count_per_file": 8},
            }
        ],
        "instance_groups": [
            {
                "name": GROUP,
                "storage_candidates": [STORAGE],
                "global_quota_group_name": "bench_quota",
                "quota": {"capacity": 1 << 50},
                "cache_config": {
                    "meta_indexer_config": {"max_key_count": key_count_max, "mutex_shard_num": 16}
                },
            }
        ],
    }
