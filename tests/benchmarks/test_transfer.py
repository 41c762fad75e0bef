"""The measurement of transfers: all bytes are really moved, and wrong ones are noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import results, transfer
from kvcm.testing.servers_mooncake import needs_mooncake


def assert_rows(rows: list[dict[str, Any]], tool: str) -> None:
    assert [(row["direction"], row["tool"]) for row in rows] == [("put", tool), ("get", tool)]
    for row in rows:
        assert row["sdk_mb_per_s"] > 0
        assert row["plain_mb_per_s"] > 0
        assert row["ratio"] == pytest.approx(row["plain_mb_per_s"] / row["sdk_mb_per_s"])
    shape = next(case for case in results.CASES if case.name == "transfer")
    assert results.table(shape, rows).count("\n") == 4


def test_files_are_measured_beside_cp_and_nothing_is_left(tmp_path: Path) -> None:
    options = transfer.Options(("file",), ((20, 4096),), 2, str(tmp_path))
    assert_rows(transfer.measure(options, lambda line: None), "cp")
    assert list(tmp_path.iterdir()) == []


@needs_mooncake
def test_mooncake_is_measured_beside_its_library() -> None:
    options = transfer.Options(("mooncake",), ((20, 4096),), 1)
    assert_rows(transfer.measure(options, lambda line: None), "library")


def test_bytes_that_came_back_wrong_end_the_measurement() -> None:
    data = transfer.Bytes(4, 64)
    data.target[:] = data.source
    data.check()
    with pytest.raises(RuntimeError, match="other bytes"):
        data.check()
