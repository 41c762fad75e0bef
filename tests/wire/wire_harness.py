"""A real manager process, and both transports to it without any code of the client library.

Requests are plain dicts. Over gRPC they go through protobuf's own JSON mapping, over HTTP through
``json``; answers come back as one dict in the printing rules of wire.md §1, so one expectation
holds for both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.testing.eventually import eventually_sync

Json = dict[str, Any]

PACKAGES = {
    False: ("kv_cache_manager.proto.meta.MetaService", meta_pb2, "MetaService"),
    True: ("kv_cache_manager.proto.admin.AdminService", admin_pb2, "AdminService"),
}
SPECS = [{"name": "tp0", "size": 1000}, {"name": "tp1", "size": 500}]
KEYS_PER_FILE = 8
START_S = 60.0
STOP_S = 20.0
CALL_S = 30.0


def group_document(name: str, **changes: Any) -> Json:
    """An instance group on storage ``nfs_01`` that never reclaims."""
    return {
        "name": name,
        "storage_candidates": ["nfs_01"],
        "global_quota_group_name": "q",
        "max_instance_count": 0,
        "quota": {"capacity": 1 << 40},
        "cache_config": {
            "reclaim_strategy": {
                "reclaim_policy": "POLICY_LRU",
                "trigger_strategy": {"used_percentage": 2},
            },
            "meta_indexer_config": {"max_key_count": 1000000, "mutex_shard_num": 16},
        },
        "version": 1,
        **changes,
    }


@dataclass
class Server:
    """One ``kvcm serve`` process; ``root`` is the folder of storage ``nfs_01``."""

    process: subprocess.Popen[bytes]
    folder: Path
    root: Path
    ports: dict[str, int]
    http: httpx.Client
    channels: dict[bool, grpc.Channel] = field(default_factory=dict)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def port(self, transport: str, admin: bool = False) -> int:
        kind = "rpc" if transport == "grpc" else "http"
        return self.ports[f"admin_{kind}_port" if admin else f"{kind}_port"]

    def url(self, path: str, *, admin: bool = False) -> str:
        return f"http://127.0.0.1:{self.port('http', admin)}{path}"

    def post_raw(
        self, method: str, body: bytes | str, *, admin: bool = False, **options: Any
    ) -> httpx.Response:
        """A POST of exactly these bytes."""
        content = body.encode() if isinstance(body, str) else body
        return self.http.post(self.url(f"/api/{method}", admin=admin), content=content, **options)

    def call_raw(
        self, method: str, data: bytes, *, admin: bool = False, timeout: float | None = CALL_S
    ) -> bytes:
        """A gRPC call of exactly these bytes."""
        service = PACKAGES[admin][0]
        answer: bytes = self.channels[admin].unary_unary(f"/{service}/{method}")(
            data, timeout=timeout
        )
        return answer


def free_of_settings() -> dict[str, str]:
    """The environment without the settings of a real manager."""
    return {k: v for k, v in os.environ.items() if not k.startswith("KVCM_")}


@contextmanager
def running_server(
    *settings: str,
    bootstrap: Json | None = None,
    folder: Path | None = None,
    ports: Mapping[str, int] | None = None,
) -> Iterator[Server]:
    """Start a manager on free ports and stop it (SIGTERM) in the end.

    Args:
        settings: ``key=value`` of ``--set``.
        bootstrap: first contents; default is storage ``nfs_01`` and group ``default``; empty for
            those of the manager.
        folder: where everything lies; default is a fresh one that is deleted afterwards.
        ports: by setting; the others are free ones.
    """
    own = folder is None
    folder = Path(tempfile.mkdtemp(prefix="kvcm-wire-")) if folder is None else folder
    try:
        with _process(folder, settings, bootstrap, ports or {}) as server:
            yield server
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _process(
    folder: Path, settings: Sequence[str], bootstrap: Json | None, ports: Mapping[str, int]
) -> Iterator[Server]:
    root = folder / "blocks"
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    if bootstrap is None:
        nfs = {"root_path": f"{root}/", "key_count_per_file": KEYS_PER_FILE}
        bootstrap = {
            "storages": [{"global_unique_name": "nfs_01", "nfs": nfs}],
            "instance_groups": [group_document("default")],
        }
    command = [sys.executable, "-m", "kvcm.cli.main", "serve", "--data-dir", str(folder / "data")]
    if bootstrap:
        (folder / "bootstrap.json").write_text(json.dumps(bootstrap))
        command += ["--bootstrap", str(folder / "bootstrap.json")]
    for port in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port"):
        command += ["--" + port.replace("_", "-"), str(ports.get(port, 0))]
    for assignment in settings:
        command += ["--set", assignment]
    command += ["--ready-file", str(ready)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=free_of_settings()
        )
    try:
        eventually_sync(
            lambda: ready.exists() or process.poll() is not None,
            timeout=START_S,
            message="the manager starts",
        )
        assert process.poll() is None, (folder / "log").read_text()
        real = {k: v for k, v in json.loads(ready.read_text()).items() if k.endswith("_port")}
        with httpx.Client(timeout=CALL_S) as http:
            server = Server(process, folder, root, real, http)
            for admin in (False, True):
                server.channels[admin] = grpc.insecure_channel(
                    f"127.0.0.1:{server.port('grpc', admin)}",
                    options=[("grpc.max_receive_message_length", -1)],
                )
            try:
                yield server
            finally:
                for channel in server.channels.values():
                    channel.close()
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Wire:
    """The methods of a manager over one transport."""

    def __init__(self, server: Server, transport: str) -> None:
        self.server = server
        self.transport = transport

    def call(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        """A method of MetaService by its RPC name; the answer as a dict."""
        return self._call(method, {"trace_id": "t", **(body or {}), **fields}, admin=False)

    def admin(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        """The same for AdminService."""
        return self._call(method, {"trace_id": "t", **(body or {}), **fields}, admin=True)

    def ok(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        """A call of MetaService that must succeed."""
        return succeeded(self.call(method, body, **fields))

    def admin_ok(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        """A call of AdminService that must succeed."""
        return succeeded(self.admin(method, body, **fields))

    def _call(self, method: str, body: Json, *, admin: bool) -> Json:
        if self.transport == "grpc":
            return self._grpc(method, body, admin=admin)
        response = self.server.post_raw(lower_camel(method), json.dumps(body), admin=admin)
        assert response.status_code == 200, (response.status_code, response.text)
        assert response.headers["content-type"] == "application/json"
        answer: Json = response.json()
        return answer

    def _grpc(self, method: str, body: Json, *, admin: bool) -> Json:
        request_type, response_type = types_of(method, admin=admin)
        request = json_format.ParseDict(body, request_type(), ignore_unknown_fields=True)
        data = self.server.call_raw(method, request.SerializeToString(), admin=admin)
        return shown(response_type.FromString(data))


def types_of(method: str, *, admin: bool = False) -> tuple[type[Message], type[Message]]:
    """Request and response class of a method."""
    _, module, service = PACKAGES[admin]
    described = module.DESCRIPTOR.services_by_name[service].methods_by_name[method]
    return (
        getattr(module, described.input_type.name),
        getattr(module, described.output_type.name),
    )


def methods(*, admin: bool) -> list[str]:
    """RPC names of a service."""
    _, module, service = PACKAGES[admin]
    return [m.name for m in module.DESCRIPTOR.services_by_name[service].methods]


def shown(message: Message) -> Json:
    """A message as the HTTP transport has to print it, by protobuf's own mapping."""
    tree: Json = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _drop_silent_additions(tree, message.DESCRIPTOR)
    return tree


