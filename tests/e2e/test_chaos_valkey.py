"""Everything at once, in real processes: writers and readers, a manager and a Valkey that are
killed, paused and restarted. No wrong byte, nothing acknowledged lost, nothing stuck.

Longer: ``KVCM_CHAOS_S=600 make soak ARGS="-k chaos"``; ``KVCM_CHAOS_SEED`` repeats a run's events.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import chaos_engine
import pytest
from chaos_engine import CHAIN, CHAINS, CHURN, GENERATION_S, KEEP, SIZE, SPEC, Plan, Tally, key_of
from e2e_harness import PATIENCE_S, STORAGE, WRITE_TIMEOUT_S, Site, environment

from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import CapacityReached, NotReady
from kvcm.core.types import QueryType
from kvcm.testing.eventually import eventually_sync, last
from kvcm.testing.servers_valkey import ValkeyServer, valkey_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROCESSES, TASKS = 4, 4
CI_S = 15.0
"""And until each kind of event has come once."""
SOAK_S = float(os.environ.get("KVCM_CHAOS_S", "180"))
# Bytes of a block that Valkey forgot to have given up must still be there (docs/operations.md).
GRACE_S = 4
LOSS_S = 2.0
"""What ``appendfsync everysec`` may lose, as docs/operations.md says."""
SETTINGS = (
    f"cache.write_timeout_s_default={WRITE_TIMEOUT_S}",
    f"cache.write_timeout_s_max={WRITE_TIMEOUT_S}",
    f"cache.grace_s_min={GRACE_S}",
    "drain_s=5",
)


def bootstrap(site: Site) -> None:
    """Add a group whose quota holds a fifth of what CHURN's keys take."""
    document = json.loads(site.bootstrap.read_text())
    capacity = CHAIN * CHAINS * SIZE // 5
    document["instance_groups"].append(
        {
            "name": "small",
            "storage_candidates": [STORAGE],
            "quota": {"capacity": capacity},
            "cache_config": {
                "reclaim_strategy": {"trigger_strategy": {"used_percentage": 0.8}},
                "meta_indexer_config": {"mutex_shard_num": 16},
            },
        }
    )
    site.bootstrap.write_text(json.dumps(document))


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ValkeyServer]:
    with valkey_server("appendonly yes", f"appendfsync {request.param}") as server:
        yield server


