"""Bodies byte for byte (wire.md §1, §9): what is printed, and what is read."""

from __future__ import annotations

import json

import pytest
from wire_harness import (
    Server,
    lower_camel,
    registration,
    types_of,
    without_request_id,
)

I64 = "9223372036854775807"
HEADER = b'"header":{"status":{"code":"OK","message":""},"request_id":"R","tracer_result":""}'
ADMIN_HEADER = b'"header":{"status":{"code":"OK","message":""},"request_id":"R"}'


@pytest.fixture
def name(server: Server, fresh_id) -> str:
    """A registered instance with specs a (8 bytes) and b (2^33)."""
    instance_id = fresh_id()
    body = registration(
        instance_id,
        location_spec_infos=[{"name": "a", "size": 8}, {"name": "b", "size": 1 << 33}],
        location_spec_groups=[{"name": "g", "spec_names": ["b", "a"]}],
    )
    assert server.post_raw("registerInstance", json.dumps(body)).status_code == 200
    return instance_id


def body_of(server: Server, method: str, text: str | bytes, *, admin: bool = False) -> bytes:
    response = server.post_raw(method, text, admin=admin)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["content-length"] == str(len(response.content))
    return without_request_id(response.content)


def code(server: Server, method: str, text: str | bytes, *, admin: bool = False) -> str:
    response = server.post_raw(method, text, admin=admin)
    assert response.status_code == 200, response.text
    answer: str = response.json()["header"]["status"]["code"]
    return answer


# -- printing ---------------------------------------------------------------------------


def test_empty_lists_are_printed(server: Server, name):
    lookup = f'{{"instance_id":"{name}","query_type":"QT_PREFIX_MATCH","block_keys":[1]}}'
    assert body_of(server, "getCacheLocation", lookup) == b"{" + HEADER + b',"locations":[]}'
    meta = f'{{"instance_id":"{name}"}}'
    assert body_of(server, "getCacheMeta", meta) == (b"{" + HEADER + b',"locations":[],"metas":[]}')


def test_placeholders_and_metas(server: Server, name):
    placeholder = (
        b'{"type":"ST_UNSPECIFIED","spec_size":2,"location_specs":'
        b'[{"name":"a","uri":""},{"name":"b","uri":""}]}'
    )
    lookup = f'{{"instance_id":"{name}","query_type":"QT_BATCH_GET","block_keys":[1,2]}}'
    assert body_of(server, "getCacheLocation", lookup) == (
        b"{" + HEADER + b',"locations":[' + placeholder + b"," + placeholder + b"]}"
    )
    assert body_of(server, "getCacheMeta", f'{{"instance_id":"{name}","block_keys":[1]}}') == (
        b"{"
        + HEADER
        + b',"locations":['
        + placeholder
        + b'],"metas":["{\\"status\\":\\"CLS_NOT_FOUND\\"}"]}'
    )


def test_a_write_from_start_to_lookup(server: Server, name):
    start = f'{{"instance_id":"{name}","block_keys":[1,2]}}'
    body = body_of(server, "startWriteCache", start)
    answer = json.loads(body)
    session = answer["write_session_id"]
    printed = [
        b'{"type":"ST_NFS","spec_size":2,"location_specs":[{"name":"a","uri":"'
        + location["location_specs"][0]["uri"].encode()
        + b'"},{"name":"b","uri":"'
        + location["location_specs"][1]["uri"].encode()
        + b'"}]}'
        for location in answer["locations"]
    ]
    assert len(printed) == 2
    assert body == (
        b"{"
        + HEADER
        + b',"write_session_id":"'
        + session.encode()
        + b'","block_mask":{"offset":0},"locations":['
        + b",".join(printed)
        + b"]}"
    )
    finish = (
        f'{{"instance_id":"{name}","write_session_id":"{session}","success_blocks":{{"offset":2}}}}'
    )
    assert body_of(server, "finishWriteCache", finish) == b"{" + HEADER + b"}"
    lookup = f'{{"instance_id":"{name}","query_type":2,"block_keys":[1,2]}}'
    assert body_of(server, "getCacheLocation", lookup) == (
        b"{" + HEADER + b',"locations":[' + b",".join(printed) + b"]}"
    )
    (meta,) = json.loads(
        body_of(server, "getCacheMeta", f'{{"instance_id":"{name}","block_keys":["2"]}}')
    )["metas"]
    assert meta == f'{{"id":"{json.loads(meta)["id"]}","status":"CLS_SERVING"}}'
    third = body_of(server, "startWriteCache", f'{{"instance_id":"{name}","block_keys":[3,2,4]}}')
    assert b'"block_mask":{"bool_masks":{"values":[false,true,false]}},"locations":[{' in third


