"""kvcm replay with real engine processes against a manager that can be bent."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from kvcm.cli.main import build_app
from kvcm.cli.replay import parse_speed
from kvcm.core.errors import InvalidArgument
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS, ceiling
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows
from kvcm.testing.eventually import eventually_sync
from tests.optimizer.fake_manager import FakeManager, serve

# The engines' processes start with imports of about a second, on two cores for all tests.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def manager(tmp_path):
    root = tmp_path / "blocks"
    root.mkdir()
    return FakeManager(root)


@pytest.fixture
def target(manager):
    with serve(manager) as (address, _):
        yield address


def trace(tmp_path: Path, requests: int = 60) -> tuple[Path, object]:
    rows = generate(WorkloadKind.CHAT, requests, 3)
    path = tmp_path / "sample.jsonl"
    with path.open("wb") as file:
        write_rows(file, rows, block_size=TRACE_BLOCK_TOKENS)
    return path, ceiling(row.hash_ids for row in rows)


# A shell's background job hands down that Ctrl-C is ignored.
CTRL_C_HEARD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvcm.cli.main import app_main
app_main()
"""


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CTRL_C_HEARD, "replay", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*arguments: object) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


def run_json(*arguments: object) -> tuple[int, dict]:
    code, out, err = run(*arguments, "--json")
    assert out, err
    return code, json.loads(out)


def test_one_worker_reaches_the_ceiling_exactly_and_reads_back_what_it_wrote(
    tmp_path, manager, target
):
    path, best = trace(tmp_path)
    code, report = run_json(path, "-t", target, "--block-bytes", "100")
    assert code == 0
    assert report["requests"] == 60
    assert report["hit_rate"] == {name: report["ceiling"][name] for name in ("blocks", "requests")}
    blocks = report["blocks"]
    assert blocks["asked"] == best.blocks == blocks["hit"] + blocks["written"]
    assert blocks["written"] == best.distinct
    assert report["bytes_read"] == blocks["hit"] * 100
    assert report["latency_ms"]["lookup"]["count"] == 60
    (registered,) = manager.registered
    assert registered.instance_id == "replay-sample"
    assert registered.instance_group == "default"
    assert registered.block_size == 512


def test_several_engines_share_the_rows_and_take_each_once(tmp_path, manager, target):
    path, _ = trace(tmp_path, 80)
    code, report = run_json(path, "-t", target, "--workers", "3", "--skip", "10", "--limit", "60")
    assert code == 0
    assert report["requests"] == 60
    assert manager.lookups == 60
    assert report["blocks"]["wrong"] == 0
    assert report["hit_rate"]["blocks"] <= report["ceiling"]["blocks"]


def test_people_get_a_table(tmp_path, target):
    path, _ = trace(tmp_path, 10)
    code, out, err = run(path, "-t", target)
    assert code == 0
    for words in ("blocks looked up", "hit rate, by blocks", "ceiling", "p99", "0 wrong bytes"):
        assert words in out
    assert err == ""


def test_bytes_of_another_block_fail_the_run_and_are_shown(tmp_path, manager, target):
    path, _ = trace(tmp_path, 60)
    manager.bend_uri = lambda key, uri: manager.serving[0] if key == 1 else uri
    code, report = run_json(path, "-t", target)
    assert code == 1
    assert report["blocks"]["wrong"] > 0
    assert "block 1 tp0" in report["faults"][0]
    assert "holds the bytes of block 0" in report["faults"][0]


def test_bytes_that_are_gone_are_misses_and_the_run_is_fine(tmp_path, manager, target):
    path, _ = trace(tmp_path, 60)
    manager.bend_uri = lambda key, uri: uri.replace("?", "_gone?") if key == 0 else uri
    code, report = run_json(path, "-t", target)
    assert code == 0
    assert report["blocks"]["lost"] > 0
    assert report["blocks"]["wrong"] == 0
    assert report["hit_rate"]["blocks"] < report["ceiling"]["blocks"]


def test_a_refused_write_is_counted_by_reason_and_aborts_nothing(tmp_path, manager, target):
    path, best = trace(tmp_path, 20)
    manager.refuse = True
    code, report = run_json(path, "-t", target)
    assert code == 0
    assert report["requests"] == 20
    assert report["refused_by_reason"] == {"QUOTA_GROUP": best.blocks}


def test_engines_sit_out_a_manager_that_goes_away_and_comes_back(tmp_path, manager):
    path, _ = trace(tmp_path, 40)
    reached = threading.Event()
    manager.on_lookup = lambda count: reached.set() if count == 10 else None
    with serve(manager) as (address, server):
        process = start(path, "-t", address, "--call-timeout", "2", "--json")
        assert reached.wait(60)
        server.stop(0).wait()
        port = int(address.rpartition(":")[2])
        eventually_sync(lambda: _back(manager, port, process), message="the port came back")
    report = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert report["requests"] == 40
    assert report["requests_failed"] == 0
    assert report["blocks"]["wrong"] == 0


