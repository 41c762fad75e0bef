"""The trace reader accepts what Mooncake's files look like and names what is wrong elsewhere."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.core.errors import InvalidArgument
from kvcm.core.limits import TRACE_LINE_BYTES_MAX
from kvcm.optimizer.trace import ceiling, parse_row, read_trace


def row(timestamp: float = 0, tokens: int = 1024, ids: list[int] | None = None, **more) -> str:
    record = {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": [1, 2] if ids is None else ids,
    }
    return json.dumps(record | more)


def write(tmp_path: Path, *lines: str, end: str = "\n") -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + end)
    return path


def test_rows_keep_their_line_numbers_past_blank_lines_and_without_a_last_newline(tmp_path):
    path = write(tmp_path, row(0), "", "   ", row(7.5, 513, [1, 3]), end="")
    rows = read_trace(path).rows
    assert [(r.number, r.timestamp_ms, r.hash_ids) for r in rows] == [
        (1, 0, (1, 2)),
        (4, 7.5, (1, 3)),
    ]
    assert rows[1].input_length == 513
    assert rows[1].output_length == 5


def test_windows_line_ends_and_unknown_fields_are_read(tmp_path):
    path = tmp_path / "t"
    path.write_bytes((row(extra={"a": [1]}) + "\r\n").encode() * 2)
    assert len(read_trace(path).rows) == 2


def test_gzip_is_recognised_by_content_not_by_name(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress((row() + "\n" + row()).encode()))
    assert len(read_trace(path).rows) == 2


@pytest.mark.parametrize("compressed", [False, True])
def test_an_empty_file_has_no_rows_and_a_ceiling_of_zero(tmp_path, compressed):
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(b"") if compressed else b"")
    assert read_trace(path).rows == []
    empty = ceiling([])
    assert (empty.blocks, empty.block_rate, empty.request_rate) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "row 2"),
        ("[]", "row 2"),
        ('{"timestamp": 1}', "input_length"),
        (row(ids=[1]), "1 hash_ids, but input_length 1024 at 512 tokens a block makes 2"),
        (row(tokens=1025), "makes 3"),
        (row(block_size=256), "block_size 256, but the trace is read with 512"),
        (row(ids=[1, 2**63]), "hash_ids"),
        (row(ids=[1, -(2**63) - 1]), "hash_ids"),
        (row(ids=[1, 2.5]), "hash_ids"),  # type: ignore[list-item]
        (row(ids=[1, True]), "hash_ids"),
        (row(tokens=-1, ids=[]), "input_length"),
        (row(timestamp=-1), "timestamp"),
        (row().replace('"timestamp": 0', '"timestamp": NaN'), "row 2"),
        (row().replace('"timestamp": 0', '"timestamp": 1e999'), "row 2"),
        ("\x00\x01", "row 2"),
    ],
)
def test_a_bad_row_is_named_and_lenient_reading_counts_and_skips_it(tmp_path, line, says):
    path = write(tmp_path, row(), line, row(3))
    with pytest.raises(InvalidArgument, match="row 2") as caught:
        read_trace(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)

    trace = read_trace(path, lenient=True)
    assert [r.number for r in trace.rows] == [1, 3]
    assert trace.skipped == 1
    assert "row 2" in trace.first_problem


def test_extreme_ids_are_kept_exactly(tmp_path):
    ids = [2**63 - 1, -(2**63)]
    assert read_trace(write(tmp_path, row(ids=ids))).rows[0].hash_ids == tuple(ids)


def test_a_time_before_the_last_row_is_refused_or_counted_and_raised(tmp_path):
    path = write(tmp_path, row(5), row(4), row(6))
    with pytest.raises(InvalidArgument, match="row 2: timestamp 4 is before 5"):
        read_trace(path)
    trace = read_trace(path, lenient=True)
    assert [r.timestamp_ms for r in trace.rows] == [5, 5, 6]
    assert (trace.reordered, trace.skipped) == (1, 0)


def test_rows_that_fit_two_different_block_sizes_are_refused(tmp_path):
    path = write(tmp_path, row(), row(ids=[1, 2, 3, 4]))
    with pytest.raises(InvalidArgument, match="row 2"):
        read_trace(path)
    with pytest.raises(InvalidArgument, match="row 1"):
        read_trace(path, block_size=256)


def test_a_declared_block_size_is_used(tmp_path):
    path = write(tmp_path, row(tokens=33, ids=[1, 2, 3], block_size=16))
    assert len(read_trace(path, block_size=16).rows) == 1
    with pytest.raises(InvalidArgument, match="block_size"):
        read_trace(path, block_size=0)


def test_skip_and_limit_cut_the_rows(tmp_path):
    path = write(tmp_path, *(row(t) for t in range(5)))
    assert [r.timestamp_ms for r in read_trace(path, skip=1, limit=2).rows] == [1, 2]
    assert read_trace(path, skip=9).rows == []
    assert read_trace(path, limit=0).rows == []


def test_a_missing_file_a_folder_and_cut_gzip_are_clear_errors(tmp_path):
    with pytest.raises(InvalidArgument, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(InvalidArgument, match="directory"):
        read_trace(tmp_path)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(row().encode())[:-9])
    with pytest.raises(InvalidArgument, match="gzip"):
        read_trace(cut)
    cut.write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(InvalidArgument, match="gzip"):
        read_trace(cut, lenient=True)


def test_a_row_is_read_up_to_the_line_limit_and_not_beyond(tmp_path):
    body = row().encode()
    fits = body + b" " * (TRACE_LINE_BYTES_MAX - len(body))
    assert parse_row(fits, 1, 512).hash_ids == (1, 2)
    path = tmp_path / "t"
    path.write_bytes(fits + b" \n" + body + b"\n")
    with pytest.raises(InvalidArgument, match="row 1: longer than"):
        read_trace(path)
    trace = read_trace(path, lenient=True)
    assert [r.number for r in trace.rows] == [2]


def test_the_ceiling_of_a_hand_computed_trace_under_each_definition():
    # Blocks asked 3 + 2 + 4 = 9, distinct 1..6 = 6; leading known: 0/3, 1/2, 2/4.
    got = ceiling([(1, 2, 3), (1, 4), (1, 2, 5, 6)])
    assert (got.requests, got.blocks, got.distinct) == (3, 9, 6)
    assert got.block_rate == pytest.approx(3 / 9)
    assert got.request_rate == pytest.approx((0 + 1 / 2 + 2 / 4) / 3)


def test_a_request_without_blocks_counts_but_has_no_rate():
    got = ceiling([(), (1,), (1,)])
    assert got.requests == 3
    assert got.request_rate == pytest.approx(1 / 2)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5).map(tuple)))
def test_the_ceiling_is_what_a_set_finds(requests):
    seen: set[int] = set()
    repeats = 0
    for ids in requests:
        for block in ids:
            repeats += block in seen
            seen.add(block)
    total = sum(map(len, requests))
    assert ceiling(requests).block_rate == pytest.approx(repeats / total if total else 0.0)


SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "distinct", "rate"),
    [
        ("mooncake_conversation.jsonl", 12_031, 288_500, 182_790, 0.36641),
        ("mooncake_synthetic.jsonl", 3_993, 121_877, 43_924, 0.63960),
    ],
)
def test_the_real_traces_have_their_published_ceilings(name, requests, blocks, distinct, rate):
    path = SHARED / name
    if not path.exists():
        pytest.skip("the real traces are not here")
    got = ceiling(r.hash_ids for r in read_trace(path).rows)
    assert (got.requests, got.blocks, got.distinct) == (requests, blocks, distinct)
    assert round(got.block_rate, 5) == rate
