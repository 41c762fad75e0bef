from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.cache.api import WireForm
from kvcm.core.errors import InvalidArgument, MalformedRequest
from kvcm.core.keys import encode_varint
from kvcm.server.calls import Call, Context, Endpoint
from kvcm.server.callstats import CallStats
from kvcm.server.fastpb import split
from kvcm.testing.clock import SimClock

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
KEYS = st.lists(INT64, max_size=20)
REQUESTS = [
    meta_pb2.GetCacheLocationRequest,
    meta_pb2.StartWriteCacheRequest,
    meta_pb2.GetCacheMetaRequest,
    meta_pb2.RemoveCacheRequest,
    admin_pb2.RemoveCacheRequest,
]


def endpoint(request_type: Any) -> Endpoint:
    async def nothing(call: Call[Any, Any]) -> None: ...

    method = meta_pb2.DESCRIPTOR.services_by_name["MetaService"].methods[0]
    context = Context(SimClock(), CallStats(), lambda: None)
    return Endpoint(
        context, method, request_type, meta_pb2.CommonResponse, nothing, leader_only=False
    )


def parsed(request_type: Any, data: bytes) -> Any:
    """What the fast path makes of the bytes, put together again as one message."""
    call = endpoint(request_type)._parse(data, WireForm.PROTO)
    message = request_type()
    message.CopyFrom(call.request)
    for name, values in call.packed.items():
        assert not getattr(message, name)
        getattr(message, name).extend(values.array())
    return message


def outcome(parse: Any) -> Any:
    try:
        return parse()
    except (DecodeError, MalformedRequest, InvalidArgument):
        return "refused"


def field(number: int, kind: int, content: bytes) -> bytes:
    head = encode_varint(number << 3 | kind)
    return head + (encode_varint(len(content)) if kind == 2 else b"") + content


def packed(number: int, values: list[int]) -> bytes:
    return field(number, 2, b"".join(map(encode_varint, values)))


FIELDS = st.one_of(
    st.builds(packed, st.sampled_from([3, 4, 5]), KEYS),
    st.builds(lambda n, v: field(n, 0, encode_varint(v)), st.sampled_from([3, 4, 5, 7, 99]), INT64),
    st.builds(lambda n, t: field(n, 2, t.encode()), st.sampled_from([1, 2, 8, 200]), st.text()),
    st.builds(lambda n: field(n, 1, b"12345678"), st.sampled_from([9, 4])),
    st.builds(lambda n: field(n, 5, b"1234"), st.sampled_from([9, 4])),
    st.builds(
        lambda v: field(6, 2, meta_pb2.BlockMask(offset=v).SerializeToString()),
        st.integers(-(1 << 31), (1 << 31) - 1),
    ),
    st.binary(max_size=6),
)


@pytest.mark.parametrize("request_type", REQUESTS)
@given(data=st.lists(FIELDS, max_size=6).map(b"".join))
@example(data=packed(4, [1, 2]) + packed(4, [3]))
@example(data=packed(4, [1, 2]) + field(4, 0, encode_varint(3)))
@example(data=field(4, 0, encode_varint(3)) + packed(4, [1, 2]))
@example(data=packed(5, [1, 2]) + packed(4, [3]))
@example(data=field(4, 2, b"\x80"))
@example(data=field(4, 2, b"\xff" * 10))
@example(data=field(1, 2, b"\xff"))
@example(data=field(9, 3, b"") + packed(4, [1]) + field(9, 4, b"") + packed(4, [2]))
@example(data=packed(4, [1])[:-1])
def test_any_bytes_mean_what_protobuf_says(request_type: Any, data: bytes) -> None:
    assert outcome(lambda: parsed(request_type, data)) == outcome(
        lambda: request_type.FromString(data)
    )


@pytest.mark.parametrize("request_type", REQUESTS)
@given(keys=KEYS, tokens=KEYS, trace=st.text(), offset=st.none() | st.integers(0, 9))
def test_what_protobuf_writes_is_cut_and_read_equal(
    request_type: Any, keys: list[int], tokens: list[int], trace: str, offset: int | None
) -> None:
    message = request_type(trace_id=trace, instance_id="i", block_keys=keys, token_ids=tokens)
    if offset is not None and "block_mask" in request_type.DESCRIPTOR.fields_by_name:
        message.block_mask.offset = offset
    data = message.SerializeToString()
    assert parsed(request_type, data) == message
    if keys:
        assert endpoint(request_type)._parse(data, WireForm.PROTO).packed.keys() == {"block_keys"}


def test_keys_are_not_decoded() -> None:
    message = meta_pb2.GetCacheLocationRequest(trace_id="t", block_keys=[1, -1, 300])
    cut = split(message.SerializeToString(), {4: "block_keys"})
    assert cut is not None
    assert list(cut.values.array()) == [1, -1, 300]
    assert meta_pb2.GetCacheLocationRequest.FromString(cut.rest).trace_id == "t"
