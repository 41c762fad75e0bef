"""A stand-in for the cache use cases: a dict of keys, real answers in both wire forms."""

from __future__ import annotations

import asyncio
from typing import Any

from kvcm._pb import meta_pb2
from kvcm.cache.api import (
    FinishWriteRequest,
    LookupAnswer,
    LookupRequest,
    MetaAnswer,
    MetaRequest,
    RemoveRequest,
    ReportAnswer,
    ReportRequest,
    StartWriteAnswer,
    StartWriteRequest,
    TrimRequest,
    Usage,
    UsageLimit,
    UsageReport,
    WireForm,
)
from kvcm.core.errors import InstanceNotExist, InvalidArgument, SessionNotExist
from kvcm.core.mask import BlockMask
from kvcm.core.types import ReportOutcome
from kvcm.server import jsonwire


class StandInCache:
    """Just enough to see what the edges pass on and what they do with the answers."""

    def __init__(self, registry: Any = None) -> None:
        self.registry = registry
        self.loops: list[Any] = []
        self.repair: Any = None
        self.space: Any = None
        self.ceilings: Any = None
        self.watchers: list[Any] = []
        self.requests: list[Any] = []
        self.abandoned: list[str] = []
        self.cancelled: list[str] = []
        self.sessions: dict[str, list[int]] = {}
        self.serving: set[int] = set()
        self.prepared: list[str] = []
        self.dropped: list[str] = []
        self.blocks_on_storage = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.error: Exception | None = None
        self.reason = ""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def _enter(self, request: Any) -> None:
        self.requests.append(request)
        if self.registry is not None and request.instance_id not in self.registry.view.instances:
            raise InstanceNotExist(f"instance {request.instance_id!r} is not registered")
        self.entered.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(type(request).__name__)
            raise
        if self.error is not None:
            raise self.error

    async def lookup(self, request: LookupRequest) -> LookupAnswer:
        await self._enter(request)
        keys = list(request.keys.array())
        hits = [key for key in keys if key in self.serving]
        return LookupAnswer([_body(hits, request.form, 2)], len(hits), len(keys))

    async def get_meta(self, request: MetaRequest) -> MetaAnswer:
        await self._enter(request)
        keys = list(request.keys.array())
        return MetaAnswer(_body(keys, request.form, 2), ["{}"] * len(keys))

    async def start_write(self, request: StartWriteRequest) -> StartWriteAnswer:
        await self._enter(request)
        keys = list(request.keys.array())
        new = [key for key in keys if key not in self.serving]
        session = f"{len(self.sessions):032d}"
        self.sessions[session] = new
        mask = BlockMask(values=[key in self.serving for key in keys])
        leading = mask.leading(len(keys))
        return StartWriteAnswer(
            session,
            mask if leading is None else BlockMask(offset=leading),
            _body(new, request.form, 4),
            len(new),
            self.reason,
        )

    async def finish_write(self, request: FinishWriteRequest) -> None:
        await self._enter(request)
        if request.success is None:
            raise InvalidArgument("success_blocks is not set")
        keys = self.sessions.pop(request.session_id, None)
        if keys is None:
            raise SessionNotExist(f"write session {request.session_id!r} is unknown or over")
        flags = request.success.flags(len(keys))
        self.serving.update(key for key, ok in zip(keys, flags, strict=True) if ok)

    async def abandon(self, instance_id: str, session_id: str) -> None:
        self.abandoned.append(session_id)
        self.sessions.pop(session_id, None)

    async def remove(self, request: RemoveRequest) -> None:
        await self._enter(request)
        self.serving.difference_update(request.keys.array())

    async def trim(self, request: TrimRequest) -> None:
        await self._enter(request)
        self.serving.clear()

    async def report(self, request: ReportRequest) -> ReportAnswer:
        await self._enter(request)
        outcomes = []
        for key, location in zip(request.keys.array(), request.locations, strict=True):
            known = key in self.serving and f"file://s/{key}?size=1" in location.values()
            outcomes.append(ReportOutcome.ACCEPTED if known else ReportOutcome.STALE)
            self.serving.discard(key)
        return ReportAnswer(outcomes)

    async def remove_instance(self, instance_id: str, group: str | None) -> None:
        instance = await self.registry.close_instance(instance_id, group)
        await self.registry.forget_instance(instance.uid)

    def prepare_instance(self, instance_id: str) -> None:
        self.prepared.append(instance_id)

    def storage_blocks(self, storage: str) -> int:
        return self.blocks_on_storage

    async def drop_storage(self, storage: str) -> None:
        self.dropped.append(storage)
        self.blocks_on_storage = 0

    def busy_instance_uids(self) -> set[str]:
        return set()

    def usage(self, *, ahead: bool = False) -> UsageReport:
        limit = UsageLimit("bytes", 10, None, 8, 7)
        return UsageReport(
            groups={"default": Usage(serving_bytes=7, serving_blocks=1, limit=limit)},
            refused={("default", "QUOTA_GROUP"): 3},
            error_reports={("missing", "accepted"): 2},
            group_types={("default", "file"): Usage(serving_bytes=7, serving_blocks=1)},
        )


def _body(keys: list[int], form: WireForm, number: int) -> bytes:
    locations = [
        meta_pb2.CacheLocation(
            type=meta_pb2.ST_NFS,
            spec_size=1,
            location_specs=[meta_pb2.LocationSpec(name="tp0", uri=f"file://s/{key}?size=1")],
        )
        for key in keys
    ]
    if form is WireForm.JSON:
        return b",".join(map(jsonwire.render, locations))
    response: Any = (
        meta_pb2.GetCacheLocationResponse(locations=locations)
        if number == 2
        else meta_pb2.StartWriteCacheResponse(locations=locations)
    )
    encoded: bytes = response.SerializeToString()
    return encoded
