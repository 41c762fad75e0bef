"""A MetaService over gRPC on a few dicts, whose answers a test can bend: for the fleet's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvcm._pb import meta_pb2 as pb
from kvcm._pb import meta_pb2_grpc
from kvcm.core.errors import ErrorCode
from kvcm.core.types import QueryType


class FakeManager(meta_pb2_grpc.MetaServiceServicer):
    """One file a block below ``root``; single spec ``tp0``. Bend it by the attributes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.serving: dict[int, str] = {}
        self.open: dict[str, list[int]] = {}
        self.sessions = 0
        self.lookups = 0
        self.registered: list[Any] = []
        self.bend_uri: Callable[[int, str], str] = lambda key, uri: uri
        self.on_lookup: Callable[[int], None] = lambda count: None
        self.refuse = False
        self.lock = threading.Lock()

    def RegisterInstance(self, request, context):
        self.registered.append(request)
        self.size = request.location_spec_infos[0].size
        return pb.RegisterInstanceResponse(header=header(), storage_configs="[]")

    def GetCacheLocation(self, request, context):
        with self.lock:
            self.lookups += 1
            self.on_lookup(self.lookups)
            locations = []
            for key in request.block_keys:
                uri = self.serving.get(key)
                if uri is None and request.query_type == QueryType.PREFIX_MATCH:
                    break
                locations.append(location(self.bend_uri(key, uri) if uri else ""))
            return pb.GetCacheLocationResponse(header=header(), locations=locations)

    def StartWriteCache(self, request, context):
        with self.lock:
            if self.refuse:
                status = header(ErrorCode.REACH_MAX_ENTITY_CAPACITY, "full", "QUOTA_GROUP")
                return pb.StartWriteCacheResponse(header=status)
            taken = set(self.serving).union(*self.open.values())
            granted = [key for key in request.block_keys if key not in taken]
            self.sessions += 1
            session = f"{self.sessions:032}"
            self.open[session] = granted
            return pb.StartWriteCacheResponse(
                header=header(),
                write_session_id=session,
                block_mask=pb.BlockMask(
                    bool_masks={"values": [key in taken for key in request.block_keys]}
                ),
                locations=[location(self.uri(session, key)) for key in granted],
            )

    def FinishWriteCache(self, request, context):
        with self.lock:
            keys = self.open.pop(request.write_session_id)
            for key, ok in zip(keys, request.success_blocks.bool_masks.values, strict=True):
                if ok:
                    self.serving[key] = self.uri(request.write_session_id, key)
            return pb.CommonResponse(header=header())

    def uri(self, session: str, key: int) -> str:
        return f"file://fake{self.root}/{session}_{key}?size={self.size}"


def header(code: int = ErrorCode.OK, message: str = "", reason: str = "") -> Any:
    return pb.CommonResponseHeader(status={"code": code, "message": message, "reason": reason})


def location(uri: str) -> Any:
    specs = [{"name": "tp0", "uri": uri}]
    return pb.CacheLocation(type=4 if uri else 0, spec_size=1, location_specs=specs)


@contextmanager
def serve(manager: FakeManager, port: int = 0) -> Iterator[tuple[str, grpc.Server]]:
    """Address and server; stopped on leaving."""
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    meta_pb2_grpc.add_MetaServiceServicer_to_server(manager, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{bound}", server
    finally:
        server.stop(0).wait()