def test_instance_info(server: Server, name):
    infos = (
        b'[{"name":"a","size":"8"},{"name":"b","size":"8589934592"}],"model_deployment":'
        b'{"model_name":"m","dtype":"bf16","use_mla":false,"tp_size":2,"dp_size":0,"lora_name":"",'
        b'"pp_size":0,"extra":"","user_data":""},"location_spec_groups":'
        b'[{"name":"g","spec_names":["b","a"]}]}}'
    )
    info = (
        b'"instance_info":{"quota_group_name":"q","instance_group_name":"default","instance_id":"'
        + name.encode()
        + b'","block_size":4,"location_spec_infos":'
    )
    request = f'{{"instance_id":"{name}"}}'
    assert body_of(server, "getInstanceInfo", request) == (
        b"{" + HEADER + b',"instance_group":"default",' + info + infos
    )
    assert body_of(server, "getInstanceInfo", request, admin=True) == (
        b"{" + ADMIN_HEADER + b"," + info + infos
    )


def test_a_group_with_all_its_numbers(server: Server, fresh_id):
    name = fresh_id()
    group = (
        f'{{"name":"{name}","storage_candidates":["nfs_01"],"global_quota_group_name":"",'
        f'"max_instance_count":"{I64}","quota":{{"capacity":"{I64}","quota_config":'
        f'[{{"storage_type":"ST_VCNS_3FS","capacity":"9007199254740993"}}]}},'
        '"cache_config":{"reclaim_strategy":{"storage_unique_name":"","reclaim_policy":'
        '"POLICY_TTL","trigger_strategy":{"used_size":"0","used_percentage":0.1},'
        '"trigger_period_seconds":2147483647,"reclaim_step_size":0,"reclaim_step_percentage":0,'
        '"delay_before_delete_ms":0},"data_storage_strategy":"CPS_PREFER_VCNS_3FS"},'
        '"user_data":"é\\u2028\\"\\\\/\\n\\u0001","version":"1"}'
    )
    request = f'{{"trace_id":"t","instance_group":{group}}}'
    assert code(server, "createInstanceGroup", request, admin=True) == "OK"
    # Texts come back as UTF-8 with the escapes that JSON demands.
    printed = group.replace("\\u2028", "\u2028")
    assert body_of(server, "getInstanceGroup", f'{{"name":"{name}"}}', admin=True) == (
        b"{" + ADMIN_HEADER + b',"instance_group":' + printed.encode() + b"}"
    )


def test_unset_messages_are_omitted(server: Server, fresh_id):
    name = fresh_id()
    request = f'{{"instance_group":{{"name":"{name}"}}}}'
    assert code(server, "createInstanceGroup", request, admin=True) == "OK"
    assert body_of(server, "getInstanceGroup", f'{{"name":"{name}"}}', admin=True) == (
        b"{"
        + ADMIN_HEADER
        + f',"instance_group":{{"name":"{name}","storage_candidates":[],'.encode()
        + b'"global_quota_group_name":"","max_instance_count":"0","user_data":"","version":"0"}}'
    )


def test_bools_and_numbers_of_the_leader_elector(server: Server):
    body = body_of(server, "checkHealth", "{}", admin=True)
    time_ms = json.loads(body)["elector_last_loop_time_ms"]
    assert isinstance(time_ms, str)
    assert body == (
        b"{"
        + ADMIN_HEADER
        + f',"is_leader":true,"is_health":true,"elector_last_loop_time_ms":"{time_ms}"}}'.encode()
    )
    assert body_of(server, "getLeaderElectorConfig", "{}", admin=True) == (
        b"{" + ADMIN_HEADER + b',"campaign_delay_time_ms":"0"}'
    )


