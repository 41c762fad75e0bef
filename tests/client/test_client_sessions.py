"""Write sessions finish with what really succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcm.client import AsyncClient, Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import (
    CapacityReached,
    InvalidArgument,
    KvcmError,
    OutcomeUnknown,
    SessionNotExist,
    StorageError,
)
from kvcm.testing.eventually import eventually
from tests.client.conftest import Connect, Driver, Serve
from tests.client.stand_in import GrpcServer, StandIn


def location(name: str = "x", specs: Sequence[str] = ("tp0",)) -> dict[str, Any]:
    return {
        "type": 4,
        "spec_size": len(specs),
        "location_specs": [{"name": s, "uri": f"file://n/{name}_{s}?size=4"} for s in specs],
    }


def grants(manager: StandIn, count: int, **mask: Any) -> None:
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask=mask or {"offset": 0},
        locations=[location(str(j)) for j in range(count)],
    )


def finished(manager: StandIn) -> Any:
    """The mask of the only finish."""
    (request,) = manager.asked("FinishWriteCache")
    assert (request.instance_id, request.write_session_id) == ("i1", "s1")
    mask = request.success_blocks
    if mask.WhichOneof("info") == "offset":
        return mask.offset
    return list(mask.bool_masks.values)


async def test_all_done_publishes_all(manager: StandIn, driver: Driver) -> None:
    grants(manager, 3, offset=1)
    seen = []

    def body(session: Any) -> None:
        for i, place in session:
            seen.append((i, place.specs["tp0"]))
            session.done(i)
        assert len(session) == 3
        assert session.succeeded == (1, 2, 3)

    await driver.write(body, "i1", [10, 11, 12, 13], write_timeout_s=9)
    assert seen == [(j + 1, f"file://n/{j}_tp0?size=4") for j in range(3)]
    assert finished(manager) == 3
    assert manager.asked("StartWriteCache")[0].write_timeout_seconds == 9


@pytest.mark.parametrize(
    ("done", "mask"),
    [
        ((), 0),
        ((0,), 1),
        ((0, 3), 2),
        ((3, 5), [False, True, True]),
        ((0, 5), [True, False, True]),
    ],
)
async def test_blocks_nobody_marks_done_count_as_failed(
    manager: StandIn, driver: Driver, done: tuple[int, ...], mask: Any
) -> None:
    """Keys 0, 3 and 5 were granted."""
    grants(manager, 3, bool_masks={"values": [False, True, True, False, True, False]})

    def body(session: Any) -> None:
        for i in done:
            session.done(i)

    await driver.write(body, "i1", range(6))
    assert finished(manager) == mask


async def test_a_block_reported_failed_after_done_is_failed(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 2)

    def body(session: Any) -> None:
        session.done(0)
        session.done(1)
        session.fail(0)

    await driver.write(body, "i1", [1, 2])
    assert finished(manager) == [False, True]


async def test_a_session_that_granted_nothing_finishes_with_the_empty_form(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 0, offset=2)
    await driver.write(lambda session: None, "i1", [1, 2])
    assert finished(manager) == []


async def test_marking_a_block_that_was_not_granted_is_an_error(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 1, offset=1)

    def body(session: Any) -> None:
        for mark in (session.done, session.fail):
            for index in (0, 2, -1):
                with pytest.raises(InvalidArgument, match="granted"):
                    mark(index)

    await driver.write(body, "i1", [1, 2])
    assert finished(manager) == 0


async def test_an_exception_publishes_what_was_done_and_goes_on(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 3)

    def body(session: Any) -> None:
        session.done(0)
        session.done(2)
        raise ZeroDivisionError("engine failed")

    with pytest.raises(ZeroDivisionError, match="engine failed"):
        await driver.write(body, "i1", [1, 2, 3])
    assert finished(manager) == [True, False, True]


async def test_a_failed_finish_never_hides_the_exception(manager: StandIn, driver: Driver) -> None:
    grants(manager, 1)
    manager.refuses("FinishWriteCache", 5, "session is over", "SESSION_NOT_EXIST")

    def body(session: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await driver.write(body, "i1", [1])
    assert "session is over" in caught.value.__notes__[0]


async def test_a_lost_finish_is_repeated_with_the_same_mask(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 3)
    manager.loses_replies("FinishWriteCache", 2)
    await driver.write(lambda session: session.done(1), "i1", [1, 2, 3])
    requests = manager.asked("FinishWriteCache")
    assert len(requests) == 3
    assert requests[0] == requests[1] == requests[2]
    assert list(requests[0].success_blocks.bool_masks.values) == [False, True, False]


async def test_a_finish_that_timed_out_is_repeated_with_a_time_out_of_its_own(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 1)
    manager.hangs("FinishWriteCache")
    hang = manager.script["FinishWriteCache"][0]
    reply = StandIn().handle
    manager.script["FinishWriteCache"] = [hang, lambda r: reply("FinishWriteCache", r)]
    await driver.write(lambda session: session.done(0), "i1", [1], timeout=0.5)
    assert len(manager.asked("FinishWriteCache")) == 2


async def test_a_finish_without_any_reply_is_an_unknown_outcome(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 1)
    manager.loses_replies("FinishWriteCache", 99)
    with pytest.raises(OutcomeUnknown):
        await driver.write(lambda session: session.done(0), "i1", [1])


async def test_an_expired_session_says_that_nothing_was_published(
    manager: StandIn, driver: Driver
) -> None:
    grants(manager, 1)
    manager.refuses("FinishWriteCache", 5, "write session s1 is over", "SESSION_NOT_EXIST")
    with pytest.raises(SessionNotExist, match="s1 is over") as caught:
        await driver.write(lambda session: session.done(0), "i1", [1])
    assert any("published" in note for note in caught.value.__notes__)


async def test_a_refused_start_runs_no_body_and_no_finish(manager: StandIn, driver: Driver) -> None:
    manager.refuses("StartWriteCache", 7, "the group is full", "QUOTA_GROUP")

    def body(session: Any) -> None:
        raise AssertionError

    with pytest.raises(CapacityReached, match="the group is full") as caught:
        await driver.write(body, "i1", [1])
    assert caught.value.reason == "QUOTA_GROUP"
    assert manager.asked("FinishWriteCache") == []


def test_a_session_outside_a_with_statement_says_so() -> None:
    session = Client("a:1").write("i1", [1])
    with pytest.raises(InvalidArgument, match="with statement"):
        session.done(0)


class Picky:
    """An SDK that fails for some URIs."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.items: list[tuple[str, Any]] = []

    def put_many(self, items: Sequence[tuple[str, Any]]) -> list[KvcmError | None]:
        self.items += items
        return [StorageError("disk") if self.fails in uri else None for uri, _ in items]


