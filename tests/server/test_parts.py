"""Leadership, storages, loops, the data directory and bootstrap files, each on its own."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from manager_harness import bootstrap_document

from kvcm._pb import meta_pb2
from kvcm.cache.api import WireForm
from kvcm.core import limits
from kvcm.core.errors import ConfigError, InvalidArgument, NotLeader, StorageError
from kvcm.core.health import HealthState
from kvcm.core.keys import KeyBatch
from kvcm.core.types import ReclaimPolicy, StorageConfig, StorageType
from kvcm.registry.view import RegistryView
from kvcm.server import bootstrap, requests
from kvcm.server.backends import BackendSet
from kvcm.server.calls import Call
from kvcm.server.datadir import DataDir
from kvcm.server.leadership import CAMPAIGN_DELAY_MS_MAX, Leadership
from kvcm.server.supervisor import BACK_OFF_S_MAX, Supervisor, back_off
from kvcm.storage_backends.base import ProbeResult
from kvcm.testing.clock import SimClock
from kvcm.testing.eventually import eventually

# -- leadership


def test_a_demoted_node_leads_again_after_the_campaign_delay() -> None:
    clock = SimClock()
    leadership = Leadership(clock, "n")
    leadership.set_campaign_delay(5_000)
    leadership.demote()
    clock.advance(4.9)
    with pytest.raises(NotLeader):
        leadership.require()
    clock.advance(0.2)
    leadership.require()


def test_without_a_delay_it_still_sits_out_one_election() -> None:
    clock = SimClock()
    leadership = Leadership(clock, "n")
    leadership.demote()
    assert not leadership.is_leader
    clock.advance(1.0)
    assert leadership.is_leader


def test_the_campaign_delay_has_bounds() -> None:
    leadership = Leadership(SimClock(), "n")
    leadership.set_campaign_delay(CAMPAIGN_DELAY_MS_MAX)
    for delay in (-1, CAMPAIGN_DELAY_MS_MAX + 1):
        with pytest.raises(InvalidArgument, match="campaign_delay_time_ms"):
            leadership.set_campaign_delay(delay)


# -- storages


class FakeBackend:
    def __init__(self, config: StorageConfig) -> None:
        self.config = config
        self.open_error: Exception | None = None
        self.health = ProbeResult(True)
        self.next_health: list[ProbeResult] = []
        self.hang = False
        self.hang_open: asyncio.Event = asyncio.Event()
        self.hang_open.set()
        self.closed = False
        self.create_error: Exception | None = None
        self.created = False

    async def create(self) -> None:
        if self.create_error is not None:
            raise self.create_error
        self.created = True

    async def open(self) -> None:
        await self.hang_open.wait()
        if self.open_error is not None:
            raise self.open_error

    async def probe(self) -> ProbeResult:
        if self.hang:
            await asyncio.Event().wait()
        return self.next_health.pop() if self.next_health else self.health

    async def close(self) -> None:
        self.closed = True


class Storages:
    """A set over fakes that break on demand."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.built: dict[str, FakeBackend] = {}
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.create_errors: dict[str, int] = {}
        self.clock = SimClock()
        self.set = BackendSet(self._build, self.clock, period_s=1.0, timeout_s=timeout_s)

    def _build(self, config: StorageConfig) -> Any:
        backend = FakeBackend(config)
        if config.global_unique_name in self.broken:
            backend.open_error = StorageError("no such device")
        if config.global_unique_name in self.hanging:
            backend.hang_open.clear()
        if self.create_errors.get(config.global_unique_name, 0):
            self.create_errors[config.global_unique_name] -= 1
            backend.create_error = StorageError("no space left")
        self.built[config.global_unique_name] = backend
        return backend


def storage(name: str, **changes: Any) -> StorageConfig:
    spec = {"root_path": changes.pop("root", "/r")}
    return StorageConfig(global_unique_name=name, type=StorageType.NFS, spec=spec, **changes)


def view(*storages: StorageConfig) -> RegistryView:
    by_name = {s.global_unique_name: s for s in storages}
    return RegistryView(1, "c" * 8, b"s" * 32, by_name, {}, {}, ())


