"""Transfers: every block reaches the SDK of its storage, every answer its position."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcm.client.file_sdk import SCHEMES as FILE_SCHEMES
from kvcm.client.router import Moved, Place, Transfers, place_of
from kvcm.client.transfer import GetResult, PutResult, TransferSdk
from kvcm.client.types import StorageInfo
from kvcm.core.errors import InvalidArgument, StorageError, Unavailable, Unsupported
from kvcm.testing.eventually import eventually_sync


class MemorySdk(TransferSdk):
    """Blocks of one storage in a dict."""

    def __init__(self, name: str, fields: Mapping[str, Any] | None) -> None:
        self.name = name
        self.fields = fields
        self.blocks: dict[str, bytes] = {}
        self.buffers: list[Any] = []
        self.deadlines: list[float | None] = []
        self.announced: list[Any] = []
        self.closed = 0

    def put_many(
        self, items: Sequence[tuple[str, Any]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        self.deadlines.append(deadline_s)
        self.buffers += [buffer for _, buffer in items]
        self.blocks.update((uri, bytes(buffer)) for uri, buffer in items)
        return [None] * len(items)

    def get_many(
        self, items: Sequence[tuple[str, Any]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        self.deadlines.append(deadline_s)
        self.buffers += [buffer for _, buffer in items]
        return [self.blocks.get(uri, StorageError(f"{self.name}: {uri}")) for uri, _ in items]

    def announce(self, buffer: Any) -> None:
        self.announced.append(buffer)

    def close(self) -> None:
        self.closed += 1


class Pools:
    """Transfers with the scheme ``pool``, and the SDKs it made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.made: list[MemorySdk] = []
        self.moved: list[Moved] = []
        self.transfers = Transfers(*arguments, observe=self.moved.append, **options)
        self.transfers.register("pool", self._make)

    def _make(self, name: str, fields: Mapping[str, Any] | None) -> TransferSdk:
        self.made.append(MemorySdk(name, fields))
        return self.made[-1]


def in_file(folder: Path, number: int, scheme: str = "file", storage: str = "nfs") -> str:
    return f"{scheme}://{storage}{folder}/{number}?size=4"


def test_answers_come_position_by_position_whatever_the_mixture(tmp_path: Path) -> None:
    pools = Pools()
    uris = [
        in_file(tmp_path, 0),
        "pool://a/0?size=4",
        "nonsense",
        in_file(tmp_path, 1, "hf3fs", "fs"),
        "pace://far/7?size=4",
        "pool://b/0?size=4",
        "mooncake://mc/?key=k&size=4",
        in_file(tmp_path, 2, "vcns_hf3fs", "vcns"),
        in_file(tmp_path, 3),
        "pool://a/1?size=4",
        "",
    ]
    wrong = {2: InvalidArgument, 4: Unsupported, 6: InvalidArgument, 10: InvalidArgument}
    blocks = [bytes([i]) * 4 for i in range(len(uris))]
    written = pools.transfers.put_many(list(zip(uris, blocks, strict=True)))
    assert {i: type(answer) for i, answer in enumerate(written) if answer is not None} == wrong
    read = pools.transfers.get_many([(uri, None) for uri in uris])
    assert {i: type(answer) for i, answer in enumerate(read) if i in wrong} == wrong
    assert all(read[i] == block for i, block in enumerate(blocks) if i not in wrong)
    assert "'pace'" in str(read[4])
    assert "'mc'" in str(read[6])
    counted = {(m.place, m.is_put): (m.blocks, m.failed) for m in pools.moved}
    assert counted[Place("pool", "a"), True] == counted[Place("pool", "a"), False] == (2, 0)
    assert counted[Place("file", "nfs"), True] == (2, 0)
    assert counted[Place("pace", "far"), False] == (1, 1)
    assert len(pools.made) == 2


def test_an_sdk_gets_the_callers_own_buffers_and_deadline() -> None:
    pools = Pools()
    put, got = bytearray(b"four"), bytearray(4)
    pools.transfers.put_many([("pool://a/0?size=4", put)], deadline_s=5.0)
    pools.transfers.get_many([("pool://a/0?size=4", got), ("pool://b/0", got)], deadline_s=7.0)
    first, second = pools.made
    assert first.buffers[0] is put
    assert first.buffers[1] is second.buffers[0] is got
    assert (first.deadlines, second.deadlines) == ([5.0, 7.0], [7.0])


def test_groups_of_one_call_move_at_the_same_time() -> None:
    # Each waits until all three are in their call: one after the other they would never meet.
    meeting = threading.Barrier(3, timeout=10)

    class Meeting(MemorySdk):
        def get_many(self, items: Any, *, deadline_s: float | None = None) -> list[GetResult]:
            meeting.wait()
            return [self.name.encode() for _ in items]

    with Transfers() as transfers:
        transfers.register("meet", Meeting)
        answers = transfers.get_many([(f"meet://{name}/", None) for name in "abcab"])
    assert answers == [b"a", b"b", b"c", b"a", b"b"]


class Hanging(MemorySdk):
    """Comes back when it is let go."""

    let_go = threading.Event()
    entered = 0

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[PutResult]:
        type(self).entered += 1
        assert self.let_go.wait(30)
        return [None] * len(items)

    def get_many(self, items: Any, *, deadline_s: float | None = None) -> list[GetResult]:
        type(self).entered += 1
        assert self.let_go.wait(30)
        return [b"late"] * len(items)


@pytest.fixture
def hanging() -> Iterator[type[Hanging]]:
    class Mine(Hanging):
        let_go = threading.Event()

    yield Mine
    Mine.let_go.set()


