"""A manager in this process: real registry, storages and transports over a stand-in cache."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from stand_in_cache import StandInCache

from kvcm._pb import admin_pb2_grpc, meta_pb2_grpc
from kvcm.server.lifecycle import Manager
from kvcm.server.settings import Settings, load

ANY_PORTS = {"rpc_port": 0, "http_port": 0, "admin_rpc_port": 0, "admin_http_port": 0}
INSTANCE = {
    "instance_group": "default",
    "instance_id": "i",
    "block_size": 4,
    "location_spec_infos": [{"name": "tp0", "size": 10}],
}


def bootstrap_document(root: Path) -> dict[str, Any]:
    return {
        "storages": [
            {"global_unique_name": "s1", "nfs": {"root_path": f"{root}/", "key_count_per_file": 8}}
        ],
        "instance_groups": [
            {
                "name": "default",
                "storage_candidates": ["s1"],
                "global_quota_group_name": "q",
                "quota": {"capacity": 1 << 30},
            }
        ],
    }


def settings_in(folder: Path, **flags: Any) -> Settings:
    """Settings of a manager that keeps everything below ``folder``."""
    bootstrap = folder / "bootstrap.json"
    bootstrap.write_text(json.dumps(bootstrap_document(folder / "blocks")))
    given = {
        **ANY_PORTS,
        "data_dir": str(folder / "data"),
        "index_url": "memory:",
        "bootstrap": str(bootstrap),
        "drain_s": 2,
        **flags,
    }
    return load(given, environ={})


@dataclass
class Running:
    """A started manager with clients of both transports."""

    manager: Manager
    cache: StandInCache
    http: httpx.AsyncClient
    meta: meta_pb2_grpc.MetaServiceAsyncStub
    admin: admin_pb2_grpc.AdminServiceAsyncStub
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def url(self, path: str, *, admin: bool = False) -> str:
        ports = self.manager.ports
        return f"http://127.0.0.1:{ports.admin_http if admin else ports.http}{path}"

    async def post(
        self, method: str, body: Mapping[str, Any] | None = None, *, admin: bool = False
    ) -> dict[str, Any]:
        """The answer of a call that parses; adds a trace id."""
        response = await self.http.post(
            self.url(f"/api/{method}", admin=admin), json={"trace_id": "t", **(body or {})}
        )
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def code(
        self, method: str, body: Mapping[str, Any] | None = None, *, admin: bool = False
    ) -> str:
        answer = await self.post(method, body, admin=admin)
        code: str = answer["header"]["status"]["code"]
        return code

    async def calls_ended(self, api: str) -> int:
        """How many calls of an RPC have ended so far."""
        metrics = (await self.post("getMetrics", admin=True))["metrics"]
        for metric in metrics:
            if metric["metric_tags"] == [{"tag_key": "api_name", "tag_value": api}]:
                return int(metric["metric_value"]["int_value"])
        return 0


Start = Callable[..., Any]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
