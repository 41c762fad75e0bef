"""Trace events of a real manager: its files, and ``GET /v1/events``."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from manager_harness import ANY_PORTS, INSTANCE, bootstrap_document, settings_in

from kvcm.observability import trace_files
from kvcm.server import event_routes
from kvcm.server.lifecycle import Manager
from kvcm.testing.eventually import eventually, eventually_sync

TIMEOUT_S = 60.0
RECORD = ("--set", "trace_events.enabled=true")


# ---- a process of its own ----------------------------------------------------------------------


class Served:
    """``kvcm serve`` with a group of 60 bytes: above 45 eviction leaves at most 42."""

    def __init__(self, folder: Path) -> None:
        document = bootstrap_document(folder / "blocks")
        group = document["instance_groups"][0]
        group["quota"] = {"capacity": 60}
        group["cache_config"] = {
            "reclaim_strategy": {
                "trigger_strategy": {"used_percentage": 0.75},
                "low_percentage": 0.7,
            }
        }
        bootstrap = folder / "bootstrap.json"
        bootstrap.write_text(json.dumps(document))
        self.events = folder / "data" / "events"
        ready_file = folder / "ready.json"
        ports = [f"--{name.replace('_', '-')}=0" for name in ANY_PORTS]
        options = [f"--data-dir={folder / 'data'}", f"--bootstrap={bootstrap}", *RECORD]
        options.append(f"--ready-file={ready_file}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvcm.cli.main", "serve", *ports, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

        def ready() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return ready_file.exists()

        eventually_sync(ready, timeout=TIMEOUT_S)
        self.ready: dict[str, Any] = json.loads(ready_file.read_text())
        self.http = httpx.Client(timeout=TIMEOUT_S)
        self.post("registerInstance", INSTANCE)

    def post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.ready['http_port']}/api/{method}"
        answer: dict[str, Any] = self.http.post(url, json=body).json()
        return answer

    def start(self, keys: list[int]) -> str:
        answer = self.post("startWriteCache", {"instance_id": "i", "block_keys": keys})
        session: str = answer["write_session_id"]
        return session

    def finish(self, session: str, mask: dict[str, Any]) -> None:
        body = {"instance_id": "i", "write_session_id": session, "success_blocks": mask}
        assert self.post("finishWriteCache", body)["header"]["status"]["code"] == "OK"

    def lookup(self, keys: list[int], **fields: Any) -> None:
        query = {"query_type": "QT_PREFIX_MATCH", **fields}
        self.post("getCacheLocation", {"instance_id": "i", "block_keys": keys, **query})

    def recorded(self) -> list[dict[str, Any]]:
        paths = trace_files.paths(self.events)
        return [event for path in paths for event in trace_files.read(path)]


class Reader(threading.Thread):
    """Reads the stream of a served manager until it ends."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{served.ready['admin_http_port']}/v1/events"
        self.found: list[dict[str, Any]] = []
        self.subscribed = threading.Event()

    def run(self) -> None:
        with httpx.stream("GET", self._url, timeout=TIMEOUT_S) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line == "event: Subscribed":
                    self.subscribed.set()
                if line.startswith('data: {"id"'):
                    self.found.append(json.loads(line.removeprefix("data: ")))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.http.close()
    if made.process.poll() is None:
        made.process.kill()
    made.process.communicate()


