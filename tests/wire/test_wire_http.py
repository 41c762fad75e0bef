"""HTTP as such: paths, verbs, sizes, and bodies that arrive in odd ways (wire.md §1)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_harness import (
    Server,
    lower_camel,
    methods,
    running_server,
    types_of,
    without_request_id,
)

BODY = b'{"trace_id":"t","instance_id":"nobody"}'
EXPECTED = (
    b'{"header":{"status":{"code":"INSTANCE_NOT_EXIST","message":"instance \'nobody\' is not '
    b'registered"},"request_id":"R","tracer_result":""},"instance_group":""}'
)
LIMIT = 1 << 20


class Raw:
    """A connection on which every byte is ours."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers in lower case, body of the next response."""
        status = int(self._file.readline().split()[1])
        headers: dict[str, str] = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, self._file.read(int(headers.get("content-length", "0")))

    def ended(self) -> bool:
        return self._file.read(1) == b""

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@pytest.fixture
def raw(server: Server) -> Iterator[Raw]:
    with closing(Raw(server.port("http"))) as connection:
        yield connection


def head(*lines: str, path: str = "/api/getInstanceInfo", verb: str = "POST") -> bytes:
    return "\r\n".join([f"{verb} {path} HTTP/1.1", "host: x", *lines, "", ""]).encode()


# -- paths, verbs, sizes ----------------------------------------------------------------


def error_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    header = response.json()["header"]
    assert header["status"]["code"] == "INVALID_ARGUMENT"
    assert header["request_id"]
    message: str = header["status"]["message"]
    return message


@pytest.mark.parametrize("admin", [False, True], ids=["meta", "admin"])
@pytest.mark.parametrize(
    "path",
    [
        "/api/nothing",
        "/api/",
        "/api",
        "/",
        "/nothing",
        "/api/GetInstanceInfo",
        "/api/getInstanceInfo/",
        "/api//getInstanceInfo",
        "/getInstanceInfo",
        "/api/getInstanceInfo%2F",
    ],
)
def test_an_unknown_path_is_404_with_a_json_body(server: Server, path, admin):
    response = server.http.post(server.url(path, admin=admin), content=BODY)
    assert "/" in error_of(response, 404)


def test_methods_of_one_service_are_not_paths_of_the_other(server: Server):
    error_of(server.post_raw("addStorage", "{}"), 404)
    error_of(server.post_raw("getCacheLocation", "{}", admin=True), 404)


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("admin", [False, True], ids=["meta", "admin"])
def test_a_wrong_verb_is_405_with_a_json_body(server: Server, verb, admin):
    response = server.http.request(verb, server.url("/api/getInstanceInfo", admin=admin))
    assert "POST" in error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_head_has_no_body(raw: Raw):
    raw.send(head(verb="HEAD") + head(f"content-length: {len(BODY)}") + BODY)
    status, headers, _ = _head_answer(raw)
    assert status == 405
    status, _, body = raw.answer()
    assert (status, without_request_id(body)) == (200, EXPECTED)
    assert headers


