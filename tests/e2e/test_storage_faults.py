"""A storage that fails hurts nobody: its blocks are misses, all else goes on, and it comes back."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_harness import run
from fault_rig import (
    BLOCK_BYTES,
    BLOCKS,
    DISK,
    FAULTY,
    FINE,
    HUNG_S,
    PERIOD_S,
    SETTINGS,
    Chain,
    Rig,
    Stopwatch,
)
from fault_rig import fault_rig as made_rig

from kvcm.client import Client
from kvcm.core.types import ReportOutcome
from kvcm.testing.eventually import eventually_sync

SLACK_S = 4.0
"""A busy machine's."""
LOOKUP_S = 1.0
WRITE_S = 2.0
"""The client's default time-out. A first write waits up to a second for its folders, a report as
long for a look at what it tells of."""


@dataclass(frozen=True, slots=True)
class Fault:
    """How a storage is broken and mended, and what operators read of it."""

    storage: str
    reason: str
    begin: Callable[[Rig], None]
    end: Callable[[Rig], None]


AWAY = {
    "unmounted": Fault(DISK, "is its file system mounted?", Rig.unmount, Rig.mount),
    "hung": Fault(
        FAULTY,
        f"no answer within {HUNG_S:g} s",
        lambda rig: rig.faulty.hang(),
        lambda rig: rig.faulty.heal(),
    ),
    "crawling": Fault(
        FAULTY,
        f"no answer within {HUNG_S:g} s",
        lambda rig: rig.faulty.slow(HUNG_S / 4),
        lambda rig: rig.faulty.heal(),
    ),
    "no permission": Fault(
        FAULTY,
        "Permission denied",
        lambda rig: rig.faulty.fail(errno.EACCES),
        lambda rig: rig.faulty.heal(),
    ),
    "writes fail": Fault(
        FAULTY,
        "Input/output error",
        lambda rig: rig.faulty.fail_writes(errno.EIO),
        lambda rig: rig.faulty.heal(),
    ),
    "stale": Fault(
        FAULTY,
        "Stale file handle",
        lambda rig: rig.faulty.fail(errno.ESTALE),
        lambda rig: rig.faulty.heal(),
    ),
}
READABLE = {
    "full": Fault(DISK, "No space left on device", Rig.fill, Rig.empty),
    "read-only": Fault(
        DISK,
        "Read-only file system",
        lambda rig: rig.read_only(True),
        lambda rig: rig.read_only(False),
    ),
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with made_rig(tmp_path_factory.mktemp("rig")) as made:
        yield made


@pytest.fixture
def client(rig: Rig) -> Iterator[Client]:
    with Client(rig.site.target) as made:
        yield made


def hits(client: Client, instance: str, chain: Chain) -> int:
    return len(client.get_cache_location(instance, chain.keys))


def all_right(rig: Rig, client: Client, instance: str, chains: list[Chain]) -> bool:
    return all(
        rig.read(client.get_cache_location(instance, chain.keys).locations) == chain.blocks
        for chain in chains
    )


def register(client: Client, group: str, instance: str) -> None:
    client.register_instance(group, instance, 4, {"tp0": BLOCK_BYTES})


@pytest.mark.parametrize("name", AWAY)
def test_r60_a_storage_that_is_away_costs_its_own_hits_only_and_comes_back(
    rig: Rig, client: Client, name: str
) -> None:
    fault = AWAY[name]
    register(client, fault.storage, name)
    chains = rig.write_both(client, name, fault.storage)
    broken, fine = chains[fault.storage], chains[FINE]
    held = rig.held(fault.storage)
    places = client.get_cache_location(name, broken[0].keys).locations
    timed = Stopwatch()

    def look_and_write() -> bool:
        """One round of an engine's calls; whether the storage is out of use."""
        found = [timed("lookup", lambda c=c: hits(client, name, c)) for c in broken]
        assert all(timed("lookup", lambda c=c: hits(client, name, c)) for c in fine)
        timed("write", lambda: client.start_write_cache(name, rig.keys()))
        return not any(found)

    fault.begin(rig)
    try:
        begun = time.monotonic()
        # Its folders are not made yet, so that its first write must touch the storages.
        register(client, fault.storage, f"{name} new")
        timed("write", lambda: client.start_write_cache(f"{name} new", rig.keys()))
        # Readers complain before the manager knows; what they miss is there all the same.
        told = timed("report", lambda: client.report_cache_error(name, broken[0].keys, places))
        assert ReportOutcome.ACCEPTED not in told.outcomes
        eventually_sync(look_and_write, timeout=30)
        assert time.monotonic() - begun < PERIOD_S + 2 * HUNG_S + SLACK_S

        status = rig.storage(fault.storage)
        assert fault.reason in status.unavailable_reason
        labels = {"storage": fault.storage, "state": "unavailable"}
        assert rig.metric("kvcm_storage_state", **labels) == 1
        log = rig.site.log.read_text()
        assert f"storage {fault.storage!r} is unavailable: {status.unavailable_reason}" in log
        for _ in range(4):
            assert timed("write", lambda: rig.write(client, name)).storage == FINE
        assert all_right(rig, client, name, fine)
        assert rig.held(fault.storage)["serving_blocks"] == held["serving_blocks"]
        assert rig.storage(FINE).unavailable_reason == ""
    finally:
        fault.end(rig)
    assert timed.longest_s["lookup"] < LOOKUP_S
    assert timed.longest_s["write"] < WRITE_S
    assert timed.longest_s["report"] < WRITE_S

    eventually_sync(
        lambda: all(hits(client, name, chain) for chain in broken),
        timeout=PERIOD_S + 2 * HUNG_S + 2 * SLACK_S,
    )
    assert all_right(rig, client, name, broken + fine)
    assert rig.storage(fault.storage).unavailable_reason == ""
    eventually_sync(lambda: rig.write(client, name).storage == fault.storage)


@pytest.mark.parametrize("name", READABLE)
def test_a_storage_that_takes_no_writes_is_read_and_passed_over_by_writers(
    rig: Rig, client: Client, name: str
) -> None:
    fault = READABLE[name]
    register(client, fault.storage, name)
    chains = rig.write_both(client, name, fault.storage)
    everything = [chain for part in chains.values() for chain in part]
    fault.begin(rig)
    try:
        eventually_sync(lambda: fault.reason in rig.storage(fault.storage).unwritable_reason)
        assert rig.storage(fault.storage).unavailable_reason == ""
        assert rig.metric("kvcm_storage_writable", storage=fault.storage) == 0
        for _ in range(4):
            assert rig.write(client, name).storage == FINE
        assert all_right(rig, client, name, everything)
    finally:
        fault.end(rig)
    eventually_sync(lambda: rig.write(client, name).storage == fault.storage)
    assert rig.storage(fault.storage).unwritable_reason == ""
    assert all_right(rig, client, name, everything)


def test_what_did_not_fit_is_not_published(rig: Rig, client: Client) -> None:
    register(client, DISK, "late")
    with rig.granted(client, "late", DISK) as (keys, session):
        # Only now, so that the manager granted what cannot be written.
        rig.fill()
        try:
            errors = session.put(rig, [bytes(BLOCK_BYTES)] * BLOCKS)
        finally:
            rig.empty()
    assert len(errors) == BLOCKS
    assert hits(client, "late", Chain(keys, [], DISK)) == 0
    eventually_sync(lambda: rig.storage(DISK).unwritable_reason == "")


def test_an_engine_does_not_write_below_a_mount_that_is_gone(rig: Rig, client: Client) -> None:
    register(client, DISK, "below")
    with rig.granted(client, "below", DISK) as (keys, session):
        # Before the manager knows; the same holds for an engine that alone lost its mount.
        rig.unmount()
        try:
            errors = session.put(rig, [bytes(BLOCK_BYTES)] * BLOCKS)
        finally:
            rig.mount()
    assert len(errors) == BLOCKS
    assert "is its file system mounted" in str(errors[0])
    assert hits(client, "below", Chain(keys, [], DISK)) == 0
    eventually_sync(lambda: rig.storage(DISK).unavailable_reason == "")


def test_a_manager_ends_and_starts_in_time_while_a_storage_hangs(tmp_path: Path) -> None:
    with made_rig(tmp_path) as rig, Client(rig.site.target) as client:
        register(client, FAULTY, "i")
        chains = rig.write_both(client, "i", FAULTY)
        rig.faulty.hang()
        eventually_sync(lambda: rig.storage(FAULTY).unavailable_reason, timeout=30)
        # What it is to delete it cannot reach either.
        client.remove_cache("i", chains[FAULTY][0].keys)

        target = f"grpc://127.0.0.1:{rig.site.ready['admin_rpc_port']}"
        listed = run("admin", "storage", "list", "--json", "--target", target)
        assert f"no answer within {HUNG_S:g} s" in next(
            s["unavailable_reason"]
            for s in json.loads(listed.stdout)
            if s["global_unique_name"] == FAULTY
        )

        begun = time.monotonic()
        assert rig.site.stop() == 0
        assert time.monotonic() - begun < 2 * HUNG_S + SLACK_S
        begun = time.monotonic()
        rig.site.start(settings=SETTINGS)
        assert time.monotonic() - begun < 2 * rig.start_s + 2 * HUNG_S + SLACK_S
        assert all_right(rig, client, "i", chains[FINE])
        assert hits(client, "i", chains[FAULTY][1]) == 0
        assert rig.held(FAULTY)["trash_bytes"] == BLOCKS * BLOCK_BYTES

        rig.faulty.heal()
        eventually_sync(lambda: hits(client, "i", chains[FAULTY][1]), timeout=30)
        assert all_right(rig, client, "i", chains[FAULTY][1:])
        # What was removed meanwhile is deleted now.
        eventually_sync(lambda: rig.held(FAULTY)["trash_bytes"] == 0, timeout=30)
