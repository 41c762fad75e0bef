"""kvcm workload writes traces that kvcm replay reads."""

import gzip

import pytest
from typer.testing import CliRunner

from kvcm.cli.main import build_app
from kvcm.optimizer.trace import read_trace

runner = CliRunner()


def invoke(*arguments: str):
    return runner.invoke(build_app(), ["workload", *arguments])


@pytest.mark.parametrize("kind", ["chat", "agent", "mixed"])
def test_it_writes_the_rows_asked_for_and_says_what_a_cache_could_reach(tmp_path, kind):
    path = tmp_path / "t.jsonl"
    result = invoke("--kind", kind, "--requests", "30", "--seed", "5", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert len(read_trace(path).rows) == 30
    assert "30 requests" in result.stderr
    assert "hit rate of 0." in result.stderr
    assert result.stdout == ""


def test_stdout_has_the_trace_and_nothing_else(tmp_path):
    path = tmp_path / "t.jsonl"
    invoke("-n", "10", "-o", str(path))
    result = invoke("-n", "10")
    assert result.stdout_bytes == path.read_bytes()


def test_a_gz_name_compresses(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    assert invoke("-n", "3", "-o", str(path)).exit_code == 0
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == 3
    assert len(read_trace(path).rows) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-n", "0"), "--requests"),
        (("--kind", "poetry"), "--kind"),
        (("--block-size", "0"), "--block-size"),
        (("-o", "/nonexistent/x"), "No such file"),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments, says):
    result = invoke(*arguments)
    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert "Traceback" not in result.output