def _back(manager: FakeManager, port: int, process: subprocess.Popen[str]) -> bool:
    """Serve on the old port until the replay is done; False when the port is not free yet."""
    try:
        with serve(manager, port):
            process.wait(120)
    except RuntimeError:
        return False
    return True


def test_a_manager_that_stays_away_ends_the_run_with_its_partial_table(tmp_path, manager):
    path, _ = trace(tmp_path, 40)
    reached = threading.Event()
    manager.on_lookup = lambda count: reached.set() if count == 5 else None
    with serve(manager) as (address, _):
        process = start(
            path, "-t", address, "--outage", "0.5", "--call-timeout", "1", "--workers", "2"
        )
        assert reached.wait(60)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "no answer for 0.5 s" in out
    assert "requests" in out
    assert "Traceback" not in err


def test_ctrl_c_prints_the_partial_table_and_leaves_no_process(tmp_path, manager, target):
    # Over a minute at this speed: it is not over before the signal, however late that comes.
    path, _ = trace(tmp_path, 4_000)
    reached = threading.Event()
    manager.on_lookup = lambda count: reached.set() if count == 20 else None
    process = start(path, "-t", target, "--workers", "2", "--speed", "x20")
    assert reached.wait(60)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the numbers are partial" in out
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        eventually_sync(lambda: os.killpg(process.pid, 0))


def test_recorded_speed_keeps_the_distances_between_requests(tmp_path, target):
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 512, "hash_ids": [t]}) + "\n"
            for t in (5000, 7000, 9000)
        )
    )
    code, report = run_json(path, "-t", target, "--speed", "x4")
    assert code == 0
    assert 1.0 <= report["wall_s"] < 3.0
    assert report["late_max_s"] < 1.0


def test_acknowledged_keys_are_recorded_and_can_be_checked(tmp_path, manager, target):
    path, best = trace(tmp_path, 30)
    acks = tmp_path / "acks"
    assert run_json(path, "-t", target, "--acks", acks, "--workers", "2")[0] == 0
    assert len(acks.read_text().splitlines()) == 1 + best.distinct

    code, out, _ = run("--check-acks", acks, "-t", target)
    assert code == 0
    assert f"{best.distinct:,} right" in out

    del manager.serving[0]
    os.unlink(manager.serving[1].removeprefix("file://fake").partition("?")[0])
    manager.serving[2] = manager.serving[3]
    code, result = run_json("--check-acks", acks, "-t", target)
    assert code == 1
    assert (result["gone"], result["lost"], result["wrong"]) == (1, 1, 1)
    assert result["right"] == best.distinct - 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "a trace file is needed"),
        (("{empty}",), "no requests to replay"),
        (("/nonexistent",), "No such file"),
        (("{bad}",), "row 1"),
        (("{good}", "--speed", "fast"), "speed"),
        (("{good}", "--speed", "x0"), "speed"),
        (("{good}", "-t", "ftp://x:1"), "scheme"),
        (("{good}", "-t", "127.0.0.1:9", "--call-timeout", "0.5"), "connect"),
        (("{good}", "--check-acks", "{bad}"), "takes no trace"),
        (("--check-acks", "{bad}"), "line 1"),
        (("--check-acks", "{empty}"), "no header"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(tmp_path, arguments, says):
    good, _ = trace(tmp_path, 3)
    bad, empty = tmp_path / "bad", tmp_path / "empty"
    bad.write_text("{}\n")
    empty.write_text("")
    names = {"{good}": good, "{bad}": bad, "{empty}": empty}
    result = CliRunner().invoke(build_app(), ["replay", *(str(names.get(a, a)) for a in arguments)])
    assert result.exit_code == 1
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "factor"), [("max", None), ("recorded", 1.0), ("x10", 10.0), ("0.5", 0.5)]
)
def test_speeds(text, factor):
    assert parse_speed(text) == factor


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "inf", "nan", "10x"])
def test_what_is_no_speed_is_refused(text):
    with pytest.raises(InvalidArgument, match="speed"):
        parse_speed(text)


def test_the_fake_refuses_a_port_in_use(manager, target):
    """The outage test rests on it."""
    port = int(target.rpartition(":")[2])
    with pytest.raises(RuntimeError):
        grpc.server(None, options=[("grpc.so_reuseport", 0)]).add_insecure_port(f"127.0.0.1:{port}")
