"""The model-based test and the crashes at every store commit, with the index in a real Valkey."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis.stateful import run_state_machine_as_test

from kvcm.core.errors import KvcmError
from kvcm.core.types import QueryType
from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.testing.faults import Crash, Fault, Op, script
from kvcm.testing.servers_valkey import ValkeyServer, valkey_server
from tests.cache.harness import Harness
from tests.cache.test_cache_faults import Flow, check_after
from tests.cache.test_model import Service, model_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


class ValkeyService(Service):
    """The model over a Valkey, emptied for each example."""

    valkey: ClassVar[ValkeyServer]

    def store(self) -> KVStore:
        self.valkey.call("FLUSHALL")
        return ValkeyStore(self.valkey.url)


def test_service_against_the_model_on_valkey(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ValkeyService, "valkey", server, raising=False)
    run_state_machine_as_test(ValkeyService, settings=model_settings(3))


async def made(server: ValkeyServer, root: Path) -> Harness:
    server.call("FLUSHALL")
    store = ValkeyStore(server.url)
    harness = await Harness(root=root, store=store, timeout_max_s=60).open()
    await harness.register()
    # A claim of the row shards is not part of the flow.
    await harness.lookup(list(range(100, 200)), query=QueryType.BATCH_GET)
    return harness


async def commits_of_the_flow(server: ValkeyServer, root: Path) -> range:
    """Numbers of the store commits of a flow in which all goes well."""
    harness = await made(server, root)
    first = harness.store.calls[Op.COMMIT]
    await Flow(harness).run()
    last = harness.store.calls[Op.COMMIT]
    await harness.close()
    assert last - first > 8
    return range(first + 1, last + 1)


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
async def test_a_crash_at_any_commit_to_valkey_loses_nothing_and_leaks_nothing(
    server: ValkeyServer, tmp_path: Path, fault: Fault
) -> None:
    for number in await commits_of_the_flow(server, tmp_path / "dry"):
        harness = await made(server, tmp_path / str(number))
        harness.store.plan = script([(Op.COMMIT, number, fault)])
        flow = Flow(harness)
        with pytest.raises(Crash):
            await flow.run()
        await harness.crash()
        await check_after(harness, flow)
        await harness.close()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_DONE, Fault.UNKNOWN_LOST])
async def test_a_failed_commit_to_valkey_anywhere_leaves_a_state_that_heals(
    server: ValkeyServer, tmp_path: Path, fault: Fault
) -> None:
    for number in await commits_of_the_flow(server, tmp_path / "dry"):
        harness = await made(server, tmp_path / str(number))
        harness.store.plan = script([(Op.COMMIT, number, fault)])
        flow = Flow(harness)
        with contextlib.suppress(KvcmError):
            await flow.run()
        assert [n for _, n, _ in harness.store.injected] == [number]
        await harness.manager._writes.settled()
        await harness.rounds(2)
        await check_after(harness, flow)
        await harness.close()