async def test_r63_one_storage_that_does_not_open_keeps_no_other_from_serving() -> None:
    storages = Storages()
    storages.broken = {"b"}
    await storages.set.open(view(storage("a"), storage("b")))
    assert storages.set.available("a")
    assert not storages.set.available("b")
    failed = storages.built["b"]
    await eventually(lambda: failed.closed, message="no attempt leaves anything open")
    assert storages.set.get("b") is not None  # its addresses are known all the same
    assert "no such device" in storages.set.unavailable_reason("b")
    storages.broken.clear()
    await storages.set.run_once(0)
    assert storages.set.available("b")
    assert storages.set.available_for_s("a") == math.inf
    assert storages.set.available_for_s("b") == 0
    await storages.set.close()
    assert all(backend.closed for backend in storages.built.values())


async def test_the_places_of_storages_are_made_once_they_are_registered_and_never_again() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a")), new=True)
    assert storages.built["a"].created
    assert (await storages.set.try_open(storage("b"), new=True)).created
    assert not (await storages.set.try_open(storage("b"))).created
    storages.set.follow(view(storage("a"), storage("c")))
    await eventually(lambda: storages.set.available("c"))
    assert not storages.built["c"].created
    await storages.set.close()
    again = Storages()
    await again.set.open(view(storage("a")))
    assert not again.built["a"].created
    await again.set.close()


async def test_a_place_that_cannot_be_made_yet_is_made_when_it_can() -> None:
    storages = Storages()
    storages.create_errors = {"a": 2}
    await storages.set.open(view(storage("a")), new=True)
    assert "no space" in storages.set.unavailable_reason("a")
    await storages.set.run_once(0)
    assert not storages.set.available("a")
    await storages.set.run_once(0)
    assert storages.set.available("a")
    assert storages.built["a"].created
    await storages.set.close()


async def test_a_storage_of_a_snapshot_is_made_after_it_was_tried() -> None:
    storages = Storages()
    storages.broken = {"a"}
    await storages.set.open(view(storage("a")))
    storages.broken.clear()
    storages.set.create(["a", "unknown"])
    await eventually(storages.set.wakeup.is_set)
    await storages.set.run_once(0)
    assert storages.built["a"].created
    assert storages.set.available("a")
    await storages.set.close()


async def test_a_failed_probe_makes_a_storage_unavailable_until_one_succeeds() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a")))
    storages.built["a"].health = ProbeResult(False, "I/O error")
    await storages.set.run_once(0)
    assert not storages.set.available("a")
    assert storages.set.get("a") is not None
    storages.built["a"].health = ProbeResult(True)
    await storages.set.run_once(0)
    assert not storages.set.available("a")
    await storages.set.run_once(0)
    assert storages.set.available("a")
    assert storages.set.unavailable_reason("a") == ""
    await storages.set.close()


async def test_one_failed_probe_among_good_ones_takes_nothing_out_of_use() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a")))
    storages.built["a"].next_health = [ProbeResult(False, "busy")]
    await storages.set.run_once(0)
    assert storages.set.available("a")
    (status,) = storages.set.statuses()
    assert status.changes == {HealthState.AVAILABLE: 2, HealthState.SUSPECT: 1}
    await storages.set.close()


async def test_a_storage_that_is_full_is_read_and_not_written() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a"), storage("b", enabled=False)))
    assert storages.set.writable("a")
    assert not storages.set.writable("b")
    storages.built["a"].health = ProbeResult(True, unwritable="No space left")
    await storages.set.run_once(0)
    assert storages.set.available("a")
    assert not storages.set.writable("a")
    assert storages.set.unwritable("a") == "No space left"
    storages.built["a"].health = ProbeResult(True)
    await storages.set.run_once(0)
    assert storages.set.writable("a")
    await storages.set.close()


async def test_a_storage_that_several_readers_cannot_read_is_left_alone_for_a_while() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a")))
    for reader in ("one", "one", "two", "two"):
        storages.set.complain("a", reader)
    assert storages.set.available("a")
    storages.set.complain("a", "three")
    assert not storages.set.available("a")
    assert "3 readers" in storages.set.unavailable_reason("a")
    await storages.set.run_once(0)
    assert not storages.set.available("a")
    storages.clock.advance(limits.BREAKER_OPEN_S)
    await storages.set.run_once(0)
    assert storages.set.available("a")
    assert storages.set.available_for_s("a") == 0
    await storages.set.close()


