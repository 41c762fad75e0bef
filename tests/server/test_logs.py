"""Logs as lines of JSON or text, and the access log: which calls it tells of, and what never."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from manager_harness import INSTANCE, Running, Start, bootstrap_document
from test_process import TIMEOUT_S, Served, write_blocks

from kvcm._pb import meta_pb2
from kvcm.cache.api import WireForm
from kvcm.core import limits
from kvcm.core.errors import CapacityReached, ConfigError, ErrorCode, MalformedRequest
from kvcm.server import logs
from kvcm.server.access_log import AccessLog
from kvcm.server.calls import Call, Context, Endpoint
from kvcm.server.callstats import CallStats
from kvcm.server.settings import AccessLogOptions
from kvcm.testing.clock import SimClock
from kvcm.testing.eventually import eventually

SECRET_KEY = 7_246_813_579_024_681
"""A block key that must be in no log."""


@pytest.fixture(autouse=True)
def access_level() -> Iterator[None]:
    logger = logging.getLogger(logs.ACCESS)
    before = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(before)


def record(message: str, **attributes: Any) -> logging.LogRecord:
    made = logging.LogRecord("kvcm.x", logging.WARNING, "", 0, message, None, None)
    made.__dict__.update(attributes)
    return made


# ---- the forms ---------------------------------------------------------------------------------


def test_a_json_record_has_its_exception_and_the_request_id() -> None:
    token = logs.request_id.set("trace\n1")
    try:
        raise ValueError("lost")
    except ValueError:
        line = logs.formatter("json").format(record("a\nb", exc_info=sys.exc_info()))
    finally:
        logs.request_id.reset(token)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "a\nb"
    assert (entry["level"], entry["logger"]) == ("warning", "kvcm.x")
    assert entry["request_id"] == "trace\n1"
    assert entry["exception"].endswith("ValueError: lost")
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize("form", ["text", "json"])
def test_outside_of_calls_there_is_no_request_id(form: str) -> None:
    assert "request_id" not in logs.formatter(form).format(record("m"))


def test_a_request_id_forges_no_line_of_text() -> None:
    token = logs.request_id.set("t\n2026 INFO kvcm: forged")
    try:
        line = logs.formatter("text").format(record("m"))
    finally:
        logs.request_id.reset(token)
    assert "\n" not in line
    assert line.endswith(r'm request_id="t\n2026 INFO kvcm: forged"')


# ---- the access log ----------------------------------------------------------------------------


class Logged:
    """An endpoint of GetCacheLocation with an access log in a file."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "access.log"
        self.clock = SimClock()
        self.handler_s = 0.0
        self.error: Exception | None = None
        self.log = AccessLog(AccessLogOptions(file=self.path, **options), "json", self.clock)
        self.log.open()
        method = meta_pb2.DESCRIPTOR.services_by_name["MetaService"].methods_by_name[
            "GetCacheLocation"
        ]
        self.endpoint = Endpoint(
            Context(self.clock, CallStats(), lambda: None, self.log),
            method,
            meta_pb2.GetCacheLocationRequest,
            meta_pb2.GetCacheLocationResponse,
            self._handle,
            leader_only=False,
        )

    async def _handle(self, call: Call[Any, Any]) -> None:
        assert logs.request_id.get() == call.request.trace_id
        await self.clock.sleep(self.handler_s)
        if self.error is not None:
            raise self.error

    async def call(self, **fields: Any) -> None:
        request = meta_pb2.GetCacheLocationRequest(trace_id="t", instance_id="i", **fields)
        data = request.SerializeToString()
        await self.endpoint.call(data, WireForm.PROTO, lambda: "1.2.3.4:5")

    async def lines(self) -> list[dict[str, Any]]:
        await self.log.run_once(0.0)
        return [json.loads(line) for line in self.path.read_text().splitlines()]