def test_a_storage_that_hangs_is_left_behind_at_the_deadline(hanging: type[Hanging]) -> None:
    pools = Pools()
    pools.transfers.register("hang", hanging)
    uris = ["pool://a/0", "hang://h/0", "pool://a/1"]
    written = pools.transfers.put_many([(uri, b"1") for uri in uris], deadline_s=0.01)
    assert [written[0], written[2]] == [None, None]
    assert getattr(written[1], "reason", "") == "DEADLINE"
    read = pools.transfers.get_many([(uri, None) for uri in uris], deadline_s=0.01)
    assert [read[0], read[2]] == [b"1", b"1"]
    assert isinstance(read[1], Unavailable)
    # Each that hangs costs a thread: in the end nobody goes there any more ...
    for _ in range(3):
        pools.transfers.get_many([("hang://h/0", None)], deadline_s=0)
    assert hanging.entered == 4
    pools.transfers.close()
    assert [sdk.closed for sdk in pools.made] == [1]


def test_a_storage_that_no_longer_hangs_is_used_again(hanging: type[Hanging]) -> None:
    transfers = Transfers()
    transfers.register("hang", hanging)
    for _ in range(5):
        (answer,) = transfers.get_many([("hang://h/0", None)], deadline_s=0)
        assert isinstance(answer, Unavailable)
    hanging.let_go.set()
    eventually_sync(
        lambda: transfers.get_many([("hang://h/0", None)], deadline_s=5) == [b"late"], timeout=10
    )


def test_a_read_into_the_callers_buffer_is_waited_for(hanging: type[Hanging]) -> None:
    transfers = Transfers()
    transfers.register("hang", hanging)
    threading.Timer(1.0, hanging.let_go.set).start()
    # Half a second past its deadline it would have been left, with the buffer still written to.
    (answer,) = transfers.get_many([("hang://h/0", bytearray(4))], deadline_s=0)
    assert answer == b"late"


class Broken(MemorySdk):
    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[PutResult]:
        raise ZeroDivisionError("a bug")

    def get_many(self, items: Any, *, deadline_s: float | None = None) -> list[GetResult]:
        return [b"one too few"] * (len(items) - 1)


def test_a_faulty_sdk_spoils_only_its_own_blocks() -> None:
    pools = Pools()
    pools.transfers.register("bad", Broken)
    uris = ["bad://x/0", "pool://a/0", "bad://x/1"]
    first, second, third = pools.transfers.put_many([(uri, b"1") for uri in uris])
    assert isinstance(first, StorageError)
    assert second is None
    assert "a bug" in str(third)
    lost, read, _ = pools.transfers.get_many([(uri, None) for uri in uris])
    assert "'bad'" in str(lost)
    assert read == b"1"


def test_fields_of_storages_reach_their_sdks_and_may_change() -> None:
    pools = Pools([StorageInfo("pool", "a", True, {"nodes": 3})])
    get = [("pool://a/0", None), ("pool://b/0", None)]
    pools.transfers.get_many(get)
    assert {sdk.name: sdk.fields for sdk in pools.made} == {"a": {"nodes": 3}, "b": None}
    same = '[{"type":"pool","global_unique_name":"a","storage_spec":{"nodes":3}}]'
    pools.transfers.configure(same)
    pools.transfers.get_many(get)
    assert len(pools.made) == 2
    pools.transfers.configure(same.replace("3", "4"))
    pools.transfers.get_many(get)
    assert [sdk.fields for sdk in pools.made[2:]] == [{"nodes": 4}]
    with pytest.raises(InvalidArgument, match="storage_configs"):
        pools.transfers.configure("[{}]")
    pools.transfers.close()
    assert [sdk.closed for sdk in pools.made] == [1, 1, 1]


def test_memory_is_announced_to_sdks_made_before_and_after() -> None:
    pools, memory = Pools(), bytearray(64)
    pools.transfers.get_many([("pool://a/0", None)])
    pools.transfers.announce(memory)
    pools.transfers.get_many([("pool://b/0", None)])
    assert [sdk.announced for sdk in pools.made] == [[memory], [memory]]
    with pytest.raises(InvalidArgument, match="writable"):
        pools.transfers.announce(b"fixed")


def test_closing_closes_every_sdk_once_and_later_calls_say_so() -> None:
    pools = Pools()
    pools.transfers.put_many([("pool://a/0", b"1"), ("pool://b/0", b"2")])
    pools.transfers.close()
    pools.transfers.close()
    assert [sdk.closed for sdk in pools.made] == [1, 1]
    (answer,) = pools.transfers.get_many([("pool://a/0", None)])
    assert isinstance(answer, Unavailable)


def test_an_sdk_that_cannot_be_made_is_tried_again() -> None:
    failures = [StorageError("no pool yet")]

    def make(name: str, fields: Mapping[str, Any] | None) -> TransferSdk:
        if failures:
            raise failures.pop()
        return MemorySdk(name, fields)

    transfers = Transfers()
    transfers.register("late", make)
    assert str(transfers.put_many([("late://a/0", b"1")])[0]) == "no pool yet"
    assert transfers.put_many([("late://a/0", b"1")]) == [None]


async def test_the_asyncio_forms_and_an_empty_call() -> None:
    pools = Pools()
    assert await pools.transfers.put_many_async([("pool://a/0", b"1")]) == [None]
    assert await pools.transfers.get_many_async([("pool://a/0", None)]) == [b"1"]
    assert pools.transfers.get_many([]) == []


@pytest.mark.parametrize("scheme", sorted(FILE_SCHEMES))
def test_places_of_uris(scheme: str) -> None:
    assert place_of(f"{scheme}://nfs_01/a?size=1") == (scheme, "nfs_01")
    assert place_of(f"{scheme}://[fd00::1]:80/a?size=1") == (scheme, "[fd00::1]:80")
