"""What the stores share."""

from __future__ import annotations

from kvcm.core.errors import StaleFence
from kvcm.metaindex.store import Fence, ShardId


def stale(shard: ShardId, fence: Fence, held: Fence | None) -> StaleFence:
    """The refusal of ``fence``; ``held`` is the shard's, None when nobody claimed it."""
    where = f"shard {shard.number} of space {shard.space.hex()}"
    if held is None:
        return StaleFence(f"{where} is not claimed; refused fence {tuple(fence)}")
    return StaleFence(
        f"{where} is claimed with fence {tuple(held)}; refused fence {tuple(fence)}",
        epoch=held.epoch,
    )
