from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from manager_harness import INSTANCE, Running, Start

from kvcm.core import limits
from kvcm.core.errors import CapacityReached, ReplyTooLarge
from kvcm.core.mask import BlockMask
from kvcm.testing.eventually import eventually

START = {"instance_id": "i", "block_keys": [1, 2]}
ALL_METHODS_ARE_POST = ["GET", "PUT", "DELETE", "PATCH"]


async def raw(running: Running, data: bytes, *, pause: bool = False) -> bytes:
    """The whole answer to bytes on a socket of its own, sent at once or one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.manager.ports.http)
    try:
        for piece in [data[i : i + 1] for i in range(len(data))] if pause else [data]:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


def request_bytes(method: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST /api/{method} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


async def test_a_whole_write_and_read(running: Running) -> None:
    started = await running.post("startWriteCache", START)
    assert list(started) == ["header", "write_session_id", "block_mask", "locations"]
    assert started["block_mask"] == {"offset": 0}
    assert len(started["locations"]) == 2
    finish = {
        "instance_id": "i",
        "write_session_id": started["write_session_id"],
        "success_blocks": {"bool_masks": {"values": [True, False]}},
    }
    assert await running.code("finishWriteCache", finish) == "OK"
    body = {"instance_id": "i", "block_keys": [1, 2], "query_type": "QT_PREFIX_MATCH"}
    found = await running.post("getCacheLocation", body)
    assert found["locations"] == started["locations"][:1]
    again = await running.post("startWriteCache", {"instance_id": "i", "block_keys": [2, 1]})
    assert again["block_mask"] == {"bool_masks": {"values": [False, True]}}


async def test_the_body_is_byte_exact(running: Running) -> None:
    response = await running.http.post(
        running.url("/api/getCacheLocation"),
        content=b'{"trace_id":"t\xc3\xa4","instance_id":"i","block_keys":[5]}',
    )
    head, _, tail = response.content.partition(b"t\xc3\xa4_")
    digits = tail[: tail.index(b'"')]
    assert head == b'{"header":{"status":{"code":"OK","message":""},"request_id":"'
    assert digits.isdigit()
    assert len(digits) == 16
    assert tail[len(digits) :] == b'","tracer_result":""},"locations":[]}'
    assert response.headers["content-type"] == "application/json"


async def test_camel_case_and_strings_reach_the_cache_exactly(running: Running) -> None:
    extremes = [-(1 << 63), (1 << 63) - 1, 0, -1]
    body = {
        "instanceId": "i",
        "queryType": 3,
        "blockKeys": [str(extremes[0]), extremes[1], 0, -1.0],
        "blockMask": {"bool_masks": {"offset": 0}},
        "swSize": "2",
        "location_spec_names": ["tp0"],
        "features": 1,
        "unknown": {"x": [1]},
    }
    assert await running.code("getCacheLocation", body) == "OK"
    request = running.cache.requests[-1]
    assert list(request.keys.array()) == extremes
    assert (request.query, request.sw_size, request.spec_names) == (3, 2, ("tp0",))
    assert request.mask == BlockMask(values=())
    assert request.multi_storage


async def test_tokens_are_passed_on_when_there_are_no_keys(running: Running) -> None:
    body = {"instance_id": "i", "block_keys": [], "token_ids": [7, 8]}
    assert await running.code("startWriteCache", body) == "OK"
    request = running.cache.requests[-1]
    assert len(request.keys) == 0
    assert list(request.token_ids.array()) == [7, 8]


async def test_finish_tells_an_absent_mask_from_an_empty_one(running: Running) -> None:
    finish: dict[str, Any] = {"instance_id": "i", "write_session_id": "s"}
    for given, expected in [
        ({}, None),
        ({"success_blocks": None}, None),
        ({"success_blocks": {}}, BlockMask(values=())),
        ({"success_blocks": {"bool_masks": {"offset": 0}}}, BlockMask(values=())),
        ({"success_blocks": {"offset": 0}}, BlockMask(offset=0)),
    ]:
        await running.post("finishWriteCache", {**finish, **given})
        assert running.cache.requests[-1].success == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"instance_id":"i",}',
        b'{"instance_id":"i","instance_id":"i"}',
        b'{"instance_id":"i","instanceId":"i"}',
        b'{"instance_id":1}',
        b'{"block_keys":[1.5]}',
        b'{"block_keys":[9223372036854775808]}',
        b'{"block_keys":[true]}',
        b'{"block_keys":7}',
        b'\xff\xfe{"a":1}',
        b"nonsense",
    ],
)
@pytest.mark.parametrize("method", ["getCacheLocation", "startWriteCache"])
async def test_a_body_that_does_not_parse_is_400_in_json(
    running: Running, method: str, body: bytes
) -> None:
    response = await running.http.post(running.url(f"/api/{method}"), content=body)
    assert response.status_code == 400
    header = response.json()["header"]
    assert header["status"]["code"] == "INVALID_ARGUMENT"
    assert header["status"]["message"]
    assert header["request_id"].startswith("_")


@pytest.mark.parametrize("admin", [False, True])
async def test_unknown_paths_are_404_in_json(running: Running, admin: bool) -> None:
    for method, path in [("POST", "/api/nope"), ("POST", "/nope"), ("GET", "/"), ("GET", "/api/")]:
        response = await running.http.request(method, running.url(path, admin=admin))
        assert response.status_code == 404
        assert response.json()["header"]["status"]["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("verb", ALL_METHODS_ARE_POST)
async def test_a_wrong_verb_is_405_in_json(running: Running, verb: str) -> None:
    response = await running.http.request(verb, running.url("/api/getCacheLocation"))
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "header" in response.json()
    response = await running.http.post(running.url("/healthz"))
    assert response.status_code == 405
    assert "header" in response.json()


async def test_the_methods_of_one_service_are_not_on_the_others_port(running: Running) -> None:
    response = await running.http.post(running.url("/api/listStorage"), json={})
    assert response.status_code == 404
    response = await running.http.post(running.url("/api/startWriteCache", admin=True), json={})
    assert response.status_code == 404


async def test_a_body_at_the_limit_passes_and_one_byte_more_is_413(start: Start) -> None:
    limit = 1 << 16
    running: Running = await start(receive_bytes_max=limit)
    url = running.url("/api/getInstanceInfo")
    for size, expected in ((limit, 200), (limit + 1, 413)):
        body = b'{"trace_id":"t"}'.ljust(size)
        response = await running.http.post(url, content=body)
        assert response.status_code == expected
        assert "header" in response.json()

        async def pieces(body: bytes = body) -> Any:
            for i in range(0, len(body), 1000):
                yield body[i : i + 1000]

        response = await running.http.post(url, content=pieces())
        assert response.status_code == expected


async def test_a_reply_above_the_limit_is_413(running: Running) -> None:
    running.cache.error = ReplyTooLarge("the answer has 9 bytes, above reply_bytes_max 8")
    response = await running.http.post(
        running.url("/api/getCacheLocation"), json={"instance_id": "i"}
    )
    assert response.status_code == 413
    assert "reply_bytes_max" in response.json()["header"]["status"]["message"]


async def test_bodies_in_chunks_and_byte_by_byte_are_read(running: Running) -> None:
    body = b'{"trace_id":"t","instance_id":"i","block_keys":[1]}'
    one_by_one = await raw(running, request_bytes("getCacheLocation", body), pause=True)
    assert one_by_one.startswith(b"HTTP/1.1 200")
    chunked = b"POST /api/getCacheLocation HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    chunked += b"Transfer-Encoding: chunked\r\n\r\n"
    chunked += b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert (await raw(running, chunked)).startswith(b"HTTP/1.1 200")
    assert [list(r.keys.array()) for r in running.cache.requests[-2:]] == [[1], [1]]


async def test_nonsense_on_the_socket_is_refused(running: Running) -> None:
    assert (await raw(running, b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_hostile_instance_ids_make_the_round_trip(running: Running) -> None:
    for instance_id in ["../x", "a:b", "a b+c@%2F", "ä" * 100, "line\nbreak", '"quoted"']:
        body = {**INSTANCE, "instance_id": instance_id}
        assert await running.code("registerInstance", body) == "OK"
        info = await running.post("getInstanceInfo", {"instance_id": instance_id})
        assert info["instance_info"]["instance_id"] == instance_id


async def test_application_errors_are_http_200_with_a_code(running: Running) -> None:
    answer = await running.post("getCacheLocation", {"instance_id": "none"})
    assert answer["header"]["status"]["code"] == "INSTANCE_NOT_EXIST"
    assert answer["locations"] == []
    running.cache.error = CapacityReached("full", reason="QUOTA_GROUP")
    answer = await running.post("startWriteCache", START)
    assert answer["header"]["status"] == {
        "code": "REACH_MAX_ENTITY_CAPACITY",
        "message": "full",
        "reason": "QUOTA_GROUP",
    }
    assert answer["write_session_id"] == ""
    assert "block_mask" not in answer


async def test_a_partial_grant_is_ok_and_tells_its_reason(running: Running) -> None:
    running.cache.reason = "QUOTA_TYPE"
    status = (await running.post("startWriteCache", START))["header"]["status"]
    assert status == {"code": "OK", "message": "", "reason": "QUOTA_TYPE"}


async def test_a_fault_of_ours_is_neutral_outside_and_logged_inside(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.cache.error = RuntimeError("secret detail")
    answer = await running.post("getCacheLocation", {"instance_id": "i"})
    assert answer["header"]["status"]["code"] == "INTERNAL_ERROR"
    assert "secret" not in answer["header"]["status"]["message"]
    assert "secret detail" in caplog.text


async def test_a_client_that_leaves_before_the_reply_gets_nothing(running: Running) -> None:
    running.cache.gate.clear()
    running.cache.entered.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", running.manager.ports.http)
    writer.write(request_bytes("startWriteCache", json.dumps(START).encode()))
    await running.cache.entered.wait()
    writer.transport.abort()
    await eventually(lambda: running.calls_ended("StartWriteCache"))
    running.cache.gate.set()
    assert running.cache.cancelled == ["StartWriteRequest"]
    assert running.cache.sessions == {}


async def test_a_client_that_waits_keeps_its_grant(running: Running) -> None:
    started = await running.post("startWriteCache", START)
    assert started["write_session_id"] in running.cache.sessions
    assert running.cache.abandoned == []


async def test_a_client_that_leaves_within_the_body_changes_nothing(running: Running) -> None:
    before = len(running.cache.requests)
    _, writer = await asyncio.open_connection("127.0.0.1", running.manager.ports.http)
    whole = request_bytes("startWriteCache", json.dumps(START).encode())
    writer.write(whole[:-1])
    await writer.drain()
    writer.transport.abort()
    assert await running.code("getCacheLocation", {"instance_id": "i"}) == "OK"
    assert len(running.cache.requests) == before + 1


async def test_a_trace_id_above_the_limit_is_refused(running: Running) -> None:
    assert (
        await running.code("getInstanceInfo", {"instance_id": "i", "trace_id": "ä" * 512}) == "OK"
    )
    answer = await running.post("getInstanceInfo", {"instance_id": "i", "trace_id": "x" * 1025})
    assert answer["header"]["status"]["code"] == "INVALID_ARGUMENT"
    assert "trace_id" in answer["header"]["status"]["message"]


async def test_health_usage_and_metrics(running: Running) -> None:
    await running.post("startWriteCache", START)
    get = running.http.get
    assert (await get(running.url("/healthz"))).json() == {"status": "ok"}
    assert (await get(running.url("/readyz", admin=True))).json() == {"ready": True}
    usage = (await get(running.url("/v1/usage", admin=True))).json()
    assert usage["groups"]["default"]["counted_bytes"] == 7
    assert usage["group_types"][0]["storage_type"] == "file"
    text = (await get(running.url("/metrics", admin=True))).text
    assert 'kvcm_calls_total{api="StartWriteCache",code="OK"} 1.0' in text
    assert 'kvcm_call_seconds_count{api="StartWriteCache",keys="1-16",outcome="ok"} 1.0' in text
    assert 'kvcm_group_bytes{group="default",state="serving"} 7.0' in text
    assert 'kvcm_group_high_bytes{group="default"} 8.0' in text
    assert 'kvcm_group_effective_bytes{group="default"}' not in text
    assert 'kvcm_refused_writes_total{group="default",reason="QUOTA_GROUP"} 3.0' in text
    assert usage["refused_writes"] == [{"group": "default", "reason": "QUOTA_GROUP", "count": 3}]
    assert 'kvcm_error_reports_total{kind="missing",outcome="accepted"} 2.0' in text
    assert usage["error_reports"] == [{"kind": "missing", "outcome": "accepted", "blocks": 2}]
    assert usage["groups"]["default"]["limit"]["high"] == 8
    running.manager.ready = False
    response = await get(running.url("/readyz"))
    assert (response.status_code, response.json()) == (503, {"ready": False})


async def test_the_open_api_document_has_every_method(running: Running) -> None:
    document = (await running.http.get(running.url("/openapi.json"))).json()
    assert "/api/getCacheLocation" in document["paths"]
    assert "/healthz" in document["paths"]
    keys = document["components"]["schemas"]["GetCacheLocationRequest"]["properties"]["block_keys"]
    assert keys["type"] == "array"


async def test_error_messages_do_not_echo_whole_requests(running: Running) -> None:
    answer = await running.post("getInstanceInfo", {"instance_id": "x" * 100_000})
    assert len(answer["header"]["status"]["message"]) == limits.STATUS_MESSAGE_CHARS_MAX
