"""The JSON conventions of wire.md §1 and §9, byte by byte."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.core.errors import MalformedRequest
from kvcm.server import jsonwire
from kvcm.server.jsonwire import parse, render

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1


def location_request(body: str) -> meta_pb2.GetCacheLocationRequest:
    return parse(body.encode(), meta_pb2.GetCacheLocationRequest)


def refused(
    body: str | bytes, message_type: type[Message] = meta_pb2.GetCacheLocationRequest
) -> str:
    data = body.encode() if isinstance(body, str) else body
    with pytest.raises(MalformedRequest) as caught:
        parse(data, message_type)
    return str(caught.value)


# -- printing --------------------------------------------------------------------------

HEADER = meta_pb2.CommonResponseHeader(
    status=meta_pb2.Status(code=meta_pb2.OK, message="fine"), request_id="t_1"
)
HEADER_JSON = '{"status":{"code":"OK","message":"fine"},"request_id":"t_1","tracer_result":""}'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (meta_pb2.GetCacheLocationResponse(), '{"locations":[]}'),
        (meta_pb2.CommonResponse(header=HEADER), f'{{"header":{HEADER_JSON}}}'),
        (
            meta_pb2.RegisterInstanceResponse(header=HEADER),
            f'{{"header":{HEADER_JSON},"storage_configs":""}}',
        ),
        (meta_pb2.BlockMask(), "{}"),
        (meta_pb2.BlockMask(offset=0), '{"offset":0}'),
        (meta_pb2.BlockMask(bool_masks=meta_pb2.BoolMasksType()), '{"bool_masks":{"values":[]}}'),
        (
            meta_pb2.BlockMask(bool_masks=meta_pb2.BoolMasksType(values=[True, False])),
            '{"bool_masks":{"values":[true,false]}}',
        ),
        (
            meta_pb2.CacheLocation(
                type=meta_pb2.ST_NFS,
                spec_size=2,
                location_specs=[meta_pb2.LocationSpec(name="tp0", uri="file://n/a?size=4&x=<>")],
            ),
            '{"type":"ST_NFS","spec_size":2,'
            '"location_specs":[{"name":"tp0","uri":"file://n/a?size=4&x=<>"}]}',
        ),
        (
            meta_pb2.StartWriteCacheResponse(
                write_session_id="s", block_mask=meta_pb2.BlockMask(offset=0)
            ),
            '{"write_session_id":"s","block_mask":{"offset":0},"locations":[]}',
        ),
        (
            meta_pb2.GetCacheLocationRequest(
                query_type=meta_pb2.QT_PREFIX_MATCH, block_keys=[INT64_MIN, 0, INT64_MAX]
            ),
            '{"trace_id":"","instance_id":"","query_type":"QT_PREFIX_MATCH",'
            '"block_keys":["-9223372036854775808","0","9223372036854775807"],"token_ids":[],'
            '"sw_size":0,"location_spec_names":[]}',
        ),
        (meta_pb2.TrimCacheRequest(begin_timestamp=INT32_MIN, end_timestamp=INT32_MAX),
            '{"trace_id":"","instance_id":"","strategy":"TS_UNSPECIFIED",'
            '"begin_timestamp":-2147483648,"end_timestamp":2147483647}',
        ),
        (admin_pb2.TriggerStrategy(used_percentage=0.8), '{"used_size":"0","used_percentage":0.8}'),
        (admin_pb2.MetricValue(int_value=0), '{"int_value":"0"}'),
        (admin_pb2.MetricValue(string_value=""), '{"string_value":""}'),
        (admin_pb2.Account(user_name='"\\\n\t\x00é€😀'),
            '{"user_name":"\\"\\\\\\n\\t\\u0000é€😀","role":"ROLE_USER"}'),
        (admin_pb2.StorageConfig(local=admin_pb2.LocalStorageSpec()),
            '{"global_unique_name":"","local":{},"check_storage_available_when_open":false}',
        ),
    ],
)  # fmt: skip
def test_printing_is_byte_exact(message: Message, expected: str) -> None:
    assert render(message).decode() == expected


def test_a_number_outside_its_enum_is_printed_as_a_number() -> None:
    message = parse(b'{"query_type":77}', meta_pb2.GetCacheLocationRequest)
    assert b'"query_type":77,' in render(message)


@pytest.mark.parametrize(
    ("value", "printed"),
    [(math.nan, '"NaN"'), (math.inf, '"Infinity"'), (-math.inf, '"-Infinity"')],
)
def test_doubles_that_json_lacks_are_printed_by_name(value: float, printed: str) -> None:
    text = render(admin_pb2.MetricValue(float_value=value)).decode()
    assert text == f'{{"float_value":{printed}}}'


# -- names, null, unknown --------------------------------------------------------------


def test_both_spellings_of_a_name_are_read() -> None:
    snake = location_request('{"block_keys":[1],"block_mask":{"bool_masks":{"values":[true]}}}')
    camel = location_request('{"blockKeys":[1],"blockMask":{"boolMasks":{"values":[true]}}}')
    assert snake == camel
    assert list(snake.block_keys) == [1]
    assert list(snake.block_mask.bool_masks.values) == [True]


def test_null_is_unset_everywhere_but_inside_lists() -> None:
    body = '{"trace_id":null,"query_type":null,"block_keys":null,"block_mask":null,"sw_size":null}'
    assert location_request(body) == meta_pb2.GetCacheLocationRequest()
    assert "block_keys[1]" in refused('{"block_keys":[1,null]}')
    assert "location_spec_names[0]" in refused('{"location_spec_names":[null]}')
    assert "locations[0]" in refused('{"locations":[null]}', meta_pb2.FinishWriteCacheRequest)


def test_unknown_fields_are_ignored_at_every_depth() -> None:
    body = '{"x":{"y":[1.5,{"z":null}]},"block_mask":{"bool_masks":{"offset":0},"q":1},"sw_size":3}'
    message = location_request(body)
    assert message.block_mask.WhichOneof("info") == "bool_masks"
    assert list(message.block_mask.bool_masks.values) == []
    assert message.sw_size == 3


def test_an_empty_object_is_a_present_message() -> None:
    assert not location_request("{}").HasField("block_mask")
    assert location_request('{"block_mask":{}}').HasField("block_mask")


@pytest.mark.parametrize("value", ["0", "0.0", '"0"', "-0"])
def test_a_oneof_member_set_to_zero_is_set(value: str) -> None:
    mask = location_request(f'{{"block_mask":{{"offset":{value}}}}}').block_mask
    assert mask.WhichOneof("info") == "offset"


def test_two_members_of_a_oneof_are_refused_and_a_null_one_is_none() -> None:
    assert "block_mask.bool_masks" in refused('{"block_mask":{"offset":0,"bool_masks":{}}}')
    mask = location_request('{"block_mask":{"offset":null,"bool_masks":{}}}').block_mask
    assert mask.WhichOneof("info") == "bool_masks"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"trace_id":"a","trace_id":"b"}', "trace_id"),
        ('{"trace_id":"a","trace_id":"a"}', "trace_id"),
        ('{"trace_id":"a","traceId":"b"}', "trace_id"),
        ('{"block_mask":{"offset":1,"offset":1}}', "offset"),
        ('{"block_mask":{"bool_masks":{},"boolMasks":{}}}', "block_mask.bool_masks"),
    ],
)
def test_a_field_given_twice_is_refused(body: str, named: str) -> None:
    assert named in refused(body)


# -- integers --------------------------------------------------------------------------

INT64_SPELLINGS = [
    ("0", 0), ("-0", 0), ("0.0", 0), ("-0.0", 0), ("0e999999999", 0), ("1.0", 1), ("1e0", 1),
    ("10e-1", 1), ("1e18", 10**18), ("1E+18", 10**18), ("-1e18", -(10**18)),
    ("9007199254740993", 9007199254740993), ("9007199254740993.0", 9007199254740993),
    ("9223372036854775807", INT64_MAX), ("9223372036854775807.0", INT64_MAX),
    ("9.223372036854775807e18", INT64_MAX), ("-9223372036854775808", INT64_MIN),
    ("-9223372036854775808.000", INT64_MIN), ('"9223372036854775807"', INT64_MAX),
    ('"-9223372036854775808"', INT64_MIN), ('"0"', 0), ('"-0"', 0), ('"007"', 7),
    ('"' + "0" * 6000 + '5"', 5),
]  # fmt: skip


@pytest.mark.parametrize(("literal", "value"), INT64_SPELLINGS)
def test_an_exact_int64_is_read_in_every_spelling(literal: str, value: int) -> None:
    assert list(location_request(f'{{"block_keys":[{literal}]}}').block_keys) == [value]
    mixed = location_request(f'{{"block_keys":[1,"2",{literal}]}}')
    assert list(mixed.block_keys) == [1, 2, value]
    group = parse(
        f'{{"instance_group":{{"version":{literal}}}}}'.encode(),
        admin_pb2.CreateInstanceGroupRequest,
    )
    assert group.instance_group.version == value


NOT_INT64 = [
    "9223372036854775808", "-9223372036854775809", "9223372036854775808.0", "1e19", "-1e19",
    "1e999999999", "1e99999999999999999999", "1e-1", "1.5", "-0.1", "0.99999999999999999999",
    "9007199254740993.5", "1e-999999999", '"9223372036854775808"', '"-9223372036854775809"',
    '""', '"-"', '"--1"', '"1-2"', '"+1"', '" 1"', '"1 "', '"1_0"', '"0x1"', '"1.0"', '"1e3"',
    '"٣"', '"²"', '"abc"', '"NaN"', '"1\\n"', "true", "false", "{}", "[]", '"' + "9" * 6000 + '"',
    "9" * 4000, "9" * 6000,
]  # fmt: skip


@pytest.mark.parametrize("literal", NOT_INT64)
def test_what_is_no_exact_int64_is_refused_never_rounded(literal: str) -> None:
    problem = refused(f'{{"block_keys":[{literal}]}}')
    assert "block_keys[0]" in problem or "digits" in problem
    assert len(problem) < 200
    refused(f'{{"block_keys":[1,"2",{literal}]}}')
    refused(f'{{"block_keys":["1","2",{literal}]}}')
    refused(f'{{"instance_group":{{"version":{literal}}}}}', admin_pb2.CreateInstanceGroupRequest)


def test_the_element_at_fault_is_named_in_a_long_list() -> None:
    keys: list[Any] = list(range(4400))
    keys[4321] = 1 << 63
    assert "block_keys[4321]" in refused(json.dumps({"block_keys": keys}))
    assert "block_keys[4321]" in refused(json.dumps({"block_keys": [str(k) for k in keys]}))
    keys[4321] = True
    assert "block_keys[4321]" in refused(json.dumps({"block_keys": keys}))


@pytest.mark.parametrize("literal", ["2147483647", "-2147483648", '"2147483647"', "2147483647.0"])
def test_the_ends_of_int32_are_read(literal: str) -> None:
    assert abs(location_request(f'{{"sw_size":{literal}}}').sw_size) >= INT32_MAX


@pytest.mark.parametrize(
    "literal", ["2147483648", "-2147483649", '"2147483648"', "2147483648.0", "1.5", "true", "1e99"]
)
def test_past_the_ends_of_int32_is_refused(literal: str) -> None:
    assert "sw_size" in refused(f'{{"sw_size":{literal}}}')


def test_uint32_has_its_own_range() -> None:
    assert location_request('{"features":4294967295}').features == 4294967295
    assert "features" in refused('{"features":4294967296}')
    assert "features" in refused('{"features":-1}')


@given(st.lists(st.integers(INT64_MIN, INT64_MAX), max_size=50), st.sampled_from([int, str, float]))
def test_any_list_of_int64_survives(keys: list[int], how: Callable[[int], Any]) -> None:
    if how is float:
        body = '{"block_keys":[' + ",".join(f"{key}.0" for key in keys) + "]}"
    else:
        body = json.dumps({"block_keys": [how(key) for key in keys]})
    assert list(location_request(body).block_keys) == keys


@given(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20),
)
def test_a_decimal_is_read_exactly_or_refused(value: Decimal) -> None:
    body = f'{{"block_keys":[{format(value, "f")}]}}'
    if value == int(value) and INT64_MIN <= value <= INT64_MAX:
        assert list(location_request(body).block_keys) == [int(value)]
    else:
        refused(body)


# -- other kinds -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("literal", "number"),
    [('"QT_PREFIX_MATCH"', 2), ("2", 2), ("2.0", 2), ('"QT_NEW"', 0), ("9", 9)],
)
def test_enums_are_read_by_name_or_number_and_unknown_names_are_unset(
    literal: str, number: int
) -> None:
    assert location_request(f'{{"query_type":{literal}}}').query_type == number


@pytest.mark.parametrize("literal", ["true", "1.5", "2147483648", "[]", "{}"])
def test_what_is_no_enum_is_refused(literal: str) -> None:
    assert "query_type" in refused(f'{{"query_type":{literal}}}')


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1", 1.0),
        ("0.8", 0.8),
        ("1e308", 1e308),
        ("-0.0", 0.0),
        ("5e-324", 5e-324),
        ("1e-999", 0.0),
    ],
)
def test_doubles_take_any_number(literal: str, value: float) -> None:
    body = f'{{"used_percentage":{literal}}}'.encode()
    assert parse(body, admin_pb2.TriggerStrategy).used_percentage == value


@pytest.mark.parametrize("literal", ["1e999", "-1e999", "9" * 400, '"0.8"', '"NaN"', "true", "[]"])
def test_what_is_no_double_is_refused(literal: str) -> None:
    problem = refused(f'{{"used_percentage":{literal}}}', admin_pb2.TriggerStrategy)
    assert "used_percentage" in problem


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ('{"trace_id":5}', "trace_id"),
        ('{"trace_id":1.5}', "trace_id"),
        ('{"trace_id":true}', "trace_id"),
        ('{"trace_id":["a"]}', "trace_id"),
        ('{"location_spec_names":["a",5]}', "location_spec_names[1]"),
        ('{"location_spec_names":"a"}', "location_spec_names"),
        ('{"block_keys":5}', "block_keys"),
        ('{"block_keys":{}}', "block_keys"),
        ('{"block_keys":[[1]]}', "block_keys[0]"),
        ('{"block_mask":[]}', "block_mask"),
        ('{"block_mask":{"bool_masks":{"values":[true,1]}}}', "block_mask.bool_masks.values[1]"),
        ('{"block_mask":{"bool_masks":{"values":["true"]}}}', "block_mask.bool_masks.values[0]"),
        ('{"block_mask":{"bool_masks":5}}', "block_mask.bool_masks"),
    ],
)
def test_a_wrong_type_is_refused_and_the_field_named(body: str, named: str) -> None:
    assert refused(body).startswith(f"{named}:")


def test_the_path_goes_through_lists_of_messages() -> None:
    body = '{"locations":[{},{"location_specs":[{"name":"a"},{"uri":7}]}]}'
    problem = refused(body, meta_pb2.FinishWriteCacheRequest)
    assert problem.startswith("locations[1].location_specs[1].uri:")


# -- bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"{", b"{}}", b"{} x", b"{'a':1}", b'{"a":1,}', b'{"a"}', b'{"a":01}',
        b'{"a":+1}', b'{"a":.5}', b'{"a":1.}', b'{"a":0x1}',
        b'{"a":"\n"}', b'{"a":"\\x"}', b'{"a":tru}',
        b'{"a":NaN}', b'{"a":Infinity}', b'{"a":-Infinity}', b'{"used":[NaN]}', b"// c\n{}",
        b'{"trace_id":"\xff"}', b'\xff{"a":1}', b'\xef\xbb\xbf{}', '{"a":1}'.encode("utf-16"),
        b'{"x":"\xed\xa0\x80"}', b'{"x":"\xc0\x80"}',
    ],
)  # fmt: skip
def test_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    assert refused(body).startswith("body")


@pytest.mark.parametrize("body", ["[]", "5", '"x"', "null", "true", "1.5"])
def test_a_body_that_is_not_an_object_is_refused(body: str) -> None:
    assert "object" in refused(body)


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_not() -> None:
    assert "trace_id" in refused('{"trace_id":"\\ud83d"}')
    names = '{"location_spec_names":["a","\\ude00"]}'
    assert "location_spec_names[1]" in refused(names)
    assert location_request('{"trace_id":"\\ud83d\\ude00"}').trace_id == "😀"


@pytest.mark.parametrize("depth", [5_000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_nesting_bomb_is_an_error_of_the_request(depth: int, opening: str, closing: str) -> None:
    nested = opening * depth + ("1" if closing == "}" else "") + closing * depth
    assert "deep" in refused(f'{{"x":{nested}}}')
    assert "deep" in refused(nested)
    assert "deep" in refused(opening * depth)


def test_a_decoder_that_failed_is_as_good_as_new() -> None:
    refused('{"trace_id":"a","trace_id":"b"}')
    refused("[" * 100_000)
    assert location_request('{"trace_id":"a"}').trace_id == "a"


# -- round trips -----------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT64 = st.one_of(
    st.sampled_from([0, 1, -1, INT64_MIN, INT64_MAX]), st.integers(INT64_MIN, INT64_MAX)
)
INT32 = st.integers(INT32_MIN, INT32_MAX)


def scalars(field: Any) -> st.SearchStrategy[Any]:
    by_type: dict[int, st.SearchStrategy[Any]] = {
        field.TYPE_STRING: TEXT,
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
        field.TYPE_INT32: INT32,
        field.TYPE_UINT32: st.integers(0, (1 << 32) - 1),
        field.TYPE_INT64: INT64,
        field.TYPE_ENUM: INT32
        if field.enum_type is None
        else st.one_of(st.sampled_from(sorted(field.enum_type.values_by_number)), INT32),
    }
    return by_type[field.type]


@st.composite
def messages(draw: st.DrawFn, message_type: type[Message]) -> Message:
    message = message_type()
    taken: set[str] = set()
    for field in message_type.DESCRIPTOR.fields:
        oneof = field.containing_oneof.name if field.containing_oneof else field.name
        if oneof in taken or not draw(st.booleans()):
            continue
        taken.add(oneof)
        if field.type == field.TYPE_MESSAGE:
            child = messages(field.message_type._concrete_class)
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(child, max_size=3)))
            else:
                getattr(message, field.name).CopyFrom(draw(child))
                getattr(message, field.name).SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(scalars(field), max_size=4)))
        else:
            setattr(message, field.name, draw(scalars(field)))
    return message


ROUND_TRIPS = [
    meta_pb2.RegisterInstanceRequest, meta_pb2.GetInstanceInfoResponse,
    meta_pb2.GetCacheLocationRequest, meta_pb2.GetCacheLocationResponse,
    meta_pb2.GetCacheMetaResponse, meta_pb2.StartWriteCacheRequest,
    meta_pb2.StartWriteCacheResponse, meta_pb2.FinishWriteCacheRequest,
    meta_pb2.TrimCacheRequest, admin_pb2.ListStorageResponse,
    admin_pb2.UpdateInstanceGroupRequest, admin_pb2.GetMetricsResponse,
    admin_pb2.CheckHealthResponse, admin_pb2.AddAccountRequest,
]  # fmt: skip


@given(st.sampled_from(ROUND_TRIPS).flatmap(messages))
def test_what_is_printed_reads_back_as_the_same_message(message: Message) -> None:
    text = render(message)
    assert parse(text, type(message)) == message
    assert render(parse(text, type(message))) == text
    spread = json.dumps(json.loads(text), indent=1).encode()
    assert parse(spread, type(message)) == message


@given(messages(admin_pb2.InstanceGroup))
def test_printed_fields_stand_in_the_order_of_their_numbers(message: Message) -> None:
    names = list(json.loads(render(message)))
    numbers = {field.name: field.number for field in message.DESCRIPTOR.fields}
    assert [numbers[name] for name in names] == sorted(numbers[name] for name in names)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_a_malformed_request(data: bytes) -> None:
    # Anything but these two outcomes propagates and fails the test.
    with contextlib.suppress(MalformedRequest):
        parse(data, meta_pb2.GetCacheLocationRequest)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["block_keys", "blockMask", "offset", "bool_masks", "values", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_any_json_is_a_message_or_a_malformed_request(value: Any) -> None:
    try:
        message = parse(json.dumps(value).encode(), meta_pb2.GetCacheLocationRequest)
    except MalformedRequest:
        return
    assert parse(render(message), type(message)) == message


def test_every_message_of_the_wire_can_be_printed_and_read() -> None:
    for module in (meta_pb2, admin_pb2):
        for name in module.DESCRIPTOR.message_types_by_name:
            message = getattr(module, name)()
            assert parse(render(message), type(message)) == message


JSON_TEXTS = st.text(st.sampled_from('abc:"\\é\u2028\x00'), max_size=4)
JSON_NUMBERS = st.one_of(
    st.integers(-(1 << 65), 1 << 65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1.0, -0.0, 1e300]),
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | JSON_NUMBERS | JSON_TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(JSON_TEXTS | st.sampled_from(["offset", "values", "boolMasks"]), inner)
    ),
    max_leaves=6,
)
LOOKUP_NAMES = st.sampled_from(
    ["trace_id", "block_keys", "blockKeys", "query_type", "block_mask", "sw_size", "unknown"]
)
LOOKUP_MEMBERS = st.lists(
    st.tuples(LOOKUP_NAMES, JSON_VALUES | st.lists(JSON_NUMBERS, max_size=4)), max_size=4
)


@given(members=LOOKUP_MEMBERS, space=st.sampled_from(["", " "]), ascii_only=st.booleans())
@example(members=[("trace_id", "a"), ("trace_id", "b")], space="", ascii_only=True)
@example(members=[("trace_id", ":"), ("sw_size", 1)], space=" ", ascii_only=True)
@example(members=[("block_keys", [1.0, 2])], space="", ascii_only=True)
@example(members=[("block_keys", [(1 << 63) - 1, -(1 << 63)])], space="", ascii_only=True)
@example(members=[("unknown", [1, {"a": 1}])], space="", ascii_only=True)
def test_the_fast_decoder_never_changes_the_outcome(
    members: list[tuple[str, Any]], space: str, ascii_only: bool
) -> None:
    parts = [
        f"{json.dumps(name)}{space}:{json.dumps(value, ensure_ascii=ascii_only)}"
        for name, value in members
    ]
    body = ("{" + ",".join(parts) + "}").encode()

    def outcome() -> Any:
        try:
            return jsonwire.parse(body, meta_pb2.GetCacheLocationRequest)
        except MalformedRequest as error:
            return str(error)

    fast = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonwire, "_parse_plain", lambda data, kind: None)
        assert outcome() == fast
