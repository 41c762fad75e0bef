"""gRPC as such (wire.md §1): status OK for answers, codes for the transport, health, reflection."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import grpc
import pytest
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_harness import (
    PACKAGES,
    Instance,
    Server,
    Wire,
    methods,
    registration,
    running_server,
    succeeded,
    types_of,
)

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.testing.eventually import eventually_sync

ALL = [(name, admin) for admin in (False, True) for name in methods(admin=admin)]
# These would disturb the manager that all tests share.
DISTURBING = {"LeaderDemote", "UpdateLeaderElectorConfig", "UpdateLogger", "LoadConfigSnapshot"}
SAFE = [pair for pair in ALL if pair[0] not in DISTURBING]


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def unpacked(field: int, values: list[int]) -> bytes:
    return b"".join(bytes([field << 3]) + varint(value) for value in values)


def packed(field: int, values: list[int]) -> bytes:
    data = b"".join(varint(value) for value in values)
    return bytes([field << 3 | 2]) + varint(len(data)) + data


@pytest.fixture
def grpc_wire(server: Server) -> Wire:
    return Wire(server, "grpc")


@pytest.fixture
def here(grpc_wire: Wire, fresh_id: Callable[[], str]) -> Instance:
    """An instance over gRPC."""
    name = fresh_id()
    succeeded(grpc_wire.call("RegisterInstance", registration(name)))
    return Instance(grpc_wire, name)


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("method", "admin"), SAFE)
def test_the_status_is_ok_for_everything_a_handler_answers(server: Server, method, admin):
    """An empty request too, most of which are wrong."""
    answer = types_of(method, admin=admin)[1].FromString(server.call_raw(method, b"", admin=admin))
    assert answer.HasField("header")
    assert answer.header.HasField("status")
    assert answer.header.status.code != 0
    assert answer.header.request_id.startswith("_")


@pytest.mark.parametrize("admin", [False, True])
def test_an_unknown_method_is_unimplemented(server: Server, admin):
    error = refusal(lambda: server.call_raw("Nothing", b"", admin=admin))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    path = "/kv_cache_manager.proto.other.MetaService/GetInstanceInfo"
    error = refusal(lambda: server.channels[admin].unary_unary(path)(b"", timeout=10))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x01\xff"]
)
@pytest.mark.parametrize("method", ["GetInstanceInfo", "GetCacheLocation", "StartWriteCache"])
def test_bytes_that_are_no_message_are_invalid_argument(server: Server, method, data):
    error = refusal(lambda: server.call_raw(method, data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert method in (error.details() or "")


def test_unknown_fields_and_enum_numbers_are_taken(server: Server, here: Instance):
    here.write([1])
    request = meta_pb2.GetCacheLocationRequest(
        instance_id=here.id, query_type=meta_pb2.QT_BATCH_GET, block_keys=[1]
    )
    # Fields 90 (varint), 2000 (bytes) and 77 (fixed64).
    extra = varint(90 << 3) + b"\x05" + varint(2000 << 3 | 2) + b"\x02hi"
    extra += varint(77 << 3 | 1) + b"12345678"
    for data in (request.SerializeToString() + extra, extra + request.SerializeToString()):
        answer = meta_pb2.GetCacheLocationResponse.FromString(
            server.call_raw("GetCacheLocation", data)
        )
        assert answer.header.status.code == meta_pb2.OK
        assert answer.locations[0].type == meta_pb2.ST_NFS
    unknown = request.SerializeToString() + b"\x18\x63"
    answer = meta_pb2.GetCacheLocationResponse.FromString(
        server.call_raw("GetCacheLocation", unknown)
    )
    assert answer.header.status.code == meta_pb2.INVALID_ARGUMENT


ENCODINGS = {
    "packed": lambda keys: packed(4, keys),
    "unpacked": lambda keys: unpacked(4, keys),
    "both": lambda keys: packed(4, keys[:2]) + unpacked(4, keys[2:]),
    "pieces": lambda keys: b"".join(packed(4, [key]) for key in keys),
    "empty-pieces": lambda keys: packed(4, []) + packed(4, keys) + packed(4, []),
    "long-varints": lambda keys: b"".join(
        b"\x22" + bytes([len(data)]) + data for data in (_padded(key) for key in keys)
    ),
}


def _padded(key: int) -> bytes:
    """A varint of ten bytes, more than small numbers need; legal all the same."""
    value = key & (1 << 64) - 1
    return bytes([value >> 7 * i & 127 | 128 for i in range(9)]) + bytes([value >> 63])


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_keys_in_any_encoding_are_the_same_keys(server: Server, here: Instance, encode):
    keys = [1, -1, 300, -(1 << 63), (1 << 63) - 1, 0]
    written = here.write(keys)
    head = meta_pb2.GetCacheLocationRequest(
        trace_id="t", instance_id=here.id, query_type=meta_pb2.QT_PREFIX_MATCH
    ).SerializeToString()
    mask = b"\x32\x02\x08\x01"
    for data in (head + encode(keys), encode(keys) + head):
        answer = meta_pb2.GetCacheLocationResponse.FromString(
            server.call_raw("GetCacheLocation", data)
        )
        assert len(answer.locations) == len(keys)
    answer = meta_pb2.GetCacheLocationResponse.FromString(
        server.call_raw("GetCacheLocation", head + encode(keys) + mask)
    )
    found = [location.location_specs[0].uri for location in answer.locations]
    assert found == [entry["location_specs"][0]["uri"] for entry in written[1:]]


def test_the_last_of_a_repeated_scalar_field_wins(server: Server, here: Instance):
    data = meta_pb2.GetInstanceInfoRequest(instance_id="nobody").SerializeToString()
    data += meta_pb2.GetInstanceInfoRequest(instance_id=here.id).SerializeToString()
    answer = meta_pb2.GetInstanceInfoResponse.FromString(server.call_raw("GetInstanceInfo", data))
    assert answer.instance_info.instance_id == here.id


@settings(
    max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.binary(max_size=100), method=st.sampled_from(SAFE))
def test_any_bytes_are_answered_or_refused(server: Server, data, method):
    name, admin = method
    request_type, response_type = types_of(name, admin=admin)
    try:
        request_type.FromString(data)
    except DecodeError:
        error = refusal(lambda: server.call_raw(name, data, admin=admin))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        return
    header = response_type.FromString(server.call_raw(name, data, admin=admin)).header
    assert header.status.code not in (0, admin_pb2.INTERNAL_ERROR, admin_pb2.UNKNOWN_ERROR)


# -- sizes ------------------------------------------------------------------------------


def test_200_000_keys_work_or_the_limit_is_named(server: Server, here: Instance):
    keys = list(range(1, 200_001))
    request = meta_pb2.GetCacheLocationRequest(
        instance_id=here.id, query_type=meta_pb2.QT_PREFIX_MATCH, block_keys=keys
    )
    answer = meta_pb2.GetCacheLocationResponse.FromString(
        server.call_raw("GetCacheLocation", request.SerializeToString())
    )
    assert answer.header.status.code == meta_pb2.OK
    assert not answer.locations
    request.query_type = meta_pb2.QT_BATCH_GET
    answer = meta_pb2.GetCacheLocationResponse.FromString(
        server.call_raw("GetCacheLocation", request.SerializeToString())
    )
    assert len(answer.locations) == 200_000
    request.block_keys.extend(range(62_144))
    error = refusal(lambda: server.call_raw("GetCacheLocation", request.SerializeToString()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "4194304" in (error.details() or "")
    body = json.dumps({"instance_id": here.id, "query_type": 2, "block_keys": keys})
    response = server.post_raw("getCacheLocation", body)
    assert (response.status_code, response.json()["locations"]) == (200, [])
    body = json.dumps({"instance_id": here.id, "query_type": 1, "block_keys": keys})
    response = server.post_raw("getCacheLocation", body)
    assert response.status_code == 413
    assert "4194304" in response.json()["header"]["status"]["message"]


@pytest.mark.parametrize(
    ("number", "field", "limit"), [(4, "block_keys", 262_144), (5, "token_ids", 4_194_304)]
)
def test_more_keys_than_the_limit_are_refused_naming_it(server, number, field, limit):
    """Counted before anything else is done with them, the instance looked up included."""
    head = meta_pb2.GetCacheLocationRequest(instance_id="nobody", query_type=2).SerializeToString()

    def status(count: int) -> meta_pb2.Status:
        ones = bytes([number << 3 | 2]) + varint(count) + b"\x01" * count
        data = server.call_raw("GetCacheLocation", head + ones)
        return meta_pb2.GetCacheLocationResponse.FromString(data).header.status

    assert status(limit).code == meta_pb2.INSTANCE_NOT_EXIST
    refused = status(limit + 1)
    assert refused.code == meta_pb2.INVALID_ARGUMENT
    assert str(limit) in refused.message
    assert field in refused.message


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A manager with a receive limit of 1 MiB, a reply limit of 64 KiB and one gRPC port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_server(
        "receive_bytes_max=1048576",
        "cache.reply_bytes_max=65536",
        "cache.write_timeout_s_max=2",
        "cache.write_timeout_s_default=1",
        ports={"rpc_port": port, "admin_rpc_port": port},
    ) as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def little(request: pytest.FixtureRequest, small: Server, fresh_id) -> Instance:
    """An instance of that manager over one transport."""
    wire = Wire(small, request.param)
    name = fresh_id()
    succeeded(wire.call("RegisterInstance", registration(name)))
    return Instance(wire, name)


def test_a_message_at_the_receive_limit_is_read_and_one_above_refused(small: Server):
    def sized(total: int) -> bytes:
        head = len(varint(2000 << 3 | 2)) + len(varint(total))
        size = total - head
        data = varint(2000 << 3 | 2) + varint(size) + bytes(size)
        assert len(data) == total
        return small.call_raw("GetInstanceInfo", data)

    assert sized(1 << 20)
    error = refusal(lambda: sized((1 << 20) + 1))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1048576" in (error.details() or "")
    # The connection is as good as before.
    assert small.call_raw("GetInstanceInfo", b"")


def test_a_prefix_answer_is_cut_at_the_reply_limit(little: Instance):
    """A shorter prefix is always right; a client then asks for the rest with a mask."""
    locations = little.write(range(400))
    found = little.prefix(range(400))
    assert 0 < len(found) < 400
    assert found == locations[: len(found)]
    assert little.prefix(range(400), block_mask={"offset": 390}) == locations[390:]


def test_a_batch_answer_above_the_reply_limit_is_refused(little: Instance, small: Server):
    little.write(range(400))
    assert len(little.batch(range(50))) == 50
    body = {"instance_id": little.id, "query_type": 1, "block_keys": list(range(400))}
    if little.wire.transport == "http":
        response = small.post_raw("getCacheLocation", json.dumps(body))
        assert response.status_code == 413
        assert "65536" in response.json()["header"]["status"]["message"]
        return
    data = meta_pb2.GetCacheLocationRequest(**body).SerializeToString()
    error = refusal(lambda: small.call_raw("GetCacheLocation", data))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "65536" in (error.details() or "")


@pytest.mark.parametrize("wanted", [3600, 2147483647, 0, -5])
def test_the_write_time_out_is_capped(little: Instance, wanted):
    """Default 1 s and maximum 2 s here: whatever is wished for ends soon."""
    session = little.start([1], write_timeout_seconds=wanted)["write_session_id"]
    assert little.statuses([1]) == ["WRITING"]
    eventually_sync(lambda: little.statuses([1]) == ["NOT_FOUND"])
    assert little.finish(session, {"offset": 1})["header"]["status"]["code"] != "OK"


def test_one_port_serves_both_services(small: Server):
    assert small.port("grpc") == small.port("grpc", admin=True)
    assert small.call_raw("GetInstanceInfo", b"")
    path = f"/{PACKAGES[True][0]}/CheckHealth"
    data = small.channels[False].unary_unary(path)(b"", timeout=10)
    assert admin_pb2.CheckHealthResponse.FromString(data).is_leader
    names = reflected(small, admin=False)
    assert {PACKAGES[False][0], PACKAGES[True][0]} <= names


# -- health, reflection, keepalive ------------------------------------------------------


@pytest.mark.parametrize("admin", [False, True])
def test_the_health_service_answers_for_server_and_service(server: Server, admin):
    stub = health_pb2_grpc.HealthStub(server.channels[admin])
    for name in ("", PACKAGES[admin][0]):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    error = refusal(lambda: stub.Check(health_pb2.HealthCheckRequest(service="no"), timeout=10))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def reflected(server: Server, *, admin: bool) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channels[admin])
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    return {service.name for service in answer.list_services_response.service}


@pytest.mark.parametrize("admin", [False, True])
def test_reflection_lists_the_services_and_knows_their_files(server: Server, admin):
    name = PACKAGES[admin][0]
    assert {name, "grpc.health.v1.Health"} <= reflected(server, admin=admin)
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channels[admin])
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    assert answer.file_descriptor_response.file_descriptor_proto


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def test_keepalive_pings_without_calls_are_never_abuse(server: Server):
    """Bare HTTP/2: far more pings than any client sends, and no call at all."""
    with closing(socket.create_connection(("127.0.0.1", server.port("grpc")), timeout=10)) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        for number in range(100):
            link.sendall(frame(6, 0, 0, struct.pack(">Q", number)))
        acknowledged = 0
        file = link.makefile("rb")
        while acknowledged < 100:
            head = file.read(9)
            assert len(head) == 9, "the server closed the connection"
            payload = file.read(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            assert kind != 7, f"GOAWAY {payload!r}"
            acknowledged += kind == 6 and flags & 1
        file.close()


# -- calls that end early ---------------------------------------------------------------


KEYS = 8_000


def keys_of(attempt: int) -> list[int]:
    return list(range(attempt * KEYS, (attempt + 1) * KEYS))


def start_bytes(instance: Instance, attempt: int) -> bytes:
    return meta_pb2.StartWriteCacheRequest(
        instance_id=instance.id, block_keys=keys_of(attempt), write_timeout_seconds=3600
    ).SerializeToString()


@pytest.fixture
def third(server: Server, here: Instance) -> float:
    """Less time than a start of so many keys takes: its reply cannot have left by then."""
    times = []
    for attempt in range(-3, 0):
        data = start_bytes(here, attempt)
        began = time.monotonic()
        answer = server.call_raw("StartWriteCache", data)
        times.append(time.monotonic() - began)
        session = meta_pb2.StartWriteCacheResponse.FromString(answer).write_session_id
        here.finish(session, {"offset": 0})
    return min(times) / 3


def all_is_freed(instance: Instance) -> None:
    server = instance.wire.server

    def nothing_open() -> bool:
        usage = server.http.get(server.url("/v1/usage", admin=True)).json()
        open_blocks = usage["instances"][instance.id]["open_blocks"]
        assert open_blocks == 0, open_blocks
        return True

    eventually_sync(nothing_open, timeout=30)


def test_what_a_call_past_its_deadline_granted_is_freed(server, here: Instance, third):
    for attempt in range(12):
        data = start_bytes(here, attempt)
        timeout = third * (attempt + 1) / 12
        error = refusal(lambda: server.call_raw("StartWriteCache", data, timeout=timeout))  # noqa: B023
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    all_is_freed(here)


def test_what_a_cancelled_call_granted_is_freed(server: Server, here: Instance, third):
    method = server.channels[False].unary_unary(f"/{PACKAGES[False][0]}/StartWriteCache")
    for attempt in range(12):
        call = method.future(start_bytes(here, attempt), timeout=30)
        threading.Event().wait(third * attempt / 12)
        assert call.cancel()
    all_is_freed(here)


def test_what_an_http_client_that_left_was_granted_is_freed(server, here: Instance, third):
    for attempt in range(12):
        body = json.dumps(
            {
                "instance_id": here.id,
                "block_keys": keys_of(attempt),
                "write_timeout_seconds": 3600,
            }
        ).encode()
        head = f"POST /api/startWriteCache HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
        with closing(socket.create_connection(("127.0.0.1", server.port("http")))) as link:
            link.sendall(head.encode() + body)
            threading.Event().wait(third * attempt / 12)
    all_is_freed(here)


def literal(name: str, value: str) -> bytes:
    """A header field that is in no table (HPACK)."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def is_granted(instance: Instance) -> bool:
    usage = instance.wire.server.http.get(instance.wire.server.url("/v1/usage", admin=True)).json()
    return bool(usage["instances"][instance.id]["open_blocks"])


