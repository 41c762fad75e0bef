"""``/v1/ceiling`` and its metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from manager_harness import settings_in
from prometheus_client import CollectorRegistry, generate_latest

from kvcm.core.clock import SystemClock
from kvcm.core.keys import KeyBatch
from kvcm.observability.causes import Fate
from kvcm.observability.ceiling import Ceilings
from kvcm.observability.ceiling_report import CAUSE_NAMES
from kvcm.server import ceiling_routes
from kvcm.server.ceiling_metrics import CeilingMetrics
from kvcm.server.lifecycle import Manager
from kvcm.testing.clock import SimClock


@pytest.fixture
async def ceilings() -> Ceilings:
    made = Ceilings(SimClock())
    made.follow("c", {"u": ("i", "g")}, {"g": None})
    batch = KeyBatch.from_ints(range(10))
    made.asked("u", "g", batch, 0, 0)
    made.became("u", "g", KeyBatch.from_ints(range(4)), Fate.EVICTED, 1 << 30)
    made.asked("u", "g", batch, 0, 4)
    return made


async def test_hit_rate_ceiling_and_causes_are_shown(ceilings: Ceilings) -> None:
    app = FastAPI()
    ceiling_routes.add(app, ceilings)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        shown = (await http.get("/v1/ceiling")).json()
    group, instance = shown.pop("scopes")
    assert shown == {
        "at": SimClock().now(),
        "since": SimClock().now(),
        "sample_weight": 1,
        "uncounted_events": 0,
        "instances_without_windows": 0,
    }
    assert (group["group"], group["instance"]) == ("g", "")
    assert (instance["group"], instance["instance"]) == ("g", "i")
    assert group["windows"] == instance["windows"]
    assert [window["window"] for window in group["windows"]] == ["15m", "1h", "24h"]
    for window in group["windows"]:
        assert (window["requests"], window["blocks"], window["hits"]) == (2, 20, 4)
        assert (window["hit_rate"], window["distinct"]) == (0.2, 10)
        assert window["ceiling"] == pytest.approx(0.5, abs=1e-3)
        assert window["gap"] == pytest.approx(0.3, abs=1e-3)
        assert window["is_exact"]
        assert {c: n for c, n in window["misses"].items() if n} == {"new": 10, "never_written": 6}
        assert set(window["misses"]) == set(CAUSE_NAMES)
        assert window["advice"]["help"] == "unknown"


async def test_metrics_are_the_report_and_go_with_their_instance(ceilings: Ceilings) -> None:
    registry = CollectorRegistry()
    registry.register(CeilingMetrics(ceilings))
    empty = generate_latest(registry)
    await ceilings.run_once(SimClock().monotonic())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("kvcm_group_window_hit_ratio", group="g", window="1h") == 0.2
    assert value("kvcm_group_window_blocks", group="g", window="24h") == 20
    labels = {"group": "g", "instance_id": "i", "window": "24h"}
    assert value("kvcm_instance_window_ceiling_ratio", **labels) == pytest.approx(0.5, abs=1e-3)
    assert value("kvcm_instance_window_misses", cause="never_written", **labels) == 6
    assert value("kvcm_instance_window_misses", cause="evicted", **labels) == 0
    assert value("kvcm_instance_window_more_space_bytes", **labels) == 0
    assert value("kvcm_ceiling_sample_weight") == 1
    assert value("kvcm_ceiling_uncounted_events_total") == 0
    ceilings.follow("c", {}, {})
    await ceilings.refresh()
    assert generate_latest(registry) == empty


async def test_a_manager_counts_and_keeps_its_windows_over_a_restart(tmp_path: Path) -> None:
    async with httpx.AsyncClient(timeout=10) as http:
        for start in (1, 2):
            manager = Manager(settings_in(tmp_path, index_url=""))
            await manager.start()
            try:
                await manager.wait_ready()
                meta = f"http://127.0.0.1:{manager.ports.http}/api/"
                if start == 1:
                    await http.post(
                        meta + "registerInstance",
                        json={
                            "trace_id": "t",
                            "instance_group": "default",
                            "instance_id": "i",
                            "block_size": 4,
                            "location_spec_infos": [{"name": "tp0", "size": 10}],
                        },
                    )
                asked = {"trace_id": "t", "instance_id": "i", "block_keys": [1, 2, 3]}
                answer = await http.post(
                    meta + "getCacheLocation", json={**asked, "query_type": "QT_PREFIX_MATCH"}
                )
                assert answer.json()["header"]["status"]["code"] == "OK"
                admin = f"http://127.0.0.1:{manager.ports.admin_http}"
                shown = (await http.get(f"{admin}/v1/ceiling")).json()
                assert [s["instance"] for s in shown["scopes"]] == ["", "i"]
                day = shown["scopes"][1]["windows"][2]
                assert (day["requests"], day["blocks"]) == (start, 3 * start)
                assert (day["misses"]["new"], day["misses"]["never_written"]) == (3, 3 * start - 3)
            finally:
                await manager.stop()


async def test_a_manager_without_it_has_no_path_and_no_file(tmp_path: Path) -> None:
    manager = Manager(settings_in(tmp_path, **{"ceiling.enabled": False}), SystemClock())
    await manager.start()
    try:
        async with httpx.AsyncClient(timeout=10) as http:
            admin = f"http://127.0.0.1:{manager.ports.admin_http}"
            assert (await http.get(f"{admin}/v1/ceiling")).status_code == 404
            assert "kvcm_ceiling" not in (await http.get(f"{admin}/metrics")).text
    finally:
        await manager.stop()
    assert not (tmp_path / "data" / "ceiling.bin").exists()
