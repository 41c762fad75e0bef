"""kvcm top: the frame from two looks, what fits on a terminal, and a real manager."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console

from kvcm.cli.top import watch
from kvcm.cli.top_frame import Counts, Rates, Sample, Wanted, frame
from kvcm.cli.top_metrics import samples
from kvcm.cli.top_source import Source, counts_of
from kvcm.cli.top_view import Lost, View, fit, shares
from kvcm.client import AdminClient, AsyncClient, Client
from kvcm.client.file_sdk import FileSdk
from kvcm.client.types import ClusterInfo, Health, Metric
from kvcm.core.clock import SystemClock
from kvcm.core.errors import Unavailable
from kvcm.core.types import StorageStatus, StorageType
from kvcm.testing.clock import SimClock
from kvcm.testing.eventually import eventually_sync

KEY = ("g", "i")


def entry(size: int = 0, unit: str = "bytes", **more: Any) -> dict[str, Any]:
    limit = {"unit": unit, "capacity": 200, "high": 100, "low": 80}
    return {"counted_bytes": size, "serving_blocks": 3, "open_blocks": 1, "limit": limit, **more}


def storage(name: str = "s", **fields: Any) -> StorageStatus:
    return StorageStatus(global_unique_name=name, type=StorageType.NFS, **fields)


def sample(
    elapsed_s: float = 0.0, counts: dict[tuple[str, str], Counts] | None = None, **fields: Any
) -> Sample:
    usage = {
        "groups": {"g": entry(90), "h": entry(10)},
        "instances": {"i": entry(60, "blocks", group="g"), "j": entry(30, "blocks", group="h")},
        "storages": {"s": entry(100)},
        "sessions": 2,
    }
    made = Sample(
        at_s=1_700_000_000.0 + elapsed_s,
        elapsed_s=elapsed_s,
        cluster=ClusterInfo(0, 0, "node", "node"),
        health=Health(True, True, 0),
        usage=usage,
        ceiling={"scopes": []},
        storages=(storage(health="available"),),
        counts={} if counts is None else counts,
        gauges={"kvcm_start_timestamp_seconds": 1_699_999_000.0},
        free_bytes={"s": 7},
    )
    return replace(made, **fields)


STARTED_ANEW = {"kvcm_start_timestamp_seconds": 1_700_000_001.0}


@pytest.mark.parametrize(
    ("before", "now", "rates"),
    [
        pytest.param(None, sample(2, {KEY: Counts(9)}), Rates(), id="one look"),
        pytest.param(
            sample(0, {KEY: Counts(10, 100, 50, 800, 64, 6)}),
            sample(2, {KEY: Counts(14, 140, 80, 1_280, 128, 26)}),
            Rates(2, 20, 0.75, 240, 32, 10),
            id="counters that rise",
        ),
        pytest.param(
            sample(0, {KEY: Counts(10, 100, 50)}),
            sample(2, {KEY: Counts(10, 100, 50)}),
            Rates(0, 0, None, 0, 0, 0),
            id="nothing asked for has no hit rate",
        ),
        pytest.param(
            sample(0, {("g", "other"): Counts(5)}),
            sample(4, {KEY: Counts(8, 8, 8)}),
            Rates(2, 2, 1, 0, 0, 0),
            id="a new series began at 0",
        ),
        pytest.param(
            sample(0, {KEY: Counts(100)}),
            sample(1, {KEY: Counts(3)}),
            Rates(3, 0, None, 0, 0, 0),
            id="a counter that fell began anew",
        ),
        pytest.param(
            sample(0, {KEY: Counts(1)}),
            sample(2, {KEY: Counts(9)}, gauges=STARTED_ANEW),
            Rates(),
            id="another start",
        ),
        pytest.param(
            sample(0, {KEY: Counts(1)}), sample(0, {KEY: Counts(9)}), Rates(), id="no time passed"
        ),
        pytest.param(sample(0, {}), replace(sample(2), counts=None), Rates(), id="not counting"),
        pytest.param(
            sample(0, {}),
            sample(2, {("g", "other"): Counts(4)}),
            Rates(),
            id="no series of its own",
        ),
    ],
)
def test_rates_are_per_second_between_two_looks_at_one_life_of_a_manager(before, now, rates):
    (found,) = frame(before, now, Wanted(instances=("i",))).instances
    assert found.rates == rates


def test_a_group_sums_all_its_series_and_the_writes_that_its_limits_stopped():
    before = {KEY: Counts(10, 100, 10), ("g", "other"): Counts(1), ("h", "j"): Counts(1)}
    now = {
        KEY: Counts(20, 200, 60),
        ("g", "other"): Counts(3, 100, 100),
        ("g", ""): Counts(limited_writes=8),
        ("h", "j"): Counts(500),
    }
    shown = frame(sample(0, before), sample(2, now), Wanted(groups=("g",)))
    (group,) = shown.groups
    assert group.rates == Rates(6, 100, 0.75, 0, 0, 0, 4)
    assert (group.instances, shown.over_s) == (1, 2)


def test_the_window_chosen_gives_hit_rate_and_ceiling():
    windows = [
        {"window": name, "blocks": blocks, "hit_rate": rate, "ceiling": 2 * rate}
        for name, blocks, rate in (("15m", 5, 0.1), ("1h", 5, 0.2), ("24h", 0, 0.0))
    ]
    scopes = [{"group": "g", "instance": who, "windows": windows} for who in ("", "i")]
    now = sample(ceiling={"scopes": scopes})
    for name, rate, best in (("15m", 0.1, 0.2), ("1h", 0.2, 0.4), ("24h", None, None)):
        shown = frame(None, now, Wanted(window=name))
        for row in (shown.groups[0], shown.instances[0]):
            assert (row.hit_rate, row.ceiling) == (rate, best)
        assert shown.instances[1].ceiling is None


def test_space_is_in_the_unit_of_its_limit_and_seen_against_the_watermark():
    shown = frame(None, sample(), Wanted())
    group, instance = shown.groups[0].space, shown.instances[0].space
    assert (group.used, group.of_mark, group.blocks) == (90, 0.9, 4)
    assert (instance.used, instance.of_mark, instance.bytes) == (4, 0.04, 60)
    no_mark = {"unit": "bytes", "capacity": 200, "high": None, "low": None}
    no_limit = no_mark | {"capacity": None}
    for limit, share in ((no_mark, 0.45), (no_limit, None)):
        now = sample(usage={"groups": {"g": entry(90) | {"limit": limit}}})
        assert frame(None, now, Wanted()).groups[0].space.of_mark == share


@pytest.mark.parametrize(
    ("wanted", "groups", "instances", "notes"),
    [
        (Wanted(), ["g", "h"], ["i", "j"], []),
        (Wanted(groups=("h",)), ["h"], ["j"], []),
        (Wanted(instances=("i",)), ["g"], ["i"], []),
        (Wanted(groups=("h",), instances=("i",)), ["h"], [], []),
        (Wanted(groups=("x",)), [], [], ["no group 'x'"]),
        (Wanted(instances=("x",)), [], [], ["no instance 'x'"]),
    ],
)
def test_groups_and_instances_can_be_chosen(wanted, groups, instances, notes):
    shown = frame(None, sample(), wanted)
    assert [row.group for row in shown.groups] == groups
    assert [row.instance for row in shown.instances] == instances
    assert list(shown.notes) == notes
    assert len(shown.storages) == 1


def test_the_busiest_come_first_and_then_the_largest():
    now = sample(2, {("h", "j"): Counts(1, 10)})
    assert [row.instance for row in frame(sample(0), now, Wanted()).instances] == ["j", "i"]
    assert [row.instance for row in frame(None, now, Wanted()).instances] == ["i", "j"]


@pytest.mark.parametrize(
    ("fields", "state", "reason"),
    [
        ({"health": "available"}, "available", ""),
        ({"health": "suspect"}, "suspect", ""),
        ({"health": "unavailable", "unavailable_reason": "gone"}, "unavailable", "gone"),
        ({"health": "available", "unwritable_reason": "full"}, "only readable", "full"),
        ({"enabled": False, "unavailable_reason": "gone"}, "disabled", ""),
        ({}, "available", ""),
    ],
)
def test_storages_have_a_state_and_its_reason(fields, state, reason):
    (row,) = frame(None, sample(storages=(storage(**fields),)), Wanted()).storages
    assert (row.name, row.state, row.reason, row.free_bytes) == ("s", state, reason, 7)


def test_what_a_manager_does_not_tell_is_said():
    silent = replace(
        sample(),
        cluster=ClusterInfo(0, 0, "node", ""),
        health=Health(False, False, 0),
        storages=None,
        counts=None,
        ceiling=None,
    )
    shown = frame(None, silent, Wanted())
    assert [row.state for row in shown.storages] == ["unknown"]
    text = " ".join(shown.notes)
    for part in ("not ready", "no leader", "does not lead", "no rates", "no ceiling"):
        assert part in text
    anew = frame(sample(0), sample(2, gauges=STARTED_ANEW), Wanted())
    assert anew.notes == ("the manager was started anew",)


def test_counters_are_summed_over_their_other_labels():
    of_i = {"group": "g", "instance_id": "i"}
    metrics = [
        Metric("kvcm_lookups_total", 2, {**of_i, "query": "prefix", "outcome": "full"}),
        Metric("kvcm_lookups_total", 3, {**of_i, "query": "batch", "outcome": "miss"}),
        Metric("kvcm_write_ended_bytes_total", 5, {**of_i, "outcome": "finished"}),
        Metric("kvcm_write_ended_bytes_total", 9, {**of_i, "outcome": "failed"}),
        Metric("kvcm_removed_bytes_total", 7, {**of_i, "reason": "evicted"}),
        Metric("kvcm_removed_bytes_total", 9, {**of_i, "reason": "trimmed"}),
        Metric("kvcm_refused_writes_total", 1, {"group": "g", "reason": "QUOTA_GROUP"}),
        Metric("kvcm_cut_writes_total", 1, {"group": "g", "reason": "QUOTA_TYPE"}),
        Metric("kvcm_ready", 1, {}),
    ]
    assert counts_of(metrics) == {
        KEY: Counts(lookups=5, written_bytes=5, evicted_bytes=7),
        ("g", ""): Counts(limited_writes=2),
    }
    assert counts_of(metrics[-3:]) is None


def test_samples_are_read_from_the_text_that_prometheus_reads():
    tags = {"group": 'a "b", c}', "instance_id": "back\\slash\nline {x="}
    registry = CollectorRegistry()
    lookups = Counter("kvcm_lookups", "Help.", [*tags], registry=registry)
    lookups.labels(**tags).inc(12_345_678_901.5)
    Gauge("kvcm_ready", "Help.", registry=registry).set(1)
    Gauge("kvcm_ready_not_asked_for", "Help.", registry=registry).set(1)
    text = generate_latest(registry).decode() + "kvcm_ready broken\nkvcm_ready\n"
    found = [*samples(text, {"kvcm_lookups_total", "kvcm_ready"})]
    assert found == [
        Metric("kvcm_lookups_total", 12_345_678_901.5, tags),
        Metric("kvcm_ready", 1.0, {}),
    ]


@pytest.mark.parametrize(
    ("lines", "wanted", "given"),
    [
        (20, [1, 5, 2], [1, 5, 2]),
        (9, [2, 50, 1], [2, 6, 1]),
        (9, [50, 50, 50], [3, 3, 3]),
        (8, [50, 50, 50], [3, 3, 2]),
        (0, [4, 0, 4], [1, 0, 1]),
    ],
)
def test_lines_are_shared_by_the_tables(lines, wanted, given):
    assert shares(lines, wanted) == given


@pytest.mark.parametrize(
    ("width", "shown"), [(26, [0, 1, 2]), (25, [0, 2]), (14, [0, 2]), (13, [0]), (1, [0])]
)
def test_the_least_important_columns_go_first(width, shown):
    assert fit([(0, 8), (5, 10), (1, 4)], width) == shown


def drawn(view: View, width: int) -> list[str]:
    console = Console(width=width, color_system=None, highlight=False)
    return ["".join(s.text for s in line) for line in console.render_lines(view, pad=False)]


def test_it_fits_every_terminal():
    usage = dict(sample().usage)
    usage["instances"] = {f"instance-{n:03}": entry(n, "blocks", group="g") for n in range(90)}
    now = sample(
        2, {("g", f"instance-{n:03}"): Counts(10**6, 10**9) for n in range(90)}, usage=usage
    )
    view = View("http://127.0.0.1:6492", frame(sample(0), now, Wanted()))
    for width in (12, 20, 40, 80, 120, 250):
        whole = drawn(view, width)
        assert max(map(len, whole)) <= width
        assert len(whole) == 3 + 3 * 2 + 2 + 90 + 1
    for height in (14, 24, 60):
        console = Console(width=100, height=height, color_system=None)
        options = console.options.update(height=height)
        lines = [*view.__rich_console__(console, options)]
        assert len(lines) == height
        assert f"instance, {height - 12} of 90" in "\n".join(map(str, lines))
    narrow = "\n".join(drawn(view, 40))
    assert "of mark" in narrow
    assert "written/s" not in narrow


def test_names_and_reasons_cannot_move_the_cursor():
    evil = storage(unavailable_reason="a\x1b[2Jb\nc")
    shown = frame(None, sample(storages=(evil,)), Wanted())
    view = View("t", shown, Lost(0.0, "x\x1b]0;y\x07"))
    assert "\x1b" not in "\n".join(drawn(view, 300))
    assert "a [2Jb c" in "\n".join(drawn(view, 300))


class Script:
    """Looks as they are listed; then the loop is over."""

    url = "http://there"

    def __init__(self, clock: SimClock, *looks: Sample | Unavailable) -> None:
        self._clock = clock
        self._looks = [*looks]

    async def look(self) -> Sample:
        if not self._looks:
            raise asyncio.CancelledError
        self._clock.jump(10)
        found = self._looks.pop(0)
        if isinstance(found, Unavailable):
            raise found
        return found


async def test_a_lost_manager_is_shown_with_what_was_known_until_it_is_back():
    clock = SimClock(now=1_000.0)
    down = Unavailable("refused")
    script = Script(clock, down, sample(1), down, down, sample(9, {KEY: Counts(8)}))
    shown: list[View] = []
    watching = asyncio.ensure_future(watch(script, clock, 5.0, Wanted(), shown.append))
    await clock.run(60.0)
    with suppress(asyncio.CancelledError):
        await watching
    first, up, lost, still, back = shown
    assert (first.frame, first.lost) == (None, Lost(1_000.0, "refused"))
    assert up.lost is None
    assert lost.lost == still.lost == Lost(1_030.0, "refused")
    assert lost.frame == still.frame == up.frame
    text = "\n".join(drawn(lost, 80))
    assert "not reachable since 1970-01-01 00:17:10" in text
    assert "below: as of" in text
    assert back.lost is None
    assert back.frame is not None
    assert back.frame.over_s == 8


@pytest.fixture(scope="module")
def url(manager) -> str:
    """Of a manager that has seen traffic."""
    keys = list(range(1, 601))
    with Client(manager.target, timeout=10) as client:
        client.register_instance("default", "watched", 16, {"tp0": 64})
        client.get_cache_location("watched", keys)
        with client.write("watched", keys[:450]) as session:
            session.put(FileSdk(), [{"tp0": b"x" * 64} for _ in keys[:450]])
        assert client.get_cache_location("watched", keys).hits == 450
    return f"http://{manager.host}:{manager.admin_http_port}"


def test_one_frame_of_a_real_manager_for_people_and_for_scripts(kvcm, url):
    found = kvcm.json("top", "--target", url, "--once", "--interval", "0.2")
    assert found["target"] == url
    assert found["is_leader"]
    assert found["leader"] == found["node"] != ""
    (group,) = found["groups"]
    (instance,) = found["instances"]
    assert (group["group"], group["instances"]) == ("default", 1)
    assert (instance["group"], instance["instance"]) == ("default", "watched")
    for row in (group, instance):
        assert row["hit_rate"] == 0.375
        assert row["ceiling"] == pytest.approx(0.5, abs=0.02)
        assert row["rates"]["lookups_per_s"] == 0
        assert row["space"]["bytes"] == 450 * 64
    (there,) = found["storages"]
    assert (there["name"], there["state"]) == ("nfs_01", "available")
    assert there["free_bytes"] > 0
    assert found["notes"] == []

    text = kvcm.ok("top", "--target", url, "--once", "--interval", "0.2")
    for part in ("leader ", "default", "watched", "37.5%", "nfs_01", "available", "of mark"):
        assert part in text
    absent = kvcm.ok("top", "--target", url, "--once", "-i", "0.2", "--group", "nobody")
    assert "no group 'nobody'" in absent
    assert "watched" not in absent


async def test_rates_are_those_of_the_calls_made_between_two_looks(manager, url):
    clock = SystemClock()
    source = Source(url, clock)
    try:
        before = await source.look()
        async with AsyncClient(manager.target, timeout=10) as client:
            for _ in range(3):
                await client.get_cache_location("watched", [*range(1, 101), 7_001, 7_002])
            async with client.write("watched", [7_003, 7_004]) as session:
                await session.put(FileSdk(), [{"tp0": b"x" * 64}] * 2)
        shown = frame(before, await source.look(), Wanted())
    finally:
        await source.close()
    assert shown.over_s is not None
    for row in (*shown.groups, *shown.instances):
        rates = row.rates
        assert rates.hit_rate == pytest.approx(300 / 306)
        per_s = (rates.lookups_per_s, rates.blocks_per_s, rates.saved_tokens_per_s)
        came = [round(rate * shown.over_s, 6) for rate in (*per_s, rates.written_bytes_per_s)]
        assert came == [3, 306, 300 * 16, 128]


def test_a_manager_that_does_not_lead_says_so_and_shows_what_it_knows(kvcm, manager, url):
    with AdminClient(manager.admin_target, timeout=10) as admin:
        admin.update_leader_elector_config(60_000)
        admin.leader_demote()
        try:
            found = kvcm.json("top", "--target", url, "--interval", "0.2")
            text = kvcm.ok("top", "--target", url, "--once", "--interval", "0.2")
        finally:
            admin.update_leader_elector_config(0)
        eventually_sync(lambda: admin.check_health().is_leader, timeout=30)
    assert (found["is_leader"], found["leader"]) == (False, "")
    assert found["notes"][0] == "no leader"
    assert [row["state"] for row in found["storages"]] == ["unknown"]
    assert [row["instance"] for row in found["instances"]] == ["watched"]
    assert "no leader, this is" in text


def test_wrong_command_lines_end_with_one_line(kvcm, manager):
    assert "no manager at" in kvcm.fails("top", "--target", "127.0.0.1:1", "--once")
    assert "admin HTTP port" in kvcm.fails("top", "--target", manager.admin_target, "--once")
    assert "15m, 1h, 24h" in kvcm.fails("top", "--window", "2h", "--once")
    assert "--once" in kvcm.fails("top")
    meta = f"http://{manager.host}:{manager.http_port}"
    assert "404" in kvcm.fails("top", "--target", meta, "--once")


class Terminal:
    """``kvcm top`` on a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self._end, inner = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        command = [sys.executable, "-m", "kvcm.cli.main", "top", *arguments]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment
        )
        os.close(inner)
        self.text = ""

    def read(self) -> str:
        """What came since the last call."""
        came = b""
        while select.select([self._end], [], [], 0)[0]:
            try:
                came += os.read(self._end, 65_536)
            except OSError:
                break
        text = re.sub(r"\x1b\[[0-9;]*m", "", came.decode(errors="replace"))
        self.text += text
        return text

    def close(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_goes_on_when_a_lost_manager_is_back_and_ends_cleanly(manager, url, number):
    terminal = Terminal("--target", url, "--interval", "0.2")
    try:
        eventually_sync(lambda: "watched" in terminal.read(), timeout=60)
        if number == signal.SIGINT:
            manager.process.send_signal(signal.SIGSTOP)
            try:
                eventually_sync(lambda: "not reachable since" in terminal.read(), timeout=60)
            finally:
                manager.process.send_signal(signal.SIGCONT)
            eventually_sync(lambda: "leader " in terminal.read(), timeout=60)
        terminal.process.send_signal(number)
        assert terminal.process.wait(30) == 0
        terminal.read()
        assert "Traceback" not in terminal.text
        assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") == 1
        assert terminal.text.endswith("\x1b[?25h\x1b[?1049l")
    finally:
        terminal.close()