def _drop_silent_additions(tree: Json, kind: Descriptor) -> None:
    """Fields from 100 up are not printed when they say nothing (wire.md, rules for evolution)."""
    for described in kind.fields:
        value = tree.get(described.name)
        if described.number >= 100 and not value:
            tree.pop(described.name, None)
        elif described.message_type is not None and value:
            for item in value if described.is_repeated else [value]:
                _drop_silent_additions(item, described.message_type)


def lower_camel(method: str) -> str:
    """The method as the HTTP path has it."""
    return method[0].lower() + method[1:]


def succeeded(answer: Json) -> Json:
    """The answer, whose code must be OK."""
    assert answer["header"]["status"]["code"] == "OK", answer["header"]
    return answer


def code_of(answer: Json) -> str:
    """The application code."""
    code: str = answer["header"]["status"]["code"]
    return code


def message_of(answer: Json) -> str:
    """The text of the status."""
    message: str = answer["header"]["status"]["message"]
    return message


def reason_of(answer: Json) -> str:
    """The reason of the status, an addition."""
    reason: str = answer["header"]["status"].get("reason", "")
    return reason


def miss(names: Sequence[str] = ("tp0", "tp1"), spec_size: int | None = None) -> Json:
    """The placeholder of a key that is not there."""
    return {
        "type": "ST_UNSPECIFIED",
        "spec_size": len(names) if spec_size is None else spec_size,
        "location_specs": [{"name": name, "uri": ""} for name in names],
    }


