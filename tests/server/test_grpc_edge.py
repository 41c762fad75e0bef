from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from manager_harness import Running, Start, has_ipv6

from kvcm._pb import admin_pb2, admin_pb2_grpc, meta_pb2
from kvcm.core.errors import ReplyTooLarge
from kvcm.core.mask import BlockMask
from kvcm.testing.eventually import eventually

START = meta_pb2.StartWriteCacheRequest(trace_id="t", instance_id="i", block_keys=[1, 2])
LOOKUP = meta_pb2.GetCacheLocationRequest(
    trace_id="t", instance_id="i", block_keys=[1, 2], query_type=meta_pb2.QT_PREFIX_MATCH
)


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_whole_write_and_read(running: Running) -> None:
    started = await running.meta.StartWriteCache(START)
    assert started.header.status.code == meta_pb2.OK
    assert started.header.request_id.startswith("t_")
    assert started.block_mask.WhichOneof("info") == "offset"
    assert len(started.locations) == 2
    finish = meta_pb2.FinishWriteCacheRequest(
        instance_id="i",
        write_session_id=started.write_session_id,
        success_blocks=meta_pb2.BlockMask(offset=1),
        locations=started.locations,
    )
    finished = await running.meta.FinishWriteCache(finish)
    assert finished.header.status.code == meta_pb2.OK
    found = await running.meta.GetCacheLocation(LOOKUP)
    assert list(found.locations) == list(started.locations[:1])
    metas = await running.meta.GetCacheMeta(
        meta_pb2.GetCacheMetaRequest(instance_id="i", block_keys=[1, 2])
    )
    assert (len(metas.locations), len(metas.metas)) == (2, 2)


async def test_header_and_status_are_present_even_when_they_say_ok(running: Running) -> None:
    answer = await running.meta.RemoveCache(meta_pb2.RemoveCacheRequest(instance_id="i"))
    assert answer.HasField("header")
    assert answer.header.HasField("status")


async def test_application_errors_are_grpc_ok(running: Running) -> None:
    answer = await running.meta.GetCacheLocation(
        meta_pb2.GetCacheLocationRequest(instance_id="none")
    )
    assert answer.header.status.code == meta_pb2.INSTANCE_NOT_EXIST
    assert "none" in answer.header.status.message


async def test_masks_and_features_reach_the_cache(running: Running) -> None:
    request = meta_pb2.GetCacheLocationRequest(instance_id="i", block_keys=[1], features=1)
    request.block_mask.bool_masks.values.extend([True, False])
    await running.meta.GetCacheLocation(request)
    seen = running.cache.requests[-1]
    assert seen.mask == BlockMask(values=(True, False))
    assert seen.multi_storage
    await running.meta.GetCacheLocation(LOOKUP)
    assert running.cache.requests[-1].mask is None
    assert not running.cache.requests[-1].multi_storage


async def test_enum_numbers_outside_the_enum_reach_the_cache_as_numbers(running: Running) -> None:
    request = meta_pb2.GetCacheLocationRequest(instance_id="i", query_type=77)  # type: ignore[arg-type]
    await running.meta.GetCacheLocation(request)
    assert running.cache.requests[-1].query == 77


async def test_bytes_that_do_not_parse_are_invalid_argument(running: Running) -> None:
    call = running.channels[0].unary_unary(
        "/kv_cache_manager.proto.meta.MetaService/GetCacheLocation"
    )
    assert (await status_of(call(b"\xff"))).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_reply_above_the_limit_is_resource_exhausted(running: Running) -> None:
    running.cache.error = ReplyTooLarge("above reply_bytes_max")
    error = await status_of(running.meta.GetCacheLocation(LOOKUP))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "reply_bytes_max" in str(error.details())


async def test_a_request_above_the_limit_is_resource_exhausted(start: Start) -> None:
    running: Running = await start(receive_bytes_max=1 << 16)
    small = meta_pb2.GetInstanceInfoRequest(instance_id="x" * 1000)
    assert (await running.meta.GetInstanceInfo(small)).header.status.code
    large = meta_pb2.GetInstanceInfoRequest(instance_id="x" * (1 << 16))
    error = await status_of(running.meta.GetInstanceInfo(large))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_too_many_keys_are_refused_by_name(running: Running) -> None:
    request = meta_pb2.GetCacheLocationRequest(instance_id="i", block_keys=[1] * 262_144)
    assert (await running.meta.GetCacheLocation(request)).header.status.code == meta_pb2.OK
    request.block_keys.append(1)
    status = (await running.meta.GetCacheLocation(request)).header.status
    assert status.code == meta_pb2.INVALID_ARGUMENT
    assert "block_keys" in status.message