class Chaos:
    """One run: engines, events, and what must hold at the end."""

    def __init__(self, site: Site, server: ValkeyServer, seed: int) -> None:
        self.site = site
        self.server = server
        self.chance = random.Random(seed)
        self.valkey_kills: list[float] = []
        self.began = time.monotonic()

    # ---- events ------------------------------------------------------------------------------

    def kill_valkey(self) -> None:
        """kill -9, and a start from the append-only file."""
        self.server.kill()
        self.valkey_kills.append(time.monotonic())
        last(self.chance.uniform(0.0, 1.5))
        self.server.start()

    def pause_valkey(self) -> None:
        """It takes connections and answers nothing."""
        self.server.pause()
        last(self.chance.uniform(0.5, 4.0))
        self.server.resume()

    def pause_and_kill_valkey(self) -> None:
        """As a machine that hangs before it dies."""
        self.server.pause()
        last(self.chance.uniform(0.2, 2.0))
        self.kill_valkey()

    def kill_manager(self) -> None:
        """kill -9 and a start; the first lookups meet an index that is being loaded."""
        self.site.kill()
        self.site.start(settings=SETTINGS)

    def run(self, seconds: float, engines: list[subprocess.Popen[str]]) -> None:
        """Events, each followed by some quiet; the first four are one of each kind."""
        events = [
            self.kill_valkey,
            self.pause_valkey,
            self.kill_manager,
            self.pause_and_kill_valkey,
        ]
        end = self.began + seconds
        number = 0
        while time.monotonic() < end or number < len(events):
            last(self.chance.uniform(1.5, 3.5))
            event = events[number] if number < len(events) else self.chance.choice(events)
            number += 1
            event()
            assert all(engine.poll() is None for engine in engines), "an engine died"

    # ---- engines -----------------------------------------------------------------------------

    def engine(self, number: int) -> subprocess.Popen[str]:
        plan = Plan(
            target=self.site.target,
            seed=self.chance.randrange(1 << 30),
            tasks=TASKS,
            acks=str(self.site.folder / f"acks{number}"),
            began=self.began,
        )
        return subprocess.Popen(
            [sys.executable, chaos_engine.__file__, json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    # ---- the end -----------------------------------------------------------------------------

    def acknowledged(self) -> dict[int, tuple[float, float]]:
        """Each key whose finish was answered: when the latest one was sent and answered."""
        acks: dict[int, tuple[float, float]] = {}
        for path in self.site.folder.glob("acks*"):
            for line in path.read_text().splitlines():
                sent, answered, key = line.split()
                acks[int(key)] = max(acks.get(int(key), (0.0, 0.0)), (float(sent), float(answered)))
        return acks

    def may_be_lost(self, sent: float, answered: float) -> bool:
        """Whether its commit can lie in a window that Valkey loses when it is killed."""
        return any(sent <= kill and answered >= kill - LOSS_S for kill in self.valkey_kills)


def readable(client: Client, instance: str, keys: list[int]) -> set[int]:
    """Those that are answered. Now that all is quiet, every answer must have its bytes."""
    found: set[int] = set()
    for first in range(0, len(keys), 500):
        part = keys[first : first + 500]
        answer = client.get_cache_location(instance, part, query=QueryType.BATCH_GET)
        uris = [location.specs.get(SPEC, "") for location in answer.locations]
        data = iter(FileSdk().get_many([(uri, None) for uri in uris if uri]))
        for key, uri in zip(part, uris, strict=True):
            if uri:
                got = next(data)
                assert isinstance(got, bytes), f"{instance} block {key} at {uri}: {got!r}"
                assert chaos_engine.is_right(instance, key, got), f"{instance} block {key} at {uri}"
                found.add(key)
    return found


def check_writable(client: Client, instance: str, keys: list[int]) -> None:
    """Each key is there, or can be written and is there then."""
    for first in range(0, len(keys), CHAIN):
        part = keys[first : first + CHAIN]

        def written(part: list[int] = part) -> bool:
            try:
                with client.write(instance, part) as session:
                    blocks = {
                        i: chaos_engine.content(instance, part[i], b"the end.") for i, _ in session
                    }
                    assert session.put(FileSdk(), blocks) == {}
            except CapacityReached:
                return False  # Until eviction has made room.
            return readable(client, instance, part) == set(part)

        eventually_sync(written, timeout=PATIENCE_S, interval=0.2)


def chaos(site: Site, server: ValkeyServer, policy: str, seconds: float) -> dict[str, Any]:
    seed = int(os.environ.get("KVCM_CHAOS_SEED") or time.time_ns() % 1_000_000)
    print(f"KVCM_CHAOS_SEED={seed}")  # noqa: T201 - shown when it fails
    site.index_url = f"{server.url}?timeout_ms=1000&connect_timeout_ms=1000"
    bootstrap(site)
    site.start(settings=SETTINGS)
    with site.client() as client:
        client.register_instance("default", KEEP, 4, {SPEC: SIZE})
        client.register_instance("small", CHURN, 4, {SPEC: SIZE})
    run = Chaos(site, server, seed)
    with ExitStack() as stack:
        engines = [run.engine(number) for number in range(PROCESSES)]
        for engine in engines:
            stack.callback(engine.kill)
        run.run(seconds, engines)
        outs = [engine.communicate(timeout=PATIENCE_S)[0] for engine in engines]
        assert [engine.returncode for engine in engines] == [0] * PROCESSES
    tallies = [Tally(**json.loads(out)) for out in outs]
    assert [w for t in tallies for w in t.wrong] == []
    assert [f for t in tallies for f in t.faults] == []
    # A start or finish with a retry, and the bytes between them.
    assert max(t.slowest_s for t in tallies) < 4 * chaos_engine.CALL_S
    return check_the_end(run, tallies, policy)


def check_the_end(run: Chaos, tallies: list[Tally], policy: str) -> dict[str, Any]:
    site, acks = run.site, run.acknowledged()
    assert len(acks) > 500, "hardly anything was written"
    site.settle()
    lost: set[int] = set()
    # What the manager remembers, and what the store does.
    for again in (False, True):
        if again:
            site.kill()
            site.start(settings=SETTINGS)
            eventually_sync(lambda: is_loaded(site), timeout=PATIENCE_S)
        with site.client() as client:
            lost = acks.keys() - readable(client, KEEP, sorted(acks))
        early = [(acks[key], key) for key in lost if not run.may_be_lost(*acks[key])]
        assert early == [], (run.valkey_kills, sorted(early)[:20])
        if policy == "always":
            assert lost == set()
    site.settle()
    report = site.audit_at_rest(settings=SETTINGS, grace_s=2.0 * GRACE_S)
    problems = report.problems
    if policy != "always":
        # A grant that Valkey forgot: its files are nobody's (docs/operations.md).
        problems = [p for p in problems if not p.startswith("file without an owner")]
    assert problems == []
    assert report.overdue == 0
    site.start(settings=SETTINGS)
    generations = int((time.monotonic() - run.began) / GENERATION_S)
    with site.client() as client:
        keys = [
            key_of(generation, chain, position)
            for generation in range(0, generations, max(1, generations // 5))
            for chain in range(CHAINS)
            for position in range(CHAIN)
        ]
        check_writable(client, KEEP, keys)
        check_writable(
            client, CHURN, [key_of(0, c, p) for c in range(CHAINS) for p in range(CHAIN)]
        )
    assert "Traceback" not in site.log.read_text()
    assert site.stop() == 0
    totals: dict[str, Any] = {
        name: sum(getattr(t, name) for t in tallies) for name in ("calls", "written", "read")
    }
    totals |= {"acknowledged": len(acks), "lost": len(lost), "kills": len(run.valkey_kills)}
    totals["slowest_s"] = round(max(t.slowest_s for t in tallies), 2)
    totals["refusals"] = [t.refusals for t in tallies]
    print(totals)  # noqa: T201 - what a long run is for
    return totals


def is_loaded(site: Site) -> bool:
    """Whether writes are taken, which is when all instances' extents are read."""
    with site.client() as client:
        try:
            for instance in (KEEP, CHURN):
                client.start_write_cache(instance, [1], write_timeout_s=1)
        except (NotReady, CapacityReached):
            return False
    return True


POLICIES = pytest.mark.parametrize(
    "server, policy", [(p, p) for p in ("everysec", "always")], indirect=["server"]
)


@POLICIES
def test_chaos_loses_nothing_that_was_acknowledged(
    site: Site, server: ValkeyServer, policy: str
) -> None:
    chaos(site, server, policy, CI_S)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@POLICIES
def test_chaos_for_minutes(site: Site, server: ValkeyServer, policy: str) -> None:
    chaos(site, server, policy, SOAK_S)