@pytest.mark.slow
def test_a_scenario_is_recorded_and_streamed_event_by_event(served: Served) -> None:
    reader = Reader(served)
    reader.start()
    assert reader.subscribed.wait(TIMEOUT_S)
    served.lookup([1, 2], block_mask={"offset": 1})
    first = served.start([1, 2])
    served.finish(first, {"offset": 2})
    served.lookup([1, 2, 3])
    second = served.start([1, 2, 3, 4])
    served.finish(second, {"bool_masks": {"values": [True, False]}})
    # Over the mark: eviction begins.
    third = served.start([5, 6])
    eventually_sync(
        lambda: any(e["type"] == "CacheReclaimSubmit" for e in reader.found), timeout=TIMEOUT_S
    )
    served.finish(third, {"offset": 2})
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(TIMEOUT_S) == 0
    reader.join(TIMEOUT_S)
    assert not reader.is_alive()

    assert served.recorded() == reader.found
    times = [event.pop("trigger_time_us") for event in reader.found]
    assert times == sorted(times)
    runs = [event.pop("id").split("-") for event in reader.found]
    assert [number for _, number in runs] == [str(i + 1) for i in range(len(runs))]
    assert len({run for run, _ in runs}) == 1
    for event in reader.found:
        assert event.pop("source") == "i"
        assert event.pop("instance_group") == "default"
        assert event.pop("block_size") == 4

    def lookup(keys: list[int], mask: dict[str, Any], asked: int, hits: int) -> dict[str, Any]:
        return {
            "component": "cache",
            "type": "GetCacheLocation",
            "query_type": "QT_PREFIX_MATCH",
            "keys": keys,
            "tokens": [],
            "block_mask": mask,
            "sw_size": 0,
            "asked_blocks": asked,
            "hit_blocks": hits,
        }

    def start(session: str, keys: list[int], have: int) -> dict[str, Any]:
        granted = len(keys) - have
        return {
            "component": "cache",
            "type": "StartWriteCache",
            "write_session_id": session,
            "keys": keys,
            "tokens": [],
            "block_mask": {"offset": have},
            "granted_blocks": granted,
            "bytes": 10 * granted,
            "storage": "s1",
        }

    def finish(session: str, mask: dict[str, Any], keys: list[int]) -> dict[str, Any]:
        return {
            "component": "cache",
            "type": "FinishWriteCache",
            "write_session_id": session,
            "success_block": mask,
            "keys": keys,
            "published_blocks": len(keys),
            "bytes": 10 * len(keys),
            "reason": "finished",
            "storage": "s1",
        }

    assert reader.found == [
        lookup([1, 2], {"offset": 1}, 1, 0),
        start(first, [1, 2], 0),
        finish(first, {"offset": 2}, [1, 2]),
        lookup([1, 2, 3], {}, 3, 2),
        start(second, [1, 2, 3, 4], 2),
        finish(second, {"offset": 1}, [3]),
        start(third, [5, 6], 0),
        {
            "component": "reclaimer",
            "type": "CacheReclaimSubmit",
            "keys": [3],
            "blocks": 1,
            "bytes": 10,
            "reason": "evicted",
            "policy": "lru",
            "storage": "s1",
            "was_open": False,
        },
        finish(third, {"offset": 2}, [5, 6]),
    ]


@pytest.mark.slow
def test_after_a_kill_all_but_the_last_events_are_there(served: Served) -> None:
    for i in range(200):
        served.lookup([i])
        if i == 100:
            eventually_sync(lambda: len(served.recorded()) > 50, timeout=TIMEOUT_S)
    served.process.kill()
    served.process.wait(TIMEOUT_S)
    found = served.recorded()
    assert [event["keys"] for event in found] == [[i] for i in range(len(found))]
    assert len(found) > 50


# ---- in this process -----------------------------------------------------------------------------


class InProcess:
    """A manager with its real cache, in this process."""

    def __init__(self, manager: Manager, http: httpx.AsyncClient) -> None:
        self.manager = manager
        self.http = http

    @property
    def subscribers(self) -> int:
        assert self.manager._events is not None
        return len(self.manager._events.stream.subscribers)

    @property
    def dropped(self) -> int:
        assert self.manager._events is not None
        return self.manager._events.stream.dropped

    @property
    def connections(self) -> int:
        """Of the admin port."""
        return len(self.manager._http[-1]._server.server_state.connections)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.manager.ports.admin_http}/v1/events"

    async def post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.manager.ports.http}/api/{method}"
        answer: dict[str, Any] = (await self.http.post(url, json=body)).json()
        assert answer["header"]["status"]["code"] == "OK", answer
        return answer

    async def metric(self, series: str) -> float:
        text = (await self.http.get(self.url.replace("/v1/events", "/metrics"))).text
        (line,) = [line for line in text.splitlines() if line.startswith(f"{series} ")]
        return float(line.split()[1])

    async def lookup(self, instance: str, keys: list[int]) -> None:
        query = {"instance_id": instance, "block_keys": keys, "query_type": "QT_PREFIX_MATCH"}
        await self.post("getCacheLocation", query)

    @asynccontextmanager
    async def stream(self, **filters: Any) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        async with self.http.stream("GET", self.url, params=filters) as response:
            assert response.status_code == 200
            events = parsed(response)
            assert await anext(events) == ("Subscribed", {})
            yield events

    def stalled(self) -> socket.socket:
        """A connection that asks for the stream and never reads."""
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(("127.0.0.1", self.manager.ports.admin_http))
        made.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        return made