def uris(location: Json) -> dict[str, str]:
    """Spec name → URI of a location."""
    return {spec["name"]: spec["uri"] for spec in location["location_specs"]}


class Instance:
    """One registered instance over one transport, with the steps that most tests need."""

    def __init__(self, wire: Wire, instance_id: str) -> None:
        self.wire = wire
        self.id = instance_id

    def call(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        return self.wire.call(method, {"instance_id": self.id, **(body or {}), **fields})

    def ok(self, method: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Json:
        return succeeded(self.call(method, body, **fields))

    def start(self, keys: Sequence[int], **fields: Any) -> Json:
        return self.ok("StartWriteCache", block_keys=list(keys), **fields)

    def finish(self, session: str, success: Json, **fields: Any) -> Json:
        return self.call(
            "FinishWriteCache", write_session_id=session, success_blocks=success, **fields
        )

    def write(self, keys: Sequence[int], **fields: Any) -> list[Json]:
        """Start and finish; the granted locations."""
        started = self.start(keys, **fields)
        locations: list[Json] = started["locations"]
        succeeded(self.finish(started["write_session_id"], {"offset": len(locations)}))
        return locations

    def prefix(self, keys: Sequence[int], **fields: Any) -> list[Json]:
        return self.lookup("QT_PREFIX_MATCH", keys, **fields)

    def batch(self, keys: Sequence[int], **fields: Any) -> list[Json]:
        return self.lookup("QT_BATCH_GET", keys, **fields)

    def lookup(self, query: str, keys: Sequence[int], **fields: Any) -> list[Json]:
        answer = self.ok("GetCacheLocation", query_type=query, block_keys=list(keys), **fields)
        locations: list[Json] = answer["locations"]
        return locations

    def statuses(self, keys: Sequence[int]) -> list[str]:
        metas = self.ok("GetCacheMeta", block_keys=list(keys))["metas"]
        return [json.loads(meta)["status"].removeprefix("CLS_") for meta in metas]


def registration(instance_id: str, **changes: Any) -> Json:
    """The body of a registration in group ``default`` with two specs."""
    return {
        "instance_group": "default",
        "instance_id": instance_id,
        "block_size": 4,
        "location_spec_infos": SPECS,
        "model_deployment": {"model_name": "m", "dtype": "bf16", "tp_size": 2},
        **changes,
    }


REQUEST_ID = re.compile(rb'"request_id":"([^"]*)"')


def without_request_id(body: bytes) -> bytes:
    """A raw body with its request id, the one part that differs, replaced by R."""
    replaced, count = REQUEST_ID.subn(b'"request_id":"R"', body)
    assert count == 1, body
    return replaced
