"""The handlers of MetaService, for both transports (wire.md §2, §4, §5)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvcm.cache.api import CacheService
from kvcm.core.errors import InstanceNotExist, KvcmError
from kvcm.core.mask import BlockMask
from kvcm.core.storage_configs import storage_configs_json
from kvcm.core.types import Instance, ReportOutcome, StorageConfig
from kvcm.registry.registry import Registry
from kvcm.server import pb_entities, requests
from kvcm.server.calls import Call

log = logging.getLogger(__name__)

AnyCall = Call[Any, Any]


class MetaService:
    """What engines call.

    Args:
        available: whether the storage of that name can be used now.
    """

    def __init__(
        self, registry: Registry, cache: CacheService, available: Callable[[str], bool]
    ) -> None:
        self._registry = registry
        self._cache = cache
        self._available = available
        self._tasks: set[asyncio.Task[Any]] = set()

    async def drained(self) -> None:
        """Wait for what was started on behalf of callers that are gone."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def RegisterInstance(self, call: AnyCall) -> None:
        instance = await self.register(call.request)
        call.response.storage_configs = storage_configs_json(self._candidates(instance))

    async def register(self, request: Any) -> Instance:
        """Register and prepare the instance of a RegisterInstanceRequest of either package."""
        instance = await self._registry.register_instance(pb_entities.instance_of(request))
        self._cache.prepare_instance(instance.instance_id)
        return instance

    async def GetInstanceInfo(self, call: AnyCall) -> None:
        instance = self.instance(call.request.instance_id)
        call.response.instance_group = instance.instance_group
        group = self._registry.view.groups.get(instance.instance_group)
        pb_entities.fill_instance_info(call.response.instance_info, instance, group)

    def instance(self, instance_id: str) -> Instance:
        """Raises InstanceNotExist."""
        instance = self._registry.view.instances.get(instance_id)
        if instance is None:
            raise InstanceNotExist(f"instance {instance_id!r} is not registered")
        return instance

    async def GetCacheLocation(self, call: AnyCall) -> None:
        call.body = (await self._cache.lookup(requests.lookup_request(call))).pieces

    async def GetCacheMeta(self, call: AnyCall) -> None:
        answer = await self._cache.get_meta(requests.meta_request(call))
        call.body = (answer.body,)
        call.response.metas.extend(answer.metas)

    async def StartWriteCache(self, call: AnyCall) -> None:
        request = requests.start_write_request(call)
        # A cancelled start frees what it granted by itself; only a lost reply is our concern.
        answer = await self._cache.start_write(request)
        call.lost = lambda: self._give_back(request.instance_id, answer.session_id)
        call.body = (answer.body,)
        call.reason = answer.reason
        call.response.write_session_id = answer.session_id
        _fill_mask(call.response.block_mask, answer.mask)

    async def FinishWriteCache(self, call: AnyCall) -> None:
        await self._cache.finish_write(requests.finish_write_request(call))

    async def RemoveCache(self, call: AnyCall) -> None:
        await self._cache.remove(requests.remove_request(call))

    async def TrimCache(self, call: AnyCall) -> None:
        await self._cache.trim(requests.trim_request(call))

    async def ReportCacheError(self, call: AnyCall) -> None:
        answer = await self._cache.report(requests.report_request(call))
        response = call.response
        response.outcomes.extend(answer.outcomes)
        counts = Counter(answer.outcomes)
        response.accepted = counts[ReportOutcome.ACCEPTED]
        response.stale = counts[ReportOutcome.STALE]
        response.not_verified = counts[ReportOutcome.NOT_VERIFIED]
        response.unchecked = counts[ReportOutcome.UNCHECKED]
        response.limited = counts[ReportOutcome.LIMITED]

    def _candidates(self, instance: Instance) -> list[tuple[StorageConfig, bool]]:
        view = self._registry.view
        group = view.groups.get(instance.instance_group)
        names = set(group.storage_candidates) if group is not None else set()
        return [
            (view.storages[name], self._available(name)) for name in names & view.storages.keys()
        ]

    def _give_back(self, instance_id: str, session_id: str) -> None:
        async def abandon() -> None:
            try:
                await self._cache.abandon(instance_id, session_id)
            except KvcmError as error:
                # Nobody waits for this; what is not given back now expires with its session.
                log.info("a write of instance %r was not given back: %s", instance_id, error)

        task = asyncio.ensure_future(abandon())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fill_mask(message: Any, mask: BlockMask) -> None:
    if mask.values is None:
        message.offset = mask.offset or 0
    else:
        message.bool_masks.SetInParent()
        message.bool_masks.values.extend(mask.values)