async def parsed(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[InProcess]:
    made = Manager(settings_in(tmp_path, drain_s=60))
    await made.start()
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        running = InProcess(made, http)
        for name in ("i", "j"):
            await running.post("registerInstance", {**INSTANCE, "instance_id": name})
        yield running
        await made.stop()


async def test_a_stream_is_filtered_by_instance_and_type(manager: InProcess) -> None:
    async with (
        manager.stream(instance=["j"]) as of_j,
        manager.stream(instance=["i", "j"], type="StartWriteCache") as starts,
    ):
        await manager.lookup("i", [1])
        await manager.lookup("j", [2])
        await manager.post("startWriteCache", {"instance_id": "i", "block_keys": [3]})
        name, event = await anext(of_j)
        assert (name, event["source"], event["keys"]) == ("GetCacheLocation", "j", [2])
        name, event = await anext(starts)
        assert (name, event["source"], event["keys"]) == ("StartWriteCache", "i", [3])


async def test_what_cannot_be_streamed_is_refused_with_a_reason(
    manager: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = await manager.http.get(manager.url, params={"type": "Nothing"})
    assert wrong.status_code == 400
    assert "'Nothing' is not one of" in wrong.json()["header"]["status"]["message"]
    many = await manager.http.get(manager.url, params={"instance": ["x"] * 257})
    assert many.status_code == 422
    monkeypatch.setattr("kvcm.observability.event_stream.EVENT_SUBSCRIBERS_MAX", 1)
    async with manager.stream(instance=["x"] * 256):
        refused = await manager.http.get(manager.url)
        assert refused.status_code == 503
        assert "1 subscribers" in refused.json()["header"]["status"]["message"]


async def test_a_subscriber_that_leaves_leaves_nothing_behind(manager: InProcess) -> None:
    assert manager.manager._events is not None
    watchers = manager.manager._events._watchers
    before = list(watchers)
    async with manager.stream(), manager.stream():
        assert manager.subscribers == 2
        assert len(watchers) == len(before) + 1
    await eventually(lambda: manager.subscribers == 0)
    assert watchers == before


async def test_a_stream_without_news_is_kept_alive(
    manager: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_routes, "HEARTBEAT_S", 0.01)
    async with manager.http.stream("GET", manager.url) as response:
        lines = response.aiter_lines()
        while await anext(lines) != ": nothing new":
            pass


async def test_a_stalled_subscriber_loses_events_and_delays_nobody(
    manager: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcm.observability.event_stream.SUBSCRIBER_QUEUE_BYTES_MAX", 1 << 17)
    keys = list(range(1 << 40, (1 << 40) + 5_000))
    with manager.stalled():
        await eventually(lambda: manager.subscribers == 1)
        async with manager.stream() as events:
            seen = 0
            # Socket buffers hold some; then its queue fills.
            while not manager.dropped:
                await manager.lookup("i", keys)
                name, event = await anext(events)
                assert (name, len(event["keys"])) == ("GetCacheLocation", 5_000)
                seen += 1
            assert seen > 1
        assert await manager.metric("kvcm_event_subscribers") == 1
        assert await manager.metric("kvcm_event_stream_dropped_total") == manager.dropped
        assert await manager.metric('kvcm_trace_events_total{outcome="dropped"}') == 0
    await eventually(lambda: manager.subscribers == 0)


async def test_a_subscriber_that_takes_nothing_is_let_go(
    manager: InProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_routes, "SEND_S_MAX", 0.2)
    keys = list(range(1 << 40, (1 << 40) + 10_000))
    with manager.stalled():
        await eventually(lambda: manager.subscribers == 1)
        async with asyncio.timeout(TIMEOUT_S):
            while manager.subscribers:
                await manager.lookup("i", keys)
        await eventually(lambda: manager.connections == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_manager_that_stops_ends_its_streams_at_once(
    manager: InProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvcm.observability.event_stream.SUBSCRIBER_QUEUE_BYTES_MAX", 1 << 18)
    keys = list(range(1 << 40, (1 << 40) + 10_000))
    with manager.stalled():
        await eventually(lambda: manager.subscribers == 1)
        while not manager.dropped:
            await manager.lookup("i", keys)
        # What happened to "i" may still be on its way to those who ask for it.
        async with manager.stream(instance="quiet") as events:
            # A drain lasts a minute here.
            async with asyncio.timeout(20):
                await manager.manager.stop()
            assert [event async for event in events] == []
    assert manager.subscribers == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
