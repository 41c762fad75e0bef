"""Files of trace events: rotated, compressed, readable wherever they were cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvcm.observability import trace_files
from kvcm.observability.trace_files import TraceFiles


def files(folder: Path, *, file_bytes_max: int = 1 << 20, files_max: int = 3) -> TraceFiles:
    return TraceFiles(
        folder, lambda: 1_700_000_000.0, file_bytes_max=file_bytes_max, files_max=files_max
    )


def lines(*numbers: int) -> bytes:
    return b"".join(json.dumps({"id": number}).encode() + b"\n" for number in numbers)


def read(folder: Path) -> list[int]:
    return [event["id"] for path in trace_files.paths(folder) for event in trace_files.read(path)]


def test_other_tools_read_what_is_written_as_one_gzip_file(tmp_path: Path) -> None:
    made = files(tmp_path / "made")
    made.append(lines(1, 2))
    made.append(lines(3))
    (path,) = trace_files.paths(tmp_path / "made")
    assert gzip.decompress(path.read_bytes()) == lines(1, 2, 3)
    assert path.name == "events-00000001-20231114T221320Z.jsonl.gz"
    made.close()


def test_a_file_at_its_limit_is_followed_by_another_and_the_oldest_goes(tmp_path: Path) -> None:
    size = len(gzip.compress(lines(1), 1))
    for limit, number in ((2 * size, 3), (2 * size + 1, 2)):
        folder = tmp_path / str(limit)
        made = files(folder, file_bytes_max=limit)
        for i in range(1, 7):
            made.append(lines(i))
        assert len(trace_files.paths(folder)) == number
        assert read(folder) == [1, 2, 3, 4, 5, 6]
        for i in range(7, 14):
            made.append(lines(i))
        assert len(trace_files.paths(folder)) == 3
        assert read(folder)[-3:] == [11, 12, 13]
        assert 1 not in read(folder)
        made.close()


def test_a_later_process_begins_a_file_of_its_own(tmp_path: Path) -> None:
    for i in (1, 2):
        made = files(tmp_path)
        made.append(lines(i))
        made.close()
    assert [path.name[:15] for path in trace_files.paths(tmp_path)] == [
        "events-00000001",
        "events-00000002",
    ]
    assert read(tmp_path) == [1, 2]


def test_a_file_that_is_cut_anywhere_is_read_up_to_there(tmp_path: Path) -> None:
    made = files(tmp_path)
    made.append(lines(1, 2))
    whole = trace_files.paths(tmp_path)[0].stat().st_size
    made.append(lines(*range(3, 300)))
    made.close()
    (path,) = trace_files.paths(tmp_path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        found = read(tmp_path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= (2 if size >= whole else 0)


def test_what_was_no_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events-00000001-x.jsonl.gz"
    path.write_bytes(b"something else")
    with pytest.raises(OSError, match="events-00000001-x"):
        list(trace_files.read(path))


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "events-mine.jsonl.gz"
    other.write_bytes(b"")
    made = files(tmp_path, files_max=1)
    made.append(lines(1))
    made.close()
    assert other.exists()
    assert read(tmp_path) == [1]