async def test_unknown_methods_are_unimplemented(running: Running) -> None:
    call = running.channels[0].unary_unary("/kv_cache_manager.proto.meta.MetaService/Nope")
    assert (await status_of(call(b""))).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_deadline_that_passes_gives_back_what_was_granted(running: Running) -> None:
    running.cache.gate.clear()
    error = await status_of(running.meta.StartWriteCache(START, timeout=0.1))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: running.calls_ended("StartWriteCache"))
    running.cache.gate.set()
    # The use case was cancelled with the call; it frees what it granted (tests/cache).
    assert running.cache.cancelled == ["StartWriteRequest"]
    assert running.cache.sessions == {}


async def test_a_cancelled_call_gives_back_what_was_granted(running: Running) -> None:
    running.cache.gate.clear()
    running.cache.entered.clear()
    call = running.meta.StartWriteCache(START)
    waiting = asyncio.ensure_future(_ignore_cancel(call))
    await running.cache.entered.wait()
    call.cancel()
    await waiting
    await eventually(lambda: running.calls_ended("StartWriteCache"))
    running.cache.gate.set()
    # The use case was cancelled with the call; it frees what it granted (tests/cache).
    assert running.cache.cancelled == ["StartWriteRequest"]
    assert running.cache.sessions == {}


async def _ignore_cancel(call: Any) -> None:
    try:
        await call
    except asyncio.CancelledError:
        return


async def test_an_answered_write_is_not_given_back(running: Running) -> None:
    started = await running.meta.StartWriteCache(START)
    assert started.write_session_id in running.cache.sessions
    assert running.cache.abandoned == []


async def test_health_and_reflection(running: Running) -> None:
    for channel, service in zip(
        running.channels,
        ["kv_cache_manager.proto.meta.MetaService", "kv_cache_manager.proto.admin.AdminService"],
        strict=True,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", service):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in reflection.ServerReflectionInfo(iter([request])):
            names = {found.name for found in response.list_services_response.service}
            assert service in names


async def test_equal_grpc_ports_serve_both_services(start: Start, free_port: int) -> None:
    running: Running = await start(rpc_port=free_port, admin_rpc_port=free_port)
    assert running.manager.ports.rpc == running.manager.ports.admin_rpc == free_port
    admin = admin_pb2_grpc.AdminServiceStub(running.channels[0])
    answer = await admin.CheckHealth(admin_pb2.CheckHealthRequest())
    assert answer.is_health
    info = await running.meta.GetInstanceInfo(meta_pb2.GetInstanceInfoRequest())
    assert info.header.status.code == meta_pb2.INSTANCE_NOT_EXIST


async def test_the_admin_service_is_not_on_the_meta_port_otherwise(running: Running) -> None:
    admin = admin_pb2_grpc.AdminServiceStub(running.channels[0])
    error = await status_of(admin.CheckHealth(admin_pb2.CheckHealthRequest()))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_stopping_finishes_calls_under_way(running: Running) -> None:
    running.cache.gate.clear()
    running.cache.entered.clear()
    call = asyncio.ensure_future(_answer(running.meta.GetCacheLocation(LOOKUP)))
    await running.cache.entered.wait()
    stopping = asyncio.ensure_future(running.manager.stop())
    await eventually(lambda: not running.manager.ready)
    running.cache.gate.set()
    assert (await call).header.status.code == meta_pb2.OK
    await stopping


async def _answer(call: Any) -> Any:
    return await call


async def test_a_call_that_never_ends_holds_the_stop_up_for_the_drain_time_only(
    start: Start,
) -> None:
    running: Running = await start(drain_s=0.2)
    instance: dict[str, Any] = {"instance_group": "default", "instance_id": "i", "block_size": 4}
    instance["location_spec_infos"] = [{"name": "tp0", "size": 10}]
    assert await running.code("registerInstance", instance) == "OK"
    running.cache.gate.clear()
    running.cache.entered.clear()
    call = asyncio.ensure_future(_answer(running.meta.GetCacheLocation(LOOKUP)))
    await running.cache.entered.wait()
    async with asyncio.timeout(5):
        await running.manager.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await call


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_an_ipv6_host_serves_both_transports_and_prints_with_brackets(start: Start) -> None:
    running: Running = await start(host="[::1]")
    ports = running.manager.ports
    assert running.manager.addresses()[0] == ("meta gRPC", f"[::1]:{ports.rpc}")
    response = await running.http.get(f"http://[::1]:{ports.http}/readyz")
    assert response.json() == {"ready": True}
    async with grpc.aio.insecure_channel(f"[::1]:{ports.rpc}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