def test_an_error_prints_everything_that_success_would(server: Server):
    assert body_of(server, "startWriteCache", '{"instance_id":"nobody"}') == (
        b'{"header":{"status":{"code":"INSTANCE_NOT_EXIST","message":'
        b'"instance \'nobody\' does not exist"},"request_id":"R","tracer_result":""},'
        b'"write_session_id":"","locations":[]}'
    )


def test_a_reason_is_printed_only_when_there_is_one(server: Server, name):
    """Status.reason is field 100: bodies of old say nothing new."""
    for method, text in (
        ("checkHealth", "{}"),
        ("getInstanceInfo", f'{{"instance_id":"{name}"}}'),
        ("getInstanceInfo", '{"instance_id":"nobody"}'),
    ):
        admin = server.post_raw(method, text, admin=True).content
        assert b"reason" not in admin
    refused = body_of(
        server,
        "finishWriteCache",
        f'{{"instance_id":"{name}","write_session_id":"x","success_blocks":{{}}}}',
    )
    status = json.loads(refused)["header"]["status"]
    assert list(status) == ["code", "message", "reason"]
    assert status["reason"] == "SESSION_NOT_EXIST"


# -- reading ----------------------------------------------------------------------------


def test_int64_as_number_or_string_is_exact_over_the_whole_range(server: Server, name):
    pairs = [
        ("9223372036854775807", "9223372036854775806"),
        ("-9223372036854775808", "-9223372036854775807"),
        ("9007199254740993", "9007199254740992"),
    ]
    for exact, beside in pairs:
        start = f'{{"instance_id":"{name}","block_keys":[{exact}]}}'
        session = json.loads(body_of(server, "startWriteCache", start))["write_session_id"]
        finish = (
            f'{{"instance_id":"{name}","write_session_id":"{session}",'
            '"success_blocks":{"offset":1}}'
        )
        assert code(server, "finishWriteCache", finish) == "OK"
        for spelling, hits in ((f'"{exact}"', 1), (exact, 1), (beside, 0), (f'"{beside}"', 0)):
            lookup = (
                f'{{"instance_id":"{name}","query_type":"QT_PREFIX_MATCH",'
                f'"block_keys":[{spelling}]}}'
            )
            found = json.loads(body_of(server, "getCacheLocation", lookup))["locations"]
            assert len(found) == hits, spelling


INTEGERS_REFUSED = [
    "1.5",
    "1e-1",
    "9223372036854775808",
    "-9223372036854775809",
    '"9223372036854775808"',
    "1e30",
    "1e999999999",
    '"1.0"',
    '"1e3"',
    '" 1"',
    '"+1"',
    '"1_0"',
    '"0x1"',
    '"٣"',
    '""',
    "true",
    "[]",
    "{}",
    "9223372036854775807.5",
]


@pytest.mark.parametrize("value", INTEGERS_REFUSED)
def test_what_is_no_exact_int64_is_400_and_never_rounded(server: Server, name, value):
    text = f'{{"instance_id":"{name}","query_type":2,"block_keys":[1,{value}]}}'
    response = server.post_raw("getCacheLocation", text)
    assert response.status_code == 400
    status = response.json()["header"]["status"]
    assert status["code"] == "INVALID_ARGUMENT"
    assert "block_keys[1]" in status["message"]


@pytest.mark.parametrize("value", ["1.0", "10e-1", "0.1e1", "1e0", '"1"', '"01"'])
def test_exact_integral_spellings_are_integers(server: Server, name, value):
    text = f'{{"instance_id":"{name}","query_type":2,"block_keys":[1],"sw_size":{value}}}'
    assert code(server, "getCacheLocation", text) == "OK"
    text = f'{{"instance_id":"{name}","query_type":3,"block_keys":[{value}],"sw_size":{value}}}'
    found = json.loads(body_of(server, "getCacheLocation", text))["locations"]
    assert len(found) == 1


@pytest.mark.parametrize("value", ["2147483648", "-2147483649", "0.5", "true", '"x"'])
def test_int32_has_its_own_range(server: Server, name, value):
    text = f'{{"instance_id":"{name}","query_type":2,"sw_size":{value}}}'
    response = server.post_raw("getCacheLocation", text)
    assert response.status_code == 400
    assert "sw_size" in response.json()["header"]["status"]["message"]