def test_a_grpc_client_that_leaves_in_the_middle_of_the_reply_keeps_no_grant(server, here):
    """Bare HTTP/2 without window updates: of a reply of megabytes only 64 KiB can leave."""
    message = start_bytes(here, 0)
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{PACKAGES[False][0]}/StartWriteCache",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    body = b"\0" + struct.pack(">I", len(message)) + message
    with closing(socket.create_connection(("127.0.0.1", server.port("grpc")), timeout=10)) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        link.sendall(frame(1, 4, 1, b"".join(literal(*pair) for pair in headers.items())))
        for start in range(0, len(body), 16_384):
            piece = body[start : start + 16_384]
            link.sendall(frame(0, start + 16_384 >= len(body), 1, piece))
        received = 0
        file = link.makefile("rb")
        while received < 65_535:
            head = file.read(9)
            payload = file.read(int.from_bytes(head[:3], "big"))
            received += len(payload) if head[3] == 0 else 0
        file.close()
        assert is_granted(here)
    all_is_freed(here)


def test_an_http_client_that_leaves_in_the_middle_of_the_reply_keeps_no_grant(server, here):
    keys = list(range(60_000))
    body = json.dumps({"instance_id": here.id, "block_keys": keys, "write_timeout_seconds": 3600})
    head = f"POST /api/startWriteCache HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
    with closing(socket.socket()) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(60)
        link.connect(("127.0.0.1", server.port("http")))
        link.sendall((head + body).encode())
        assert link.recv(1000).startswith(b"HTTP/1.1 200")
        assert is_granted(here)
    all_is_freed(here)


def test_a_deadline_ends_the_call_when_it_is_due(server: Server, here: Instance):
    keys = list(range(200_000))
    request = meta_pb2.StartWriteCacheRequest(instance_id=here.id, block_keys=keys)
    data = request.SerializeToString()
    began = time.monotonic()
    error = refusal(lambda: server.call_raw("StartWriteCache", data, timeout=0.05))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 5
    all_is_freed(here)
