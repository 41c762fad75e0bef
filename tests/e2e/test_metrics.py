"""What a real manager counts, against a script of which every number is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_harness import PATIENCE_S, STORAGE, Site
from prometheus_client.parser import text_string_to_metric_families

from kvcm.testing.eventually import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK_TOKENS, BLOCK_BYTES = 4, 10
Sample = tuple[str, frozenset[tuple[str, str]]]
# The manager's own rhythm, which goes on without any call.
RHYTHM = ("kvcm_loop_", "kvcm_event_loop_", "kvcm_storage_probe_seconds")
METRICS_SETTINGS = (
    "cache.room_wait_s=0",
    "cache.grace_s_min=0.2",
    "metrics.instances_max=4",
    "repair.scrub_per_second=0",
)


def group(name: str, capacity: int, used_percentage: float) -> dict[str, Any]:
    return {
        "name": name,
        "storage_candidates": [STORAGE],
        "quota": {"capacity": capacity},
        "cache_config": {
            "reclaim_strategy": {"trigger_strategy": {"used_percentage": used_percentage}}
        },
    }


class Script:
    """A manager, and calls of it."""

    def __init__(self, folder: Path) -> None:
        root = folder / "blocks"
        document = {
            "storages": [
                {
                    "global_unique_name": STORAGE,
                    "nfs": {"root_path": str(root), "key_count_per_file": 8},
                }
            ],
            "instance_groups": [
                group("roomy", 1 << 30, 2.0),
                group("full", BLOCK_BYTES - 1, 2.0),
                group("evicting", 6 * BLOCK_BYTES, 0.5),
            ],
        }
        self.site = Site(folder, root=root, document=document)
        self.site.start(settings=METRICS_SETTINGS)
        self.http = httpx.Client(timeout=PATIENCE_S)

    def close(self) -> None:
        self.http.close()
        self.site.kill()

    def post(self, method: str, *, admin: bool = False, **body: Any) -> dict[str, Any]:
        port = self.site.ready["admin_http_port" if admin else "http_port"]
        url = f"http://127.0.0.1:{port}/api/{method}"
        answer: dict[str, Any] = self.http.post(url, json={"trace_id": "t", **body}).json()
        return answer

    def register(self, instance: str, group: str) -> None:
        answer = self.post(
            "registerInstance",
            instance_group=group,
            instance_id=instance,
            block_size=BLOCK_TOKENS,
            location_spec_infos=[{"name": "tp0", "size": BLOCK_BYTES}],
        )
        assert answer["header"]["status"]["code"] == "OK"

    def lookup(self, instance: str, keys: list[int]) -> int:
        answer = self.post(
            "getCacheLocation", instance_id=instance, query_type="QT_PREFIX_MATCH", block_keys=keys
        )
        return len(answer["locations"])

    def start(self, instance: str, keys: list[int], **more: Any) -> dict[str, Any]:
        return self.post("startWriteCache", instance_id=instance, block_keys=keys, **more)

    def write(self, instance: str, keys: list[int], lost: int = 0) -> None:
        session = self.start(instance, keys)["write_session_id"]
        success = [True] * (len(keys) - lost) + [False] * lost
        self.post(
            "finishWriteCache",
            instance_id=instance,
            write_session_id=session,
            success_blocks={"bool_masks": {"values": success}},
        )

    def scrape(self) -> dict[Sample, float]:
        url = f"http://127.0.0.1:{self.site.ready['admin_http_port']}/metrics"
        families = text_string_to_metric_families(self.http.get(url).text)
        return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}

    def value(self, name: str, **labels: str) -> float:
        return self.scrape().get((name, frozenset(labels.items())), 0.0)

    def asked(self) -> dict[Sample, float]:
        """The same by GetMetrics; whole numbers are strings in JSON."""
        found = {}
        for metric in self.post("getMetrics", admin=True)["metrics"]:
            labels = {tag["tag_key"]: tag["tag_value"] for tag in metric["metric_tags"]}
            (value,) = metric["metric_value"].values()
            found[metric["metric_name"], frozenset(labels.items())] = float(value)
        return found


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    made = Script(tmp_path)
    yield made
    made.close()


def counters(samples: dict[Sample, float]) -> dict[Sample, float]:
    return {s: v for s, v in samples.items() if s[0].endswith("_total")}


def increments(before: dict[Sample, float], after: dict[Sample, float]) -> dict[str, float]:
    """By name and label values, in the order of the labels' names."""
    moved = {s: v - before.get(s, 0.0) for s, v in counters(after).items()}
    return {
        f"{name} {' '.join(value for _, value in sorted(labels))}".strip(): amount
        for (name, labels), amount in moved.items()
        if amount
    }