def test_enums_by_name_or_number_and_unknown_names_are_unset(server: Server, name):
    def ask(query: str) -> str:
        text = f'{{"instance_id":"{name}","query_type":{query},"block_keys":[1]}}'
        return code(server, "getCacheLocation", text)

    for query in ('"QT_PREFIX_MATCH"', "2", '"QT_BATCH_GET"', "1", "2.0"):
        assert ask(query) == "OK", query
    for query in ('"QT_NEW_KIND"', '"qt_prefix_match"', "0", "99", "-1", "null", '""'):
        assert ask(query) == "INVALID_ARGUMENT", query


@pytest.mark.parametrize("value", ["1.5", "true", "[]", "{}", "2147483648"])
def test_an_enum_of_a_wrong_type_is_400(server: Server, name, value):
    text = f'{{"instance_id":"{name}","query_type":{value}}}'
    assert server.post_raw("getCacheLocation", text).status_code == 400


def test_snake_and_camel_names_are_read(server: Server, name):
    snake = (
        f'{{"trace_id":"t","instance_id":"{name}","query_type":"QT_BATCH_GET","block_keys":[1],'
        '"block_mask":{"bool_masks":{"values":[true]}},"sw_size":1,"location_spec_names":["a"]}'
    )
    camel = (
        f'{{"traceId":"t","instanceId":"{name}","queryType":"QT_BATCH_GET","blockKeys":[1],'
        '"blockMask":{"boolMasks":{"values":[true]}},"swSize":1,"locationSpecNames":["a"]}'
    )
    assert body_of(server, "getCacheLocation", camel) == body_of(server, "getCacheLocation", snake)


DEPTHS = [
    '{"instance_id":"%s","query_type":2,"future":1}',
    '{"instance_id":"%s","query_type":2,"future":{"a":[{"b":null}],"c":1e999}}',
    '{"instance_id":"%s","query_type":2,"block_mask":{"offset":0,"future":[]}}',
    '{"instance_id":"%s","query_type":2,"block_mask":{"bool_masks":{"offset":0}}}',
    '{"instance_id":"%s","query_type":2,"block_mask":{"bool_masks":{"values":[],"x":{"y":1}}}}',
    '{"instance_id":"%s","query_type":2,"block_mask":{"future":{"offset":"x"}}}',
    '{"instance_id":"%s","query_type":2,"":0," query_type":1}',
]


@pytest.mark.parametrize("text", DEPTHS, ids=range(len(DEPTHS)))
def test_unknown_fields_are_ignored_at_every_depth(server: Server, name, text):
    assert code(server, "getCacheLocation", text % name) == "OK"


def test_unknown_fields_in_lists_of_messages_are_ignored(server: Server, fresh_id):
    text = (
        f'{{"instance_group":"default","instance_id":"{fresh_id()}","block_size":1,'
        '"location_spec_infos":[{"name":"a","size":1,"new":[1,{"x":2}]}],'
        '"location_spec_groups":[{"name":"g","spec_names":["a"],"new":null}]}'
    )
    assert code(server, "registerInstance", text) == "OK"


def test_null_is_unset(server: Server, name):
    text = (
        f'{{"trace_id":null,"instance_id":"{name}","query_type":"QT_PREFIX_MATCH",'
        '"block_keys":null,"token_ids":null,"block_mask":null,"sw_size":null,'
        '"location_spec_names":null}'
    )
    assert code(server, "getCacheLocation", text) == "OK"
    finish = f'{{"instance_id":"{name}","write_session_id":"x","success_blocks":%s}}'
    absent = body_of(server, "finishWriteCache", finish % "null")
    assert b"success_blocks is missing" in absent or b"SESSION_NOT_EXIST" in absent


@pytest.mark.parametrize(
    "mask", ['{"offset":null,"bool_masks":{"values":[true]}}', '{"offset":1,"bool_masks":null}']
)
def test_a_null_member_does_not_unset_the_other(server: Server, name, mask):
    text = f'{{"instance_id":"{name}","block_keys":[1,2],"block_mask":{mask}}}'
    assert len(json.loads(body_of(server, "getCacheMeta", text))["metas"]) == 1


def test_two_members_of_a_oneof_are_400(server: Server, name):
    mask = '{"offset":1,"bool_masks":{"values":[true]}}'
    text = f'{{"instance_id":"{name}","block_keys":[1],"block_mask":{mask}}}'
    assert server.post_raw("getCacheMeta", text).status_code == 400