async def test_a_complaint_has_the_storage_probed_at_once_but_not_all_the_time() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a")))
    storages.set.complain("a", "one")
    assert not storages.set.wakeup.is_set()
    storages.clock.advance(limits.PROBE_AGAIN_S)
    storages.set.complain("a", "one")
    assert storages.set.wakeup.is_set()
    await storages.set.run_once(0)
    assert not storages.set.wakeup.is_set()
    await storages.set.close()


async def test_the_manager_starts_while_a_storage_hangs_and_does_not_try_it_twice() -> None:
    storages = Storages(timeout_s=0.05)
    storages.hanging = {"a"}
    await storages.set.open(view(storage("a"), storage("b")))
    assert not storages.set.available("a")
    assert storages.set.available("b")
    first = storages.built["a"]
    await storages.set.run_once(0)
    assert storages.built["a"] is first
    first.hang_open.set()
    await eventually(lambda: storages.set.available("a"))
    await storages.set.close()


async def test_a_storage_that_hangs_is_unavailable_and_holds_up_no_other() -> None:
    storages = Storages(timeout_s=0.05)
    await storages.set.open(view(storage("a"), storage("b")))
    storages.built["a"].hang = True
    await storages.set.run_once(0)
    assert not storages.set.available("a")
    assert storages.set.available("b")
    await storages.set.close()


async def test_the_set_follows_the_registry() -> None:
    storages = Storages()
    await storages.set.open(view(storage("a"), storage("b")))
    first = storages.built["a"]
    storages.set.follow(view(storage("a", enabled=False), storage("c")))
    assert storages.set.get("a") is first
    assert not storages.set.available("a")
    assert storages.set.get("b") is None
    await eventually(lambda: storages.set.available("c"))
    await eventually(lambda: storages.built["b"].closed)
    storages.set.follow(view(storage("a", root="/elsewhere"), storage("c")))
    await eventually(lambda: storages.set.available("a"))
    assert storages.set.get("a") is not first
    assert first.closed
    await storages.set.close()


async def test_a_storage_opened_before_it_was_stored_is_used_at_once() -> None:
    storages = Storages()
    await storages.set.open(view())
    opened = await storages.set.try_open(storage("a"))
    storages.set.adopt(opened)
    storages.set.follow(view(storage("a")))
    assert storages.set.get("a") is opened
    assert storages.set.available("a")
    assert storages.set.available_for_s("a") == 0
    refused = await storages.set.try_open(storage("b"))
    storages.set.adopt(refused)
    storages.set.disown(refused)
    await eventually(lambda: storages.built["b"].closed)
    await storages.set.close()


# -- loops


class Flaky:
    name = "flaky"
    period_s = 1.0

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.runs: list[float] = []

    async def run_once(self, now: float) -> None:
        self.runs.append(now)
        if len(self.runs) <= self.failures:
            raise RuntimeError("not yet")


async def test_a_loop_that_is_woken_does_not_wait_for_its_period() -> None:
    clock = SimClock()

    class Woken:
        name, period_s = "woken", 10.0

        def __init__(self) -> None:
            self.wakeup = asyncio.Event()
            self.runs: list[float] = []

        async def run_once(self, now: float) -> None:
            self.wakeup.clear()
            self.runs.append(now)

    loop = Woken()
    supervisor = Supervisor(clock)
    start = clock.monotonic()
    supervisor.start([loop])
    await clock.run(1)
    assert [run - start for run in loop.runs] == [0]
    loop.wakeup.set()
    await clock.run(1)
    assert [run - start for run in loop.runs] == [0, 1]
    await clock.run(9.5)
    assert [run - start for run in loop.runs] == [0, 1, 11]
    await supervisor.stop()


async def test_a_loop_that_fails_backs_off_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = SimClock()
    loop = Flaky(failures=2)
    supervisor = Supervisor(clock)
    supervisor.start([loop])
    await clock.run(9.0)
    start = loop.runs[0]
    assert [now - start for now in loop.runs] == [0, 2, 6, 7, 8, 9]
    assert "'flaky' failed (2 in a row)" in caplog.text
    await supervisor.stop()
    await clock.run(9.0)
    assert len(loop.runs) == 6