EXPECTED = {
    # Ten lookups: 6 found 8 of 8 blocks, 2 found 4 of 8, 2 none of 4.
    "kvcm_lookups_total roomy i full prefix": 6,
    "kvcm_lookups_total roomy i partial prefix": 2,
    "kvcm_lookups_total roomy i miss prefix": 2,
    "kvcm_lookup_blocks_total roomy i prefix": 72,
    "kvcm_lookup_hit_blocks_total roomy i prefix": 56,
    "kvcm_lookup_missed_blocks_total roomy i prefix": 16,
    "kvcm_lookup_tokens_total roomy i prefix": 72 * BLOCK_TOKENS,
    "kvcm_lookup_hit_tokens_total roomy i prefix": 56 * BLOCK_TOKENS,
    "kvcm_lookup_hit_ratios_total roomy i prefix": 7.0,
    "kvcm_read_cache_uses_total": 8,
    # Once written it is read once.
    "kvcm_read_cache_misses_total": 1,
    # Sessions of 8 blocks; of 4, of which 2 were not written; of 2 that expired; and of none.
    "kvcm_write_starts_total blocks roomy i": 3,
    "kvcm_write_starts_total nothing roomy i": 1,
    "kvcm_write_granted_blocks_total roomy i": 14,
    "kvcm_write_granted_bytes_total roomy i": 14 * BLOCK_BYTES,
    "kvcm_write_ends_total roomy finished i": 2,
    "kvcm_write_ends_total roomy expired i": 1,
    "kvcm_write_ended_blocks_total roomy i finished": 10,
    "kvcm_write_ended_bytes_total roomy i finished": 10 * BLOCK_BYTES,
    "kvcm_write_ended_blocks_total roomy i failed": 2,
    "kvcm_write_ended_bytes_total roomy i failed": 2 * BLOCK_BYTES,
    "kvcm_write_ended_blocks_total roomy i expired": 2,
    "kvcm_write_ended_bytes_total roomy i expired": 2 * BLOCK_BYTES,
    # One block removed by call.
    "kvcm_removed_blocks_total roomy i removed": 1,
    "kvcm_removed_bytes_total roomy i removed": BLOCK_BYTES,
    # 3 blocks refused by quota.
    "kvcm_refused_writes_total full QUOTA_GROUP": 1,
    "kvcm_write_refused_blocks_total full f QUOTA_GROUP": 3,
    # 4 blocks written over the watermark, and evicted.
    "kvcm_write_starts_total blocks evicting e": 1,
    "kvcm_write_granted_blocks_total evicting e": 4,
    "kvcm_write_granted_bytes_total evicting e": 4 * BLOCK_BYTES,
    "kvcm_write_ends_total evicting finished e": 1,
    "kvcm_write_ended_blocks_total evicting e finished": 4,
    "kvcm_write_ended_bytes_total evicting e finished": 4 * BLOCK_BYTES,
    "kvcm_removed_blocks_total evicting e evicted": 4,
    "kvcm_removed_bytes_total evicting e evicted": 4 * BLOCK_BYTES,
    "kvcm_calls_total GetCacheLocation OK": 10,
    "kvcm_calls_total StartWriteCache OK": 5,
    "kvcm_calls_total StartWriteCache REACH_MAX_ENTITY_CAPACITY": 1,
    "kvcm_calls_total FinishWriteCache OK": 3,
    "kvcm_calls_total RemoveCache OK": 1,
}


