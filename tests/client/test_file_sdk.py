"""The file SDK: every answer at its position, no truncated block read as whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcm.client import file_sdk
from kvcm.client.file_sdk import FileSdk, parse_slot
from kvcm.client.transfer import DEADLINE, MISSING, TRUNCATED
from kvcm.core.errors import InvalidArgument, StorageError, Unavailable
from kvcm.testing.clock import SimClock


def uri(path: Path | str, size: int, blkid: int | None = None, scheme: str = "file") -> str:
    slot = "" if blkid is None else f"blkid={blkid}&"
    return f"{scheme}://nfs_01{path}?{slot}size={size}"


def block(number: int, size: int = 16) -> bytes:
    return bytes([number + 1]) * size


def reason(answer: object) -> str:
    assert isinstance(answer, StorageError), answer
    return answer.reason


@pytest.mark.parametrize(
    ("text", "slot"),
    [
        ("file://nfs_01/a/b?size=8", ("/a/b", 0, 8)),
        ("hf3fs://3fs.a-b/a/b?blkid=3&size=8", ("/a/b", 24, 8)),
        ("vcns_hf3fs://3fs.a-b/a/b?blkid=3&size=8", ("/a/b", 24, 8)),
        ("vcns_hf3fs://3fs.a-b/a%20b?size=8", ("/a b", 0, 8)),
        ("file://nfs_01/a/b?blkid=3&size=8&zone=x", ("/a/b", 24, 8)),
        ("file://nfs_01/a/b?aaa=1&size=8", ("/a/b", 0, 8)),
        ("file://nfs_01/a%20b?size=8", ("/a b", 0, 8)),
        ("file://[fd00::1]:80/a?size=8", ("/a", 0, 8)),
        ("file://n/a..b/..c/d..?size=8", ("/a..b/..c/d..", 0, 8)),
        (f"file://n/a?size={(1 << 63) - 1}", ("/a", 0, (1 << 63) - 1)),
    ],
)
def test_uris_name_a_file_an_offset_and_a_size(text: str, slot: tuple[str, int, int]) -> None:
    assert parse_slot(text) == slot


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "file://",
        "file:///a?size=8",
        "file://n?size=8",
        "file://n/?size=8",
        "file://n/a/?size=8",
        "mooncake://n/?key=k&size=8",
        "pace://n/17?size=8",
        "https://n/a?size=8",
        "file://n/a",
        "file://n/a?size=",
        "file://n/a?size=0",
        "file://n/a?size=-8",
        "file://n/a?size=1e3",
        "file://n/a?size=1_0",
        "file://n/a?size=٣",
        "file://n/a?blkid=-1&size=8",
        "file://n/a?blkid=x&size=8",
        f"file://n/a?size={1 << 63}",
        f"file://n/a?blkid=1&size={1 << 62}",
        f"file://n/a?size={'9' * 5000}",
        "file://n/../a?size=8",
        "file://n/a/../b?size=8",
        "file://n/a/..?size=8",
        "file://n/a/%2e%2e/b?size=8",
        "file://n/a%00b?size=8",
        "file://n/a\0b?size=8",
        "file://[n/a?size=8",
    ],
)
def test_what_is_no_block_of_a_file_is_refused_at_its_position(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="location uri"):
        parse_slot(text)
    good = uri(tmp_path / "f", 4)
    bad, written = FileSdk().put_many([(text, b"x" * 8), (good, b"good")])
    assert isinstance(bad, InvalidArgument)
    assert written is None
    bad, read = FileSdk().get_many([(text, None), (good, None)])
    assert isinstance(bad, InvalidArgument)
    assert read == b"good"


@pytest.mark.parametrize("fsync", [False, True])
def test_blocks_come_back_whatever_the_order_and_the_buffers(tmp_path: Path, fsync: bool) -> None:
    sdk = FileSdk(fsync=fsync)
    files = [tmp_path / "deep" / "folder" / name for name in "ab"]
    wanted = [(uri(f, 16, i), block(i + 9 * n)) for n, f in enumerate(files) for i in range(9)]
    shuffled = wanted[::2] + wanted[1::2][::-1]
    assert sdk.put_many(shuffled) == [None] * 18
    assert sdk.get_many([(u, None) for u, _ in wanted]) == [data for _, data in wanted]
    array = np.zeros((18, 4), dtype=np.int32)
    assert sdk.get_many([(wanted[i][0], array[i]) for i in range(18)]) == [None] * 18
    assert array.tobytes() == b"".join(data for _, data in wanted)


def test_a_file_is_opened_once_and_adjacent_blocks_move_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    real_open, pwritev, preadv = os.open, os.pwritev, os.preadv

    def count_open(*args: Any) -> int:
        opened.append(args[0])
        return real_open(*args)

    def count_write(fd: int, views: list[Any], offset: int) -> int:
        written.append((len(views), offset))
        return pwritev(fd, views, offset)

    def count_read(fd: int, views: list[Any], offset: int) -> int:
        read.append((len(views), offset))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "open", count_open)
    monkeypatch.setattr(os, "pwritev", count_write)
    monkeypatch.setattr(os, "preadv", count_read)
    slots = [4, 0, 1, 2, 7]
    items = [(uri(tmp_path / "f", 16, i), block(i)) for i in slots]
    FileSdk().put_many(items)
    assert FileSdk().get_many([(u, None) for u, _ in items]) == [block(i) for i in slots]
    assert len(opened) == 2
    assert written == read == [(3, 0), (1, 64), (1, 112)]


def test_runs_longer_than_the_systems_vector_limit_are_cut(tmp_path: Path) -> None:
    count = 2 * file_sdk._IOV_MAX + 3
    items = [(uri(tmp_path / "f", 4, i), i.to_bytes(4, "big")) for i in range(count)]
    assert FileSdk().put_many(items) == [None] * count
    assert FileSdk().get_many([(u, None) for u, _ in items]) == [data for _, data in items]


def test_calls_that_move_less_than_asked_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv

    def first_bytes(views: Any) -> list[memoryview]:
        return [memoryview(views[0])[:7]]

    monkeypatch.setattr(os, "pwritev", lambda fd, v, at: pwritev(fd, first_bytes(v), at))
    monkeypatch.setattr(os, "preadv", lambda fd, v, at: preadv(fd, first_bytes(v), at))
    items = [(uri(tmp_path / "f", 16, i), block(i)) for i in range(5)]
    assert FileSdk().put_many(items) == [None] * 5
    assert FileSdk().get_many([(u, None) for u, _ in items]) == [data for _, data in items]


def test_later_calls_keep_the_slots_of_earlier_ones(tmp_path: Path) -> None:
    sdk = FileSdk()
    for i in (3, 0, 2):
        assert sdk.put_many([(uri(tmp_path / "f", 16, i), block(i))]) == [None]
    found = sdk.get_many([(uri(tmp_path / "f", 16, i), None) for i in (0, 2, 3)])
    assert found == [block(0), block(2), block(3)]


def test_missing_and_truncated_blocks_are_errors_and_never_zeros(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(block(0) + block(1)[:10])
    buffer = bytearray(16)
    answers = FileSdk().get_many(
        [
            (uri(path, 16, 1), None),
            (uri(tmp_path / "gone", 16), None),
            (uri(path, 16, 0), None),
            (uri(path, 16, 1), buffer),
            (uri(path, 16, 2), None),
            (uri(path, 1 << 60, 0), None),
            (uri(tmp_path / "no" / "folder", 16), buffer),
        ]
    )
    assert answers[2] == block(0)
    assert [reason(a) for i, a in enumerate(answers) if i != 2] == [
        TRUNCATED,
        MISSING,
        TRUNCATED,
        TRUNCATED,
        TRUNCATED,
        MISSING,
    ]


def test_a_file_cut_between_the_check_and_the_read_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(block(0) * 3)
    preadv = os.preadv

    def cut_then_read(fd: int, views: Any, at: int) -> int:
        os.truncate(path, 40)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    answers = FileSdk().get_many([(uri(path, 16, i), None) for i in range(3)])
    assert answers[:2] == [block(0)] * 2
    assert reason(answers[2]) == TRUNCATED


@pytest.mark.parametrize(
    ("buffer", "word"),
    [
        (b"x" * 15, "15 bytes"),
        (b"x" * 17, "17 bytes"),
        (b"", "0 bytes"),
        (np.zeros(32, dtype=np.uint8)[::2], "contiguous"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_and_nothing_is_written(
    tmp_path: Path, buffer: Any, word: str
) -> None:
    sdk = FileSdk()
    (answer,) = sdk.put_many([(uri(tmp_path / "f", 16), buffer)])
    assert isinstance(answer, InvalidArgument)
    assert word in str(answer)
    assert not (tmp_path / "f").exists()
    (tmp_path / "f").write_bytes(block(0))
    (read,) = sdk.get_many([(uri(tmp_path / "f", 16), buffer)])
    assert isinstance(read, InvalidArgument)


def test_reads_into_read_only_memory_and_writes_from_nothing_are_refused(tmp_path: Path) -> None:
    sdk = FileSdk()
    (tmp_path / "f").write_bytes(block(0))
    (answer,) = sdk.get_many([(uri(tmp_path / "f", 16), block(0))])
    assert isinstance(answer, InvalidArgument)
    assert "read-only" in str(answer)
    nothing: Any = None
    (written,) = sdk.put_many([(uri(tmp_path / "f", 16), nothing)])
    assert isinstance(written, InvalidArgument)


def test_a_file_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    paths = ["file/below", "link", "folder", "n" * 300, "\ud800", "good"]
    items = [(uri(tmp_path / name, 16), block(0)) for name in paths]
    answers = FileSdk().put_many(items)
    assert answers[-1] is None
    assert all(reason(a) == "" for a in answers[:-1])
    found = FileSdk().get_many([(u, None) for u, _ in items])
    assert found[-1] == block(0)
    assert all(isinstance(a, StorageError) for a in found[:-1])
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("call", ["fsync", "close", "pwritev"])
def test_a_write_that_fails_late_counts_for_no_block_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real_close = os.close
    calls = 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if call == "close":
            real_close(args[0])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        answers = FileSdk(fsync=True).put_many(
            [(uri(tmp_path / "f", 16, i), block(i)) for i in (0, 5)]
        )
    assert calls == 1
    assert all("No space left" in str(a) and reason(a) == "" for a in answers)


def test_after_the_deadline_no_further_transfer_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimClock()
    pwritev, preadv = os.pwritev, os.preadv

    def slow_write(fd: int, views: Any, at: int) -> int:
        clock.advance(1.0)
        return pwritev(fd, views, at)

    def slow_read(fd: int, views: Any, at: int) -> int:
        clock.advance(1.0)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "pwritev", slow_write)
    monkeypatch.setattr(os, "preadv", slow_read)
    sdk = FileSdk(clock=clock)
    items = [(uri(tmp_path / name, 16, i), block(i)) for name in "ab" for i in (0, 2)]
    assert sdk.put_many(items) == [None] * 4
    expected = [True, True, False, False]
    written = sdk.put_many(items, deadline_s=1.5)
    assert [answer is None for answer in written] == expected
    read = sdk.get_many([(u, None) for u, _ in items], deadline_s=1.5)
    assert [isinstance(answer, bytes) for answer in read] == expected
    for answer in [*written[2:], *read[2:]]:
        assert isinstance(answer, Unavailable)
        assert answer.reason == DEADLINE
    (half, late) = sdk.put_many(items[:2], deadline_s=0.5)
    assert half is None
    assert isinstance(late, Unavailable)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    sdk = FileSdk()
    (tmp_path / "short").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        sdk.put_many([(uri(tmp_path / str(i), 16), block(i)) for i in range(20)])
        sdk.get_many([(uri(tmp_path / str(i), 16), None) for i in range(20)])
        sdk.get_many([(uri(tmp_path / "short", 16), None), (uri(tmp_path, 16), None)])
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_async_forms_answer_alike(tmp_path: Path) -> None:
    sdk = FileSdk()
    items = [(uri(tmp_path / "f", 16, i, scheme="hf3fs"), block(i)) for i in range(3)]
    assert await sdk.put_many_async(items) == [None] * 3
    assert await sdk.get_many_async([(u, None) for u, _ in items]) == [block(i) for i in range(3)]
    assert await sdk.get_many_async([]) == []