@pytest.mark.parametrize(
    "text",
    [
        '{"instance_id":"a","instance_id":"a"}',
        '{"instance_id":"a","instanceId":"a"}',
        '{"block_mask":{"offset":1,"offset":1}}',
        '{"block_mask":{},"blockMask":{}}',
        '{"future":1,"future":2}',
        '{"future":{"a":1,"a":2}}',
        '{"instance_id":null,"instance_id":"a"}',
    ],
)
def test_a_field_given_twice_is_400(server: Server, text):
    response = server.post_raw("getCacheLocation", text)
    assert response.status_code == 400
    assert response.json()["header"]["status"]["code"] == "INVALID_ARGUMENT"


def test_the_400_body(server: Server):
    response = server.post_raw("getCacheLocation", '{"sw_size":"x"}')
    assert response.headers["content-type"] == "application/json"
    assert without_request_id(response.content) == (
        b'{"header":{"status":{"code":"INVALID_ARGUMENT","message":"sw_size: \'x\' is not an int32 '
        b'in decimal digits"},"request_id":"R","tracer_result":""}}'
    )


MALFORMED = [
    b"",
    b" ",
    b"{",
    b"}",
    b'{"instance_id":"a"',
    b'{"instance_id":"a",}',
    b'{"instance_id":"a"}}',
    b'{"instance_id":"a"} x',
    b"[]",
    b"null",
    b"1",
    b'"text"',
    b"true",
    b"nope",
    b"{instance_id:1}",
    b"{'instance_id':'a'}",
    b'{"block_keys":[1,]}',
    b'{"block_keys":[1 2]}',
    b'{"sw_size":01}',
    b'{"sw_size":+1}',
    b'{"sw_size":NaN}',
    b'{"future":NaN}',
    b'{"future":Infinity}',
    b'{"future":-Infinity}',
    b'{"instance_id":"a\nb"}',
    b'{"instance_id":"\\x"}',
    b'{"instance_id":"\xff"}',
    b'{"instance_id":"\xed\xa0\x80"}',
    b'{"instance_id":"\xc0\xaf"}',
    b'{"instance_id":"\\ud800"}',
    b'{"instance_id":1}',
    b'{"instance_id":true}',
    b'{"instance_id":["a"]}',
    b'{"block_keys":1}',
    b'{"block_keys":{"0":1}}',
    b'{"block_keys":[null]}',
    b'{"block_keys":[[1]]}',
    b'{"block_mask":[]}',
    b'{"block_mask":1}',
    b'{"block_mask":{"bool_masks":[]}}',
    b'{"block_mask":{"bool_masks":{"values":[1]}}}',
    b'{"block_mask":{"bool_masks":{"values":["true"]}}}',
    b'{"location_spec_names":[1]}',
    b'{"location_spec_names":"a"}',
    b"\x00",
    b"\x1f\x8b\x08\x00",
    "{}".encode("utf-16"),
    b"[" * 100_000,
    b'{"future":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"block_keys":[' + b"1" * 100_000 + b"]}",
    b'{"future":' + b"1" * 100_000 + b"}",
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_bodies_are_400_with_a_json_body(server: Server, body):
    response = server.post_raw("getCacheLocation", body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/json"
    header = response.json()["header"]
    assert header["status"]["code"] == "INVALID_ARGUMENT"
    assert header["status"]["message"]
    assert header["request_id"].startswith("_")
    assert len(response.content) < 2000


METHODS = [
    (method, admin) for admin in (False, True) for method in ("GetInstanceInfo", "RemoveCache")
]


@pytest.mark.parametrize(("method", "admin"), METHODS)
def test_a_byte_order_mark_and_white_space_around_are_as_json_has_them(server, method, admin):
    assert types_of(method, admin=admin)
    path = lower_camel(method)
    assert server.post_raw(path, b"\xef\xbb\xbf{}", admin=admin).status_code == 400
    assert server.post_raw(path, b" \t\r\n{ } \n", admin=admin).status_code == 200


def test_escapes_and_characters_outside_the_basic_plane_are_read(server: Server):
    text = '{"trace_id":"\\u00e9\\ud83d\\ude00\\/"}'
    header = server.post_raw("getInstanceInfo", text).json()["header"]
    assert header["request_id"].startswith("é😀/_")
