"""The JSON of the HTTP transport, and what its statuses mean."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from google.protobuf import json_format

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.client import Client, jsonwire
from kvcm.client.retry import RetryPolicy
from kvcm.core.errors import (
    InternalError,
    KvcmError,
    MalformedRequest,
    NotReady,
    OutcomeUnknown,
    ReplyTooLarge,
    Unsupported,
)


def test_requests_keep_int64_exact_and_set_members_even_when_0() -> None:
    request = meta_pb2.GetCacheLocationRequest(
        instance_id="é", query_type=2, block_keys=[-(2**63), 2**63 - 1], block_mask={"offset": 0}
    )
    body = jsonwire.encode(request)
    assert json.loads(body) == {
        "instance_id": "é",
        "query_type": 2,
        "block_keys": [-(2**63), 2**63 - 1],
        "block_mask": {"offset": 0},
    }
    assert json_format.Parse(body, meta_pb2.GetCacheLocationRequest()) == request


def test_a_present_but_empty_message_is_sent() -> None:
    request = meta_pb2.FinishWriteCacheRequest(success_blocks={"bool_masks": {}})
    assert json.loads(jsonwire.encode(request)) == {"success_blocks": {"bool_masks": {}}}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 0.1])
def test_every_double_survives(number: float) -> None:
    message = admin_pb2.TriggerStrategy(used_percentage=number)
    again = json_format.Parse(jsonwire.encode(message), admin_pb2.TriggerStrategy())
    assert repr(again.used_percentage) == repr(number)


@pytest.mark.parametrize(
    "extra",
    ["", ',"new_field":{"a":[1]}', ',"type":"ST_OF_TOMORROW"', ',"spec_size":null', ',"type":4'],
)
def test_replies_may_have_unknown_fields_enums_and_nulls(extra: str) -> None:
    body = (
        '{"header":{"status":{"code":"OK","message":""},"request_id":"x"},'
        '"locations":[{"location_specs":[{"name":"a","uri":"u"}]' + extra + "}]}"
    )
    reply = jsonwire.decode(body.encode(), meta_pb2.GetCacheLocationResponse)
    assert reply.header.status.code == meta_pb2.OK
    assert reply.locations[0].location_specs[0].uri == "u"


def test_int64_as_strings_are_read() -> None:
    body = b'{"timestamp":"9223372036854775807"}'
    assert jsonwire.decode(body, admin_pb2.GetMetricsResponse).timestamp == 2**63 - 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"1", b'{"locations":1}', b"\xff"])
def test_what_is_no_reply_is_an_error(body: bytes) -> None:
    with pytest.raises(KvcmError):
        jsonwire.decode(body, meta_pb2.GetCacheLocationResponse)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, MalformedRequest),
        (401, KvcmError),
        (404, Unsupported),
        (405, Unsupported),
        (413, ReplyTooLarge),
        (429, NotReady),
        (500, InternalError),
        (502, OutcomeUnknown),
        (503, NotReady),
        (504, OutcomeUnknown),
        (302, KvcmError),
    ],
)
def test_each_http_status_is_an_error_with_its_text(status: int, kind: type[KvcmError]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b'{"error":"what is wrong"}')

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        once = RetryPolicy(rounds_max=1)
        with Client(f"http://127.0.0.1:{server.server_address[1]}", retry=once) as client:
            with pytest.raises(KvcmError, match="what is wrong") as caught:
                client.get_cache_location("i", [1])
        assert type(caught.value) is kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