Make = Callable[..., Logged]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a `Logged` with the options given."""
    made: list[Logged] = []

    def make_one(folder: Path = tmp_path, **options: Any) -> Logged:
        made.append(Logged(folder, **options))
        return made[-1]

    yield make_one
    for logged in made:
        await logged.log.close()


async def test_a_line_tells_of_a_call_and_not_its_keys(make: Make) -> None:
    logged = make(rate=1)
    await logged.call(block_keys=[SECRET_KEY, 2])
    (line,) = await logged.lines()
    assert line.pop("bytes_in") > 0
    assert line.pop("bytes_out") > 0
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "kvcm.access",
        "message": "GetCacheLocation OK",
        "api": "GetCacheLocation",
        "transport": "grpc",
        "instance_id": "i",
        "code": "OK",
        "reason": "",
        "keys": 2,
        "duration_us": 0,
        "peer": "1.2.3.4:5",
        "request_id": "t",
    }
    assert str(SECRET_KEY) not in logged.path.read_text()


async def test_refused_and_unreadable_calls_have_a_line_at_any_rate(make: Make) -> None:
    logged = make(rate=1e-12)
    await logged.call()
    logged.error = CapacityReached("full", reason="QUOTA")
    await logged.call()
    with pytest.raises(MalformedRequest):
        await logged.endpoint.call(b"\xff", WireForm.PROTO)
    told = [(line["code"], line["reason"], line["level"]) for line in await logged.lines()]
    code = ErrorCode.REACH_MAX_ENTITY_CAPACITY.name
    assert told == [
        (code, "QUOTA", "warning"),
        ("INVALID_ARGUMENT", "MalformedRequest", "warning"),
    ]


async def test_a_call_has_a_line_when_it_is_slow_and_not_at_the_limit(make: Make) -> None:
    logged = make(rate=1e-12, slow_ms=250)
    for logged.handler_s in (0.25, 0.375):
        calling = asyncio.ensure_future(logged.call())
        await asyncio.sleep(0)
        logged.clock.advance(logged.handler_s)
        await calling
    assert [line["duration_us"] for line in await logged.lines()] == [375_000]


async def test_a_cancelled_call_is_told_as_that(make: Make) -> None:
    logged = make(rate=1)
    logged.handler_s = 1.0
    calling = asyncio.ensure_future(logged.call())
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert [line["reason"] for line in await logged.lines()] == ["CancelledError"]


async def test_half_of_the_calls_are_sampled_at_a_half(make: Make) -> None:
    logged = make(rate=0.5)
    for _ in range(400):
        await logged.call()
    assert 120 < len(await logged.lines()) < 280


async def test_what_does_not_fit_into_the_queue_is_counted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ACCESS_LOG_QUEUE_LINES_MAX", 3)
    logged = make(rate=1)
    for _ in range(3):
        await logged.call()
    assert logged.log.dropped == 0
    await logged.call()
    assert logged.log.dropped == 1
    assert len(await logged.lines()) == 3
    (family,) = logged.log.collect()
    told = {s.labels["outcome"]: s.value for s in family.samples}
    assert told == {"written": 3, "dropped": 1, "failed": 0}


async def test_a_file_that_is_moved_away_is_followed_by_a_new_one(
    make: Make, tmp_path: Path
) -> None:
    logged = make(rate=1)
    await logged.call()
    assert len(await logged.lines()) == 1
    logged.path.rename(tmp_path / "old")
    await logged.call()
    assert len(await logged.lines()) == 1


async def test_lines_that_cannot_be_written_are_counted_and_said_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    logged = make(folder, rate=1)
    logged.path.unlink()
    folder.rmdir()
    for _ in range(2):
        await logged.call()
    await logged.log.run_once(0.0)
    assert logged.log.failed == 2
    assert caplog.text.count("access.log") == 1
    folder.mkdir()
    await logged.call()
    assert len(await logged.lines()) == 1


def test_a_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    options = AccessLogOptions(rate=1, file=tmp_path / "none" / "access.log")
    with pytest.raises(ConfigError, match=r"access_log\.file .*No such file"):
        AccessLog(options, "json", SimClock()).open()


# ---- managers ----------------------------------------------------------------------------------


async def test_without_a_rate_not_even_failures_are_logged(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    running: Running = await start(**{"access_log.file": str(path)})
    assert await running.code("getInstanceInfo", {"instance_id": "none"}) != "OK"
    await running.manager.stop()
    assert not path.exists()


async def test_both_transports_are_logged_with_their_clients(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    flags = {"access_log.rate": 1, "access_log.file": str(path), "log_format": "json"}
    running: Running = await start(**flags)
    assert await running.code("registerInstance", INSTANCE) == "OK"
    await running.meta.GetInstanceInfo(
        meta_pb2.GetInstanceInfoRequest(trace_id="g", instance_id="i")
    )

    def told() -> list[tuple[str, str, str]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert all("127.0.0.1" in line["peer"] for line in lines)
        return [(line["api"], line["transport"], line["request_id"]) for line in lines]

    expected = [("RegisterInstance", "http", "t"), ("GetInstanceInfo", "grpc", "g")]
    await eventually(lambda: told() == expected)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start_one(*arguments: str) -> Served:
        served = Served(tmp_path, *arguments)
        started.append(served)
        served.wait_ready()
        return served

    yield start_one
    for served in started:
        served.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_line_of_a_process_is_json_and_has_no_keys(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve("--log-format=json", "--set", "access_log.rate=1")
    base = f"http://127.0.0.1:{served.ready['http_port']}/api/"
    admin = f"http://127.0.0.1:{served.ready['admin_http_port']}/api/"

    def ask(method: str, body: object, to: str = base) -> None:
        httpx.post(to + method, content=json.dumps(body), timeout=TIMEOUT_S)

    served.post("registerInstance", INSTANCE)
    write_blocks(served, [SECRET_KEY, SECRET_KEY + 1])
    keys = {"block_keys": [SECRET_KEY], "trace_id": "bad"}
    ask("getCacheLocation", {**keys, "instance_id": "none"})
    ask("getCacheLocation", {**keys, "instance_id": "i", "block_mask": "wrong"})
    ask("getCacheLocation", [SECRET_KEY])
    ask("getCacheLocation", {**keys, "trace_id": "x" * (limits.TRACE_ID_BYTES_MAX + 1)})
    # Worth a warning, which the handler itself logs.
    group = {**bootstrap_document(tmp_path)["instance_groups"][0], "name": "more"}
    group["storage_candidates"] = ["s1", "not-there"]
    ask("createInstanceGroup", {"trace_id": "adding", "instance_group": group}, admin)
    ask("addAccount", {"user_name": "u", "password": "hunter2"}, admin)
    ask("updateLogger", {"module_name": "access", "log_level": "warn"}, admin)
    served.post("getInstanceInfo", {"instance_id": "i", "trace_id": "unseen"})
    ask("getInstanceInfo", {"instance_id": "none", "trace_id": "failed"})
    ask("updateLogger", {"module_name": "access", "log_level": "info", "trace_id": "up"}, admin)
    served.process.send_signal(signal.SIGTERM)
    code, _, err = served.ended()
    assert code == 0, err

    entries = [json.loads(line) for line in err.splitlines()]
    calls = [entry for entry in entries if entry["logger"] == "kvcm.access"]
    told = [(c["api"], c["code"] == "OK", c["keys"]) for c in calls]
    assert told[:4] == [
        ("RegisterInstance", True, 0),
        ("StartWriteCache", True, 2),
        ("FinishWriteCache", True, 0),
        ("GetCacheLocation", False, 1),
    ]
    assert [c["reason"] for c in calls[4:6]] == ["MalformedRequest"] * 2
    assert (calls[6]["code"], len(calls[6]["request_id"])) == ("INVALID_ARGUMENT", 1_024)
    after = [c["request_id"] for c in calls]
    assert "unseen" not in after
    assert after[-2:] == ["failed", "up"]
    within = [e for e in entries if e.get("request_id") == "adding" and e not in calls]
    assert any("not-there" in entry["message"] for entry in within), err
    for secret in (str(SECRET_KEY)[:-1], "hunter2"):
        assert secret not in err
