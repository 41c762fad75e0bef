"""The call sequences of the existing connectors (wire.md §8), with the bodies that they send."""

from __future__ import annotations

import hashlib
import json

import grpc
import pytest
from wire_harness import Server, uris

from kvcm._pb import meta_pb2

OK = meta_pb2.OK


def post(server: Server, method: str, body: str) -> dict:
    response = server.post_raw(method, body, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["header"]["status"]["code"] == "OK", answer
    return answer


def test_vllm(server: Server, fresh_id):
    name = fresh_id()
    register = (
        f'{{"trace_id": "register_{name}", "instance_group": "default", "instance_id": "{name}", '
        '"model_deployment": {"model_name": "qwen", "dtype": "FP8", "use_mla": false, '
        '"tp_size": 2, "dp_size": 1, "pp_size": 1}, "block_size": 4, '
        '"location_spec_infos": [{"name": "tp0", "size": 4096}, {"name": "tp1", "size": 4096}]}'
    )
    answers = [post(server, "registerInstance", register) for _ in range(3)]
    (storage,) = json.loads(answers[0]["storage_configs"])
    assert storage["global_unique_name"] == "nfs_01"
    assert len({answer["storage_configs"] for answer in answers}) == 1

    lookup = (
        f'{{"trace_id": "t1", "instance_id": "{name}", "block_keys": [], '
        '"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "query_type": "QT_PREFIX_MATCH", '
        '"block_mask": {"offset": 0}}'
    )
    assert post(server, "getCacheLocation", lookup)["locations"] == []

    start = (
        f'{{"trace_id": "t2", "instance_id": "{name}", "block_keys": [], '
        '"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "write_timeout_seconds": 30}'
    )
    started = post(server, "startWriteCache", start)
    assert started["block_mask"] == {"offset": 0}
    assert len(started["locations"]) == 2
    for location in started["locations"]:
        assert set(uris(location)) == {"tp0", "tp1"}
        assert all(uri.startswith("file://nfs_01/") for uri in uris(location).values())
    finish = (
        f'{{"trace_id": "t3", "instance_id": "{name}", '
        f'"write_session_id": "{started["write_session_id"]}", '
        '"success_blocks": {"bool_masks": {"values": [true, true]}}}'
    )
    post(server, "finishWriteCache", finish)

    found = post(server, "getCacheLocation", lookup)["locations"]
    assert found == started["locations"]
    computed = lookup.replace('"offset": 0', '"offset": 1')
    assert post(server, "getCacheLocation", computed)["locations"] == found[1:]

    # Everything exists: no locations, and a finish with a mask that is present and empty.
    started = post(server, "startWriteCache", start)
    assert started["block_mask"] == {"offset": 2}
    assert started["locations"] == []
    finish = (
        f'{{"trace_id": "t5", "instance_id": "{name}", '
        f'"write_session_id": "{started["write_session_id"]}", '
        '"success_blocks": {"bool_masks": {"offset": 0}}}'
    )
    post(server, "finishWriteCache", finish)


def test_the_key_offset_is_there_when_0_and_absent_beside_bools(server: Server, fresh_id):
    """The vLLM connector tests for the key in block_mask's JSON."""
    name = fresh_id()
    post(
        server,
        "registerInstance",
        f'{{"instance_group":"default","instance_id":"{name}","block_size":1,'
        '"location_spec_infos":[{"name":"tp0","size":8}]}',
    )
    start = f'{{"instance_id":"{name}","token_ids":%s}}'
    assert b'"block_mask":{"offset":0}' in server.post_raw("startWriteCache", start % "[]").content
    first = server.post_raw("startWriteCache", f'{{"instance_id":"{name}","block_keys":[2]}}')
    assert b'"block_mask":{"offset":0}' in first.content
    second = server.post_raw("startWriteCache", f'{{"instance_id":"{name}","block_keys":[1,2,3]}}')
    assert b'"block_mask":{"bool_masks":{"values":[false,true,false]}}' in second.content
    assert b'"offset"' not in second.content


def test_sglang(server: Server, fresh_id):
    name = fresh_id()
    post(
        server,
        "registerInstance",
        json.dumps(
            {
                "trace_id": "register",
                "instance_group": "default",
                "instance_id": name,
                "block_size": 64,
                "location_spec_infos": [
                    {"name": "tp_0", "size": 100},
                    {"name": "tp_1", "size": 100},
                ],
                "model_deployment": {"model_name": "m", "dtype": "bf16", "tp_size": 2},
            }
        ),
    )
    pages = [f"page hash {i}" for i in range(6)]
    keys = [
        int.from_bytes(hashlib.sha256(page.encode()).digest()[:8], "big", signed=True)
        for page in pages
    ]
    assert any(key < 0 for key in keys)

    def exists(known: int) -> int:
        body = {
            "trace_id": "e",
            "instance_id": name,
            "query_type": "QT_PREFIX_MATCH",
            "block_keys": keys,
            "block_mask": {"offset": known},
        }
        return known + len(post(server, "getCacheLocation", json.dumps(body))["locations"])

    assert exists(0) == 0
    body = {"trace_id": "s", "instance_id": name, "block_keys": keys, "write_timeout_seconds": 30}
    started = post(server, "startWriteCache", json.dumps(body))
    post(
        server,
        "finishWriteCache",
        json.dumps(
            {
                "trace_id": "f",
                "instance_id": name,
                "write_session_id": started["write_session_id"],
                "success_blocks": {"bool_masks": {"values": [True] * 4 + [False] * 2}},
            }
        ),
    )
    assert [exists(known) for known in (0, 2, 4, 6)] == [4, 4, 4, 6]


def unpacked(field: int, values: list[int]) -> bytes:
    """Repeated varints one by one, as an old or odd encoder may write them."""
    out = b""
    for value in values:
        number = value & (1 << 64) - 1
        out += bytes([field << 3])
        while number > 127:
            out += bytes([number & 127 | 128])
            number >>= 7
        out += bytes([number])
    return out


@pytest.fixture
def cpp(server: Server):
    """Calls as the C++ client makes them: its own channel, 100 ms a call (here: a busy machine)."""
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    with grpc.insecure_channel(f"127.0.0.1:{server.port('grpc')}", options=options) as channel:

        def call(method: str, request, response_type):
            path = f"/kv_cache_manager.proto.meta.MetaService/{method}"
            data = channel.unary_unary(path)(request.SerializeToString(), timeout=20)
            return response_type.FromString(data)

        yield call


def test_the_cpp_client(cpp, fresh_id):
    name = fresh_id()
    register = meta_pb2.RegisterInstanceRequest(
        trace_id="t",
        instance_group="default",
        instance_id=name,
        block_size=16,
        location_spec_infos=[
            meta_pb2.LocationSpecInfo(name=n, size=10) for n in ("full", "swa", "zed")
        ],
        location_spec_groups=[
            meta_pb2.LocationSpecGroup(name="a", spec_names=["full"]),
            meta_pb2.LocationSpecGroup(name="b", spec_names=["full", "swa", "zed"]),
        ],
        model_deployment=meta_pb2.ModelDeployment(model_name="m", dtype="bf16", user_data="x"),
    )
    for _ in range(2):
        answer = cpp("RegisterInstance", register, meta_pb2.RegisterInstanceResponse)
        assert answer.header.status.code == OK
    keys = [-5, 0, 7, 1 << 62]
    started = cpp(
        "StartWriteCache",
        meta_pb2.StartWriteCacheRequest(
            trace_id="t",
            instance_id=name,
            block_keys=keys,
            location_spec_group_names=["a", "b", "a", "b"],
            write_timeout_seconds=60,
        ),
        meta_pb2.StartWriteCacheResponse,
    )
    assert started.header.status.code == OK
    assert started.block_mask.WhichOneof("info") == "offset"
    assert [len(location.location_specs) for location in started.locations] == [1, 3, 1, 3]
    written = [
        meta_pb2.CacheLocation(
            type=meta_pb2.ST_UNSPECIFIED, spec_size=-1, location_specs=location.location_specs
        )
        for location in started.locations
    ]
    finish = meta_pb2.FinishWriteCacheRequest(
        trace_id="t",
        instance_id=name,
        write_session_id=started.write_session_id,
        success_blocks=meta_pb2.BlockMask(
            bool_masks=meta_pb2.BoolMasksType(values=[True, True, False, True])
        ),
        locations=written,
    )
    for _ in range(2):
        answer = cpp("FinishWriteCache", finish, meta_pb2.CommonResponse)
        assert answer.header.status.code == OK
    found = cpp(
        "GetCacheLocation",
        meta_pb2.GetCacheLocationRequest(
            trace_id="t",
            instance_id=name,
            query_type=meta_pb2.QT_BATCH_GET,
            block_keys=keys,
            location_spec_names=["full"],
        ),
        meta_pb2.GetCacheLocationResponse,
    )
    assert [location.type for location in found.locations] == [4, 4, 0, 4]
    assert [location.spec_size for location in found.locations] == [1, 3, 3, 3]
    remove = meta_pb2.RemoveCacheRequest(trace_id="t", instance_id=name, block_keys=keys[:1])
    assert cpp("RemoveCache", remove, meta_pb2.CommonResponse).header.status.code == OK
    trim = meta_pb2.TrimCacheRequest(
        trace_id="t", instance_id=name, strategy=meta_pb2.TS_REMOVE_ALL_CACHE
    )
    assert cpp("TrimCache", trim, meta_pb2.CommonResponse).header.status.code == OK