def test_every_counter_moves_by_what_happened_and_rests_when_nothing_does(script: Script) -> None:
    for instance, its_group in (("i", "roomy"), ("f", "full"), ("e", "evicting")):
        script.register(instance, its_group)
    before = script.scrape()
    _play(script)
    after = script.scrape()
    assert increments(before, after) == EXPECTED
    hit = frozenset({"api": "GetCacheLocation", "outcome": "ok", "keys": "1-16"}.items())
    assert after["kvcm_call_seconds_count", hit] == 10
    _rests(script)
    _api_tells_the_same(script)
    script.post("removeInstance", admin=True, instance_group="roomy", instance_id="i")
    assert not [s for s in script.scrape() if ("instance_id", "i") in s[1]]


def test_instances_that_come_and_go_leave_no_series_behind(script: Script) -> None:
    """More of them than have series of their own."""
    _come_and_go(script, "first")
    script.register("stays", "roomy")
    script.write("stays", [1, 2])
    assert script.lookup("stays", [1, 2]) == 2
    before = _series(script)
    for i in range(12):
        _come_and_go(script, f"i{i}")
    eventually_sync(lambda: _series(script) == before, timeout=PATIENCE_S)


def _come_and_go(script: Script, instance: str) -> None:
    script.register(instance, "roomy")
    script.write(instance, [1, 2])
    assert script.lookup(instance, [1, 2]) == 2
    script.post("removeInstance", admin=True, instance_group="roomy", instance_id=instance)


def _series(script: Script) -> set[Sample]:
    """But for operations of the index store, which are as many as there are."""
    return {s for s in script.scrape() if not s[0].startswith("kvcm_store_call_seconds")}


def _play(script: Script) -> None:
    eight = list(range(1, 9))
    script.write("i", eight)
    assert script.start("i", eight)["locations"] == []
    for _ in range(6):
        assert script.lookup("i", eight) == 8
    for far in (100, 200):
        assert script.lookup("i", [1, 2, 3, 4, far, far + 1, far + 2, far + 3]) == 4
        assert script.lookup("i", [far, far + 1, far + 2, far + 3]) == 0
    script.write("i", [301, 302, 303, 304], lost=2)
    script.start("i", [401, 402], write_timeout_seconds=1)
    script.post("removeCache", instance_id="i", block_keys=[8])
    refused = script.start("f", [1, 2, 3])["header"]["status"]
    assert refused["code"] == "REACH_MAX_ENTITY_CAPACITY"
    script.write("e", [1, 2, 3, 4])
    evicted = {"group": "evicting", "instance_id": "e", "reason": "evicted"}
    expired = {"group": "roomy", "instance_id": "i", "how": "expired"}
    for name, labels in (
        ("kvcm_removed_blocks_total", evicted),
        ("kvcm_write_ends_total", expired),
    ):
        eventually_sync(
            lambda name=name, labels=labels: script.value(name, **labels) > 0, timeout=PATIENCE_S
        )


def _rests(script: Script) -> None:
    rounds = {"loop": "trash", "outcome": "ok"}
    count = "kvcm_loop_round_seconds_count"
    before = script.scrape()
    goal = before[count, frozenset(rounds.items())] + 5
    eventually_sync(lambda: script.value(count, **rounds) >= goal, timeout=PATIENCE_S)
    after = script.scrape()
    assert increments(before, after) == {}
    assert {s for s in before if not s[0].startswith(RHYTHM)} == {
        s for s in after if not s[0].startswith(RHYTHM)
    }


def _api_tells_the_same(script: Script) -> None:
    script.asked()
    asked, scraped = script.asked(), script.scrape()
    pinned = {s for s in asked if s[0] in ("service.query_counter", "service.query_rt_us")}
    assert len(pinned) >= 10
    assert asked.keys() - pinned == scraped.keys()
    for sample, value in scraped.items():
        if not sample[0].startswith(RHYTHM) and ("api", "GetMetrics") not in sample[1]:
            assert asked[sample] == pytest.approx(value), sample