def test_back_off_is_bounded_and_never_below_the_period() -> None:
    assert back_off(5, 0) == 5
    assert back_off(5, 1) == 10
    assert back_off(5, 1_000_000) == BACK_OFF_S_MAX
    assert back_off(300, 3) == 300


# -- the data directory


def test_a_data_directory_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    first = DataDir(path)
    with pytest.raises(ConfigError, match=r"in use by another manager \(pid \d+\)"):
        DataDir(path)
    first.release()
    first.release()
    DataDir(path).release()


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data_dir .*file"):
        DataDir(tmp_path / "file" / "data")


# -- bootstrap files


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_the_startup_defaults_are_those_of_the_protocol() -> None:
    storages, groups = bootstrap.startup_defaults()
    assert [(s.global_unique_name, s.spec["root_path"]) for s in storages] == [
        ("nfs_01", "/tmp/nfs/")
    ]
    assert [g.name for g in groups] == ["default"]


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    document = bootstrap_document(tmp_path)
    toml = f"""
[[storages]]
global_unique_name = "s1"
nfs = {{ root_path = "{tmp_path}/", key_count_per_file = 8 }}

[[instance_groups]]
name = "default"
storage_candidates = ["s1"]
global_quota_group_name = "q"
quota.capacity = 1073741824
"""
    from_json = bootstrap.read(write(tmp_path / "b.json", document))
    assert from_json == bootstrap.read(write(tmp_path / "b.toml", toml))
    assert from_json[1][0].version == 1


def test_enums_and_floats_of_toml_are_read(tmp_path: Path) -> None:
    text = """
[[instance_groups]]
name = "g"
cache_config.reclaim_strategy.reclaim_policy = "POLICY_LRU"
cache_config.reclaim_strategy.trigger_strategy.used_percentage = 0.75
"""
    _, (group,) = bootstrap.read(write(tmp_path / "b.toml", text))
    assert group.cache_config is not None
    strategy = group.cache_config.reclaim_strategy
    assert strategy is not None
    assert strategy.trigger_strategy is not None
    assert strategy.reclaim_policy is ReclaimPolicy.LRU
    assert strategy.trigger_strategy.used_percentage == 0.75


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ({"storage": []}, "'storage'; did you mean storages?"),
        ({"storages": {}}, "storages is not a list"),
        ({"storages": [7]}, "storages[0]"),
        ({"storages": [{"global_unique_name": "x"}]}, "storages[0].storage_spec"),
        ({"storages": [{"nfs": {"rot_path": "/"}}]}, "'rot_path'; did you mean root_path?"),
        ({"storages": [{"global_unique_name": "x", "tair_mem_pool": {}}]}, "not built in"),
        (
            {"instance_groups": [{"quota": {"capacity": "many"}}]},
            "instance_groups[0].quota.capacity",
        ),
        ({"instance_groups": [{"quota": {"quota_config": [{"x": 1}]}}]}, "unknown key 'x'"),
    ],
)
def test_a_wrong_bootstrap_file_is_refused_by_name(
    tmp_path: Path, document: Any, says: str
) -> None:
    path = write(tmp_path / "b.json", document)
    with pytest.raises(ConfigError) as caught:
        bootstrap.read(path)
    assert says in str(caught.value)


def test_a_bootstrap_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        bootstrap.read(tmp_path / "none.json")


# -- limits of requests


def test_tokens_are_limited_per_request() -> None:
    count_max = limits.TOKENS_PER_REQUEST_MAX
    for count in (count_max, count_max + 1):
        message = meta_pb2.GetCacheLocationRequest(instance_id="i")
        tokens = KeyBatch.from_packed(b"\x01" * count)
        call: Any = Call(message, meta_pb2.GetCacheLocationResponse(), WireForm.PROTO)
        call.packed["token_ids"] = tokens
        if count <= count_max:
            assert requests.lookup_request(call).token_ids is tokens
        else:
            with pytest.raises(InvalidArgument, match="token_ids"):
                requests.lookup_request(call)