def _head_answer(raw: Raw) -> tuple[int, dict[str, str], bytes]:
    """As `Raw.answer`, of a response that has a length but no body."""
    status = int(raw._file.readline().split()[1])
    headers: dict[str, str] = {}
    while (line := raw._file.readline().strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, b""


def test_queries_behind_the_path_are_ignored(server: Server):
    response = server.http.post(server.url("/api/getInstanceInfo?x=1&y=%2F"), content=BODY)
    assert without_request_id(response.content) == EXPECTED


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A manager that takes at most 1 MiB."""
    with running_server(f"receive_bytes_max={LIMIT}") as running:
        yield running


def padded(size: int) -> bytes:
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


def test_a_body_at_the_limit_is_read_and_one_above_is_413(small: Server):
    assert without_request_id(small.post_raw("getInstanceInfo", padded(LIMIT)).content) == EXPECTED
    message = error_of(small.post_raw("getInstanceInfo", padded(LIMIT + 1)), 413)
    assert str(LIMIT) in message
    assert "receive_bytes_max" in message


@pytest.mark.parametrize("extra", [0, 1])
def test_the_limit_holds_for_chunked_bodies(small: Server, extra):
    def pieces() -> Iterator[bytes]:
        body = padded(LIMIT + extra)
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    response = small.http.post(small.url("/api/getInstanceInfo"), content=pieces())
    if extra:
        assert "receive_bytes_max" in error_of(response, 413)
    else:
        assert without_request_id(response.content) == EXPECTED


def test_a_length_above_the_limit_is_refused_before_the_body_comes(small: Server):
    with closing(Raw(small.port("http"))) as raw:
        raw.send(head("content-length: 99999999999999"))
        status, headers, body = raw.answer()
        assert status == 413
        assert headers["content-type"] == "application/json"
        assert "receive_bytes_max" in json.loads(body)["header"]["status"]["message"]
    assert small.post_raw("getInstanceInfo", BODY).status_code == 200


# -- odd ways for a body to arrive ------------------------------------------------------


def test_one_byte_at_a_time(raw: Raw):
    for byte in head(f"content-length: {len(BODY)}") + BODY:
        raw.send(bytes([byte]))
    status, headers, body = raw.answer()
    assert (status, without_request_id(body)) == (200, EXPECTED)
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_chunks(raw: Raw, size):
    raw.send(head("transfer-encoding: chunked"))
    for start in range(0, len(BODY), size):
        chunk = BODY[start : start + size]
        raw.send(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
    raw.send(b"0\r\n\r\n")
    status, _, body = raw.answer()
    assert (status, without_request_id(body)) == (200, EXPECTED)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", ""])
def test_the_content_type_does_not_matter(raw: Raw, kind):
    lines = [] if kind is None else [f"content-type: {kind}"]
    raw.send(head(f"content-length: {len(BODY)}", *lines) + BODY)
    status, _, body = raw.answer()
    assert (status, without_request_id(body)) == (200, EXPECTED)


def test_a_post_without_a_length_has_an_empty_body(raw: Raw):
    raw.send(head())
    status, _, body = raw.answer()
    assert status == 400
    assert json.loads(body)["header"]["status"]["code"] == "INVALID_ARGUMENT"


def test_expect_100_continue(raw: Raw):
    raw.send(head(f"content-length: {len(BODY)}", "expect: 100-continue"))
    assert raw._file.readline().startswith(b"HTTP/1.1 100")
    assert raw._file.readline() == b"\r\n"
    raw.send(BODY)
    assert raw.answer()[0] == 200


def test_many_requests_on_one_connection(raw: Raw):
    """Errors do not end it either."""
    request = head(f"content-length: {len(BODY)}") + BODY
    broken = head("content-length: 1") + b"{"
    for _ in range(20):
        for data, wanted in (
            (request, 200),
            (broken, 400),
            (head(path="/api/x"), 404),
            (head(verb="GET"), 405),
        ):
            raw.send(data)
            assert raw.answer()[0] == wanted


def test_pipelined_requests_are_answered_in_order(raw: Raw):
    bodies = [f'{{"trace_id":"{i}"}}'.encode() for i in range(10)]
    raw.send(b"".join(head(f"content-length: {len(b)}") + b for b in bodies))
    seen = [json.loads(raw.answer()[2])["header"]["request_id"].split("_")[0] for _ in bodies]
    assert seen == [str(i) for i in range(10)]


def test_connection_close_is_honoured(raw: Raw):
    raw.send(head(f"content-length: {len(BODY)}", "connection: close") + BODY)
    assert raw.answer()[0] == 200
    assert raw.ended()


def test_http_1_0(raw: Raw):
    request = head(f"content-length: {len(BODY)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    raw.send(request + BODY)
    status, _, body = raw.answer()
    assert (status, without_request_id(body)) == (200, EXPECTED)
    assert raw.ended()


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"nonsense\r\n\r\n",
        b"POST /api/getInstanceInfo HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /api/getInstanceInfo HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST  HTTP/9.9\r\n\r\n",
        head("transfer-encoding: chunked") + b"zz\r\n",
    ],
    ids=range(6),
)
def test_what_is_not_http_ends_the_connection_and_nothing_else(server: Server, raw: Raw, data):
    raw.send(data)
    raw.socket.settimeout(10)
    received = b""
    while piece := raw.socket.recv(65536):
        received += piece
    assert received == b"" or received.startswith(b"HTTP/1.1 400")
    assert server.post_raw("getInstanceInfo", BODY).status_code == 200


def test_clients_that_leave_in_the_middle_harm_nobody(server: Server):
    for cut in (10, 60, len(head(f"content-length: {len(BODY)}")) + 5):
        for _ in range(5):
            with closing(Raw(server.port("http"))) as raw:
                raw.send((head(f"content-length: {len(BODY)}") + BODY)[:cut])
    assert server.post_raw("getInstanceInfo", BODY).status_code == 200
    assert "Traceback" not in server.log


# -- other paths ------------------------------------------------------------------------


@pytest.mark.parametrize("admin", [False, True], ids=["meta", "admin"])
def test_health_and_readiness(server: Server, admin):
    assert server.http.get(server.url("/healthz", admin=admin)).status_code == 200
    assert server.http.get(server.url("/readyz", admin=admin)).json() == {"ready": True}


@pytest.mark.parametrize("admin", [False, True], ids=["meta", "admin"])
def test_the_committed_document_names_every_path_that_is_served(server: Server, admin):
    name = "openapi.admin.json" if admin else "openapi.json"
    committed = json.loads((Path(__file__).resolve().parents[2] / "api" / name).read_text())
    served = server.http.get(server.url("/openapi.json", admin=admin)).json()
    assert served["paths"].keys() == committed["paths"].keys()


# -- fuzz -------------------------------------------------------------------------------

SAFE = [(m, False) for m in methods(admin=False)] + [
    (m, True)
    for m in methods(admin=True)
    if m not in {"LeaderDemote", "UpdateLeaderElectorConfig", "UpdateLogger", "LoadConfigSnapshot"}
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["QT_PREFIX_MATCH", "ST_NFS", "9223372036854775807", "1e5"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "offset",
                    "bool_masks",
                    "values",
                    "name",
                    "size",
                    "nfs",
                    "quota",
                    "x",
                    "spec_names",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def fields_of(method: str, admin: bool) -> list[str]:
    names: list[str] = []
    for field in types_of(method, admin=admin)[0].DESCRIPTOR.fields:
        names += [field.name, field.json_name]
    # Never the real ones: what the fuzz may create is its own.
    return [n for n in names if n not in ("storage", "force")]


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(data=st.data(), method=st.sampled_from(SAFE))
def test_any_json_is_answered_with_json_and_a_status_of_the_table(server: Server, data, method):
    name, admin = method
    document = data.draw(
        st.dictionaries(st.sampled_from(fields_of(name, admin)), VALUES, max_size=6)
        if fields_of(name, admin)
        else VALUES
    )
    response = server.post_raw(lower_camel(name), json.dumps(document), admin=admin)
    assert response.status_code in (200, 400, 413)
    answer = response.json()
    status = answer["header"]["status"]
    assert status["code"] not in ("UNSPECIFIED", "INTERNAL_ERROR", "UNKNOWN_ERROR"), answer
    if response.status_code == 400:
        assert status["code"] == "INVALID_ARGUMENT"
    assert answer["header"]["request_id"]
    expected = types_of(name, admin=admin)[1].DESCRIPTOR
    for field in expected.fields:
        if response.status_code == 200 and not field.has_presence and field.number < 100:
            assert field.name in answer


@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(body=st.binary(max_size=200), method=st.sampled_from(SAFE))
def test_any_bytes_are_answered_with_json(server: Server, body, method):
    name, admin = method
    response = server.post_raw(lower_camel(name), body, admin=admin)
    assert response.status_code in (200, 400)
    assert response.json()["header"]["status"]["code"]


@settings(
    max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(path=st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=30))
def test_any_path_is_answered_with_a_status_of_the_table(server: Server, path):
    quoted = "".join(
        chr(b) if 33 <= b < 127 and chr(b) not in "?#" else f"%{b:02x}" for b in path.encode()
    )
    with closing(Raw(server.port("http"))) as raw:
        raw.send(head("content-length: 2", path="/" + quoted) + b"{}")
        status, headers, body = raw.answer()
    assert status in (200, 400, 404, 405)
    if status != 400:
        assert headers["content-type"] == "application/json"
        json.loads(body)


def test_the_manager_has_logged_no_fault_of_its_own(server: Server):
    assert "Traceback" not in server.log, server.log[-5000:]
