"""What the use cases share: resolving an instance and its request's keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvcm.cache.admission import Admission
from kvcm.cache.api import KeysRequest
from kvcm.core import limits
from kvcm.core.clock import Clock
from kvcm.core.errors import InstanceNotExist, InvalidArgument
from kvcm.core.hashing import TokenHasher
from kvcm.core.keys import KeyBatch
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.instance import InstanceIndex

_TOKENS_PER_STEP = 2048


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Server-wide settings of the cache."""

    reply_bytes_max: int = limits.REPLY_BYTES_DEFAULT
    write_timeout_s_default: int = limits.WRITE_TIMEOUT_S_DEFAULT
    write_timeout_s_max: int = limits.WRITE_TIMEOUT_S_MAX
    empty_session_timeout_s: int = limits.EMPTY_SESSION_TIMEOUT_S
    grace_s_min: float = limits.GRACE_S_MIN
    read_cache_bytes: int = 1 << 30
    room_wait_s: float = limits.ROOM_WAIT_S_DEFAULT
    """How long a StartWrite that a limit cut waits for eviction to make room; 0 = not at all."""


class Context:
    """Index, clock and settings of the use cases."""

    def __init__(
        self,
        index: MetaIndex,
        clock: Clock,
        settings: CacheSettings,
        group_of: Callable[[str], InstanceGroup | None],
        storage_of: Callable[[str], StorageConfig | None],
    ) -> None:
        self.index = index
        self.clock = clock
        self.settings = settings
        self.group_of = group_of
        self.storage_of = storage_of
        self.admission = Admission(index, storage_of)

    def instance(self, instance_id: str) -> InstanceIndex:
        """The index of a registered instance.

        Raises:
            InstanceNotExist: none of that id.
        """
        found = self.index.by_id.get(instance_id)
        if found is None or found.closed:
            raise InstanceNotExist(f"instance {instance_id[:200]!r} does not exist")
        return found

    async def keys(self, index: InstanceIndex, request: KeysRequest) -> KeyBatch:
        """The request's block keys; from its tokens when it brings no keys (wire.md §3).

        Raises:
            InvalidArgument: too many keys.
        """
        batch = request.keys
        if not batch.data and request.token_ids is not None and request.token_ids.data:
            batch = await self._hash(index.instance.block_size, request.token_ids)
        if len(batch.data) > limits.KEYS_PER_REQUEST_MAX and (
            len(batch) > limits.KEYS_PER_REQUEST_MAX
        ):
            raise InvalidArgument(
                f"block_keys: {len(batch)} keys in one request, "
                f"the limit is {limits.KEYS_PER_REQUEST_MAX}"
            )
        return batch

    async def _hash(self, block_size: int, tokens: KeyBatch) -> KeyBatch:
        values = tokens.array()
        hasher = TokenHasher(block_size)
        for start in range(0, len(values), _TOKENS_PER_STEP):
            if start:
                await asyncio.sleep(0)
            hasher.update(values[start : start + _TOKENS_PER_STEP])
        return KeyBatch.from_ints(hasher.keys)

    def now_ms(self) -> int:
        """Wall clock in epoch milliseconds."""
        return int(self.clock.now() * 1000)