@pytest.fixture
def server(manager: StandIn) -> Any:
    running = GrpcServer(manager)
    yield running
    running.stop()


async def put(address: str, kind: str, sdk: Any, buffers: Any, **options: Any) -> Any:
    """Session.put of keys 0..2 with either kind of client."""
    if kind == "async":
        async with AsyncClient(address) as client, client.write("i1", range(3)) as session:
            return await session.put(sdk, buffers, **options)

    def run() -> Any:
        with Client(address) as client, client.write("i1", range(3)) as session:
            return session.put(sdk, buffers, **options)

    return await asyncio.to_thread(run)


async def test_put_marks_each_block_by_what_its_write_answered(
    manager: StandIn, server: GrpcServer, flavour: str
) -> None:
    grants(manager, 2, offset=1)
    sdk = Picky("/1_")
    errors = await put(server.address, flavour, sdk, [b"aaaa", b"bbbb", b"cccc"])
    assert [(uri, bytes(data)) for uri, data in sdk.items] == [
        ("file://n/0_tp0?size=4", b"bbbb"),
        ("file://n/1_tp0?size=4", b"cccc"),
    ]
    assert list(errors) == [2]
    assert isinstance(errors[2], StorageError)
    assert finished(manager) == 1


async def test_a_block_is_done_only_when_all_its_specs_are(
    manager: StandIn, server: GrpcServer, flavour: str
) -> None:
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask={"offset": 1},
        locations=[location("a", ("tp0", "tp1")), location("b", ("tp0", "tp1"))],
    )
    sdk = Picky("a_tp1")
    buffers = {i: {"tp0": b"0000", "tp1": b"1111"} for i in (1, 2)}
    errors = await put(server.address, flavour, sdk, buffers)
    assert list(errors) == [1]
    assert finished(manager) == [False, True]


