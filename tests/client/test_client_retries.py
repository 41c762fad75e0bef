"""Addresses, fail-over, time-outs, and what is sent again (field cases R51, R73, R74)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

from kvcm.client import RetryPolicy
from kvcm.client.addresses import META_PORTS, parse_addresses
from kvcm.core.errors import (
    ErrorCode,
    InvalidArgument,
    KvcmError,
    NotLeader,
    NotReady,
    OutcomeUnknown,
    ReplyTooLarge,
    Unavailable,
    Unsupported,
)
from kvcm.testing.eventually import eventually
from tests.client.conftest import QUICK, Connect, Driver, Serve
from tests.client.stand_in import GrpcServer, StandIn

REGISTER = ("register_instance", "g", "i", 1, {"tp0": 1})
CALLS = {
    "RegisterInstance": REGISTER,
    "GetInstanceInfo": ("get_instance_info", "i"),
    "GetCacheLocation": ("get_cache_location", "i", [1]),
    "GetCacheMeta": ("get_cache_meta", "i", [1]),
    "FinishWriteCache": ("finish_write_cache", "i", "s", [True]),
    "StartWriteCache": ("start_write_cache", "i", [1]),
    "RemoveCache": ("remove_cache", "i", [1]),
    "TrimCache": ("trim_cache", "i"),
}
SAFE = [
    "RegisterInstance",
    "GetInstanceInfo",
    "GetCacheLocation",
    "GetCacheMeta",
    "FinishWriteCache",
]
UNSAFE = ["StartWriteCache", "RemoveCache", "TrimCache"]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of 127.0.0.1 at which connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(64)
        yield held.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", ["grpc://a:1"]),
        ("a", ["grpc://a:6381"]),
        ("http://a", ["http://a:6382"]),
        ("grpc://a:1, http://b:2", ["grpc://a:1", "http://b:2"]),
        ("[::1]:5", ["grpc://[::1]:5"]),
        ("http://[fe80::1]", ["http://[fe80::1]:6382"]),
        (["a:1", "a:1", "b:1"], ["grpc://a:1", "grpc://b:1"]),
    ],
)
def test_addresses_are_read_as_people_write_them(
    text: str | list[str], expected: list[str]
) -> None:
    assert list(map(str, parse_addresses(text, META_PORTS))) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no address"),
        ("ftp://a:1", "scheme"),
        ("::1", "brackets"),
        ("fe80::1:6381", "brackets"),
        ("a:b", "[Pp]ort"),
        ("a:70000", "[Pp]ort"),
        ("a:0", "port 0"),
        ("http://a:1/path", "only scheme"),
        ("user@a:1", "only scheme"),
        ("http://:1", "no host"),
    ],
)
def test_a_wrong_address_is_refused_saying_why(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        parse_addresses(text, META_PORTS)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_time_out_must_be_positive(connect: Connect, timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        connect("a:1", timeout=timeout)


async def test_a_manager_that_does_not_lead_is_passed_over_whatever_the_call(
    serve: Serve, connect: Connect
) -> None:
    follower, leader = StandIn(), StandIn()
    addresses = [serve(follower).address, serve(leader).address]
    for method, call in CALLS.items():
        follower.refuses(method, ErrorCode.SERVER_NOT_LEADER, "ask somebody else")
        driver = connect(addresses)
        await driver.call(*call)
        await driver.call(*call)
        assert len(leader.asked(method)) == 2
        # The second call begins with the address that answered.
        assert len(follower.asked(method)) == 1


async def test_when_no_address_leads_the_error_says_so_and_what_each_said(
    serve: Serve, connect: Connect
) -> None:
    one, two = StandIn(), StandIn()
    one.refuses("TrimCache", ErrorCode.SERVER_NOT_LEADER, "leader is 10.0.0.9:6381")
    two.refuses("TrimCache", ErrorCode.SERVER_NOT_LEADER, "no leader known")
    addresses = [serve(one).address, serve(two).address]
    driver = connect(addresses)
    with pytest.raises(NotLeader) as caught:
        await driver.call("trim_cache", "i")
    for text in (*addresses, "leader is 10.0.0.9:6381", "no leader known", "no address leads"):
        assert text in str(caught.value)


async def test_a_leader_that_appears_during_the_call_is_found(
    serve: Serve, connect: Connect
) -> None:
    one, two = StandIn(), StandIn()
    for stand_in in (one, two):
        stand_in.refuses("StartWriteCache", ErrorCode.SERVER_NOT_LEADER)
    stand_in_ok = StandIn().handle
    first = one.script["StartWriteCache"][0]
    one.script["StartWriteCache"] = [first, lambda r: stand_in_ok("StartWriteCache", r)]
    driver = connect([serve(one).address, serve(two).address])
    await driver.call("start_write_cache", "i", [1])
    assert len(one.asked("StartWriteCache")) == 2
    assert len(two.asked("StartWriteCache")) == 1


async def test_a_refused_connection_moves_any_call_to_the_next_address(
    serve: Serve, connect: Connect, closed_port: int, transport: str
) -> None:
    manager = StandIn()
    addresses = [f"{transport}://127.0.0.1:{closed_port}", serve(manager).address]
    for method, call in CALLS.items():
        await connect(addresses).call(*call, timeout=5)
        assert len(manager.asked(method)) == 1


async def test_an_address_that_never_answers_the_connection_costs_little_time(
    serve: Serve, connect: Connect, silent_port: int, transport: str
) -> None:
    if transport == "http":
        pytest.skip("an HTTP connection counts as made once TCP accepts it")
    manager = StandIn()
    driver = connect([f"grpc://127.0.0.1:{silent_port}", serve(manager).address])
    await driver.call("start_write_cache", "i", [1], timeout=8)
    assert len(manager.asked("StartWriteCache")) == 1


async def test_when_nobody_can_be_reached_the_error_is_unavailable_and_names_all(
    connect: Connect, closed_port: int, transport: str
) -> None:
    address = f"{transport}://127.0.0.1:{closed_port}"
    with pytest.raises(Unavailable):
        await connect(address).call("start_write_cache", "i", [1])
    two = connect([address, f"{transport}://localhost:{closed_port}"])
    with pytest.raises(Unavailable, match=f"{address}.*localhost"):
        await two.call("start_write_cache", "i", [1])


async def test_an_unknown_host_name_is_unavailable(connect: Connect, transport: str) -> None:
    driver = connect(f"{transport}://no-such-host.invalid:1", timeout=5)
    with pytest.raises(Unavailable):
        await driver.call("start_write_cache", "i", [1])


async def test_a_safe_call_whose_reply_is_lost_is_sent_again_unchanged(
    manager: StandIn, driver: Driver
) -> None:
    for method in SAFE:
        manager.loses_replies(method)
        await driver.call(*CALLS[method])
        first, second = manager.asked(method)
        assert first == second


async def test_an_unsafe_call_whose_reply_is_lost_is_not_sent_again(
    manager: StandIn, driver: Driver
) -> None:
    for method in UNSAFE:
        manager.loses_replies(method)
        with pytest.raises(OutcomeUnknown):
            await driver.call(*CALLS[method])
        assert len(manager.asked(method)) == 1


@pytest.mark.parametrize("method", ["GetCacheLocation", "StartWriteCache"])
async def test_a_manager_that_is_not_ready_is_asked_again(
    manager: StandIn, driver: Driver, method: str
) -> None:
    manager.refuses(method, ErrorCode.SERVICE_NOT_READY, "recovering")
    with pytest.raises(NotReady, match="recovering"):
        await driver.call(*CALLS[method])
    assert len(manager.asked(method)) == QUICK.rounds_max


@pytest.mark.parametrize(("method", "times"), [("GetCacheLocation", 3), ("StartWriteCache", 1)])
async def test_an_outcome_the_manager_does_not_know_is_repeated_only_where_that_is_safe(
    manager: StandIn, driver: Driver, method: str, times: int
) -> None:
    manager.refuses(method, ErrorCode.SERVICE_NOT_READY, "store timed out", "OUTCOME_UNKNOWN")
    with pytest.raises(OutcomeUnknown, match="store timed out"):
        await driver.call(*CALLS[method])
    assert len(manager.asked(method)) == times


async def test_other_errors_are_not_retried(manager: StandIn, driver: Driver) -> None:
    manager.refuses("GetCacheLocation", ErrorCode.INTERNAL_ERROR, "a fault")
    with pytest.raises(KvcmError, match="a fault"):
        await driver.call("get_cache_location", "i", [1])
    assert len(manager.requests) == 1


@pytest.mark.parametrize("method", ["GetCacheLocation", "StartWriteCache"])
async def test_a_call_ends_at_its_time_out(manager: StandIn, driver: Driver, method: str) -> None:
    await driver.call("trim_cache", "i")
    manager.hangs(method)
    begin = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="no reply within"):
        await driver.call(*CALLS[method], timeout=0.2)
    assert 0.19 <= time.monotonic() - begin < 2.0


async def test_the_time_out_of_the_client_holds_for_calls_without_one(
    manager: StandIn, serve: Serve, connect: Connect
) -> None:
    manager.hangs("TrimCache")
    begin = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        await connect(serve(manager).address, timeout=0.2).call("trim_cache", "i")
    assert time.monotonic() - begin < 2.0


async def test_after_a_time_out_the_next_call_begins_with_another_address(
    serve: Serve, connect: Connect
) -> None:
    stuck, well = StandIn(), StandIn()
    stuck.hangs("GetCacheLocation")
    driver = connect([serve(stuck).address, serve(well).address])
    with pytest.raises(OutcomeUnknown):
        await driver.call("get_cache_location", "i", [1], timeout=0.3)
    await driver.call("get_cache_location", "i", [1], timeout=5)
    assert len(well.asked("GetCacheLocation")) == 1


async def test_a_manager_that_comes_back_is_found_again(
    serve: Serve, connect: Connect, manager: StandIn
) -> None:
    first = serve(manager)
    driver = connect(first.address)
    await driver.call("trim_cache", "i")
    first.stop()
    with pytest.raises(NotReady):
        await driver.call("trim_cache", "i")
    serve(manager, port=first.port)

    async def trimmed() -> bool:
        try:
            await driver.call("trim_cache", "i")
        except NotReady:
            return False
        return True

    await eventually(trimmed)


async def test_a_reply_above_the_receive_limit_is_an_error_that_says_so(
    manager: StandIn, serve: Serve, connect: Connect
) -> None:
    location = {"location_specs": [{"name": "tp0", "uri": "x" * 1000}]}
    manager.answers("GetCacheLocation", locations=[location] * 10)
    driver = connect(serve(manager).address, receive_bytes_max=5_000)
    with pytest.raises(ReplyTooLarge, match="5000"):
        await driver.call("get_cache_location", "i", [1])


async def test_a_call_that_the_manager_does_not_know_is_unsupported(
    serve: Serve, connect: Connect
) -> None:
    driver = connect(serve(StandIn()).address, admin=True)
    with pytest.raises(Unsupported):
        await driver.call("list_storage")


async def test_a_closed_client_says_so(driver: Driver) -> None:
    await driver.call("trim_cache", "i")
    await driver.close()
    with pytest.raises(Unavailable, match="closed"):
        await driver.call("trim_cache", "i")


async def test_both_transports_may_be_mixed(
    connect: Connect, serve: Serve, closed_port: int
) -> None:
    manager = StandIn()
    address = serve(manager).address
    other = "http" if address.startswith("grpc") else "grpc"
    driver = connect(f"{other}://127.0.0.1:{closed_port},{address}")
    await driver.call("trim_cache", "i", timeout=5)
    assert len(manager.requests) == 1


async def test_many_calls_at_once_share_a_client(manager: StandIn, driver: Driver) -> None:
    await asyncio.gather(
        *(driver.call("get_cache_location", "i", [n], timeout=10) for n in range(50))
    )
    asked = {request.block_keys[0] for request in manager.asked("GetCacheLocation")}
    assert asked == set(range(50))


def ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not ipv6_works(), reason="no IPv6 loopback here")
async def test_ipv6_addresses_work(connect: Connect) -> None:
    manager = StandIn()
    server = GrpcServer(manager, host="::1")
    try:
        await connect(f"[::1]:{server.port}").call("trim_cache", "i", timeout=5)
        assert len(manager.requests) == 1
    finally:
        server.stop()


class Half:
    """A clock whose chance is a constant."""

    def __init__(self, byte: int) -> None:
        self.byte = byte

    def now(self) -> float:
        return 0.0

    monotonic = now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError

    def random_bytes(self, count: int) -> bytes:
        return bytes([self.byte] * count)


def test_pauses_double_up_to_a_limit_and_are_jittered() -> None:
    policy = RetryPolicy(backoff_s=0.1, backoff_s_max=0.5)
    assert [policy.pause(n, Half(255)) for n in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert [policy.pause(n, Half(0)) for n in range(4)] == pytest.approx([0.05, 0.1, 0.2, 0.25])