async def test_put_of_named_specs_writes_only_those(
    manager: StandIn, server: GrpcServer, flavour: str
) -> None:
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask={"offset": 2},
        locations=[location("a", ("tp0", "tp1"))],
    )
    sdk = Picky("none")
    await put(server.address, flavour, sdk, {2: b"1111"}, spec_names=["tp1"])
    assert [uri for uri, _ in sdk.items] == ["file://n/a_tp1?size=4"]
    assert finished(manager) == 1


@pytest.mark.parametrize(
    ("buffers", "why"),
    [({2: b"x"}, "mapping"), ({2: {"tp0": b"x"}}, "tp1"), ({2: {"tp9": b"x"}}, "tp0")],
)
async def test_put_with_missing_buffers_is_refused_and_publishes_nothing(
    manager: StandIn, server: GrpcServer, flavour: str, buffers: Any, why: str
) -> None:
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask={"offset": 2},
        locations=[location("a", ("tp0", "tp1"))],
    )
    with pytest.raises(InvalidArgument, match=why):
        await put(server.address, flavour, Picky("none"), buffers)
    assert finished(manager) == 0


async def test_put_with_the_file_sdk_moves_real_bytes(
    manager: StandIn, server: GrpcServer, flavour: str, tmp_path: Path
) -> None:
    uris = [f"file://n{tmp_path}/sub/f?blkid={j}&size=4" for j in range(3)]
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask={"offset": 0},
        locations=[
            {"type": 4, "spec_size": 1, "location_specs": [{"name": "tp0", "uri": uri}]}
            for uri in uris
        ],
    )
    errors = await put(server.address, flavour, FileSdk(), [b"aaaa", b"too long", b"cccc"])
    assert list(errors) == [1]
    assert finished(manager) == [True, False, True]
    assert FileSdk().get_many([(uris[0], None), (uris[2], None)]) == [b"aaaa", b"cccc"]


async def test_a_cancelled_session_finishes_with_what_was_done(
    manager: StandIn, server: GrpcServer
) -> None:
    grants(manager, 2)
    entered = asyncio.Event()

    async def work(client: AsyncClient) -> None:
        async with client.write("i1", [1, 2]) as session:
            session.done(0)
            entered.set()
            await asyncio.Event().wait()

    async with AsyncClient(server.address) as client:
        task = asyncio.create_task(work(client))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert finished(manager) == 1


async def test_a_second_cancellation_does_not_stop_the_finish(
    manager: StandIn, server: GrpcServer
) -> None:
    grants(manager, 1)
    manager.hangs("FinishWriteCache")
    hang = manager.script["FinishWriteCache"][0]
    reply = StandIn().handle
    manager.script["FinishWriteCache"] = [hang, lambda r: reply("FinishWriteCache", r)]
    entered = asyncio.Event()

    async def work(client: AsyncClient) -> None:
        async with client.write("i1", [1]) as session:
            session.done(0)
            entered.set()
            await asyncio.Event().wait()

    async with AsyncClient(server.address, timeout=1.0) as client:
        task = asyncio.create_task(work(client))
        await entered.wait()
        task.cancel()
        await eventually(lambda: manager.asked("FinishWriteCache"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # Closing the client waited for the finish, which was repeated after its time-out.
    assert len(manager.asked("FinishWriteCache")) == 2


async def test_keys_sent_to_lookup_and_to_write_are_the_same(
    manager: StandIn, serve: Serve, connect: Connect
) -> None:
    """Field case R23."""
    driver = connect(serve(manager).address)
    keys = [3, -4, 5]
    grants(manager, 3)
    await driver.call("get_cache_location", "i1", keys)
    await driver.write(lambda session: None, "i1", keys)
    assert manager.asked("GetCacheLocation")[0].block_keys == keys
    assert manager.asked("StartWriteCache")[0].block_keys == keys
