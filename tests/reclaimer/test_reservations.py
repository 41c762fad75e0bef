"""Room that a write may have taken is given to nobody else, whatever became of the write."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kvcm.core.errors import CapacityReached, NotReady
from kvcm.testing.faults import Fault, Op, no_faults
from tests.cache.harness import SLOT, Harness, group

BLOCK = 2 * SLOT


async def opened(tmp_path: Path) -> Harness:
    """60 of 100 blocks are taken."""
    h = await Harness(root=tmp_path, groups=[group(capacity=100 * BLOCK)]).open()
    await h.register()
    await h.put(list(range(60)))
    return h


def used(h: Harness) -> int:
    return h.manager.shared.ledger.group("default").counted // BLOCK


@pytest.mark.parametrize(("fault", "kept"), [(Fault.UNKNOWN_DONE, 30), (Fault.UNKNOWN_LOST, 30)])
async def test_room_of_a_write_of_unknown_outcome_is_given_to_nobody_until_it_is_known(
    tmp_path: Path, fault: Fault, kept: int
) -> None:
    """Its shard is away meanwhile; writes whose records lie in others go on."""
    h = await opened(tmp_path)
    struck: list[int] = []

    def plan(op: Op, number: int) -> Fault | None:
        if op is Op.COMMIT and not struck:
            struck.append(number)
            return fault
        return Fault.UNAVAILABLE if op is Op.CLAIM else None

    h.store.plan = plan
    with pytest.raises(NotReady):
        await h.start(list(range(1000, 1030)))
    await h.manager._writes.settled()
    assert used(h) == 60 + kept
    granted = 0
    for key in range(2000, 2100):
        with contextlib.suppress(NotReady, CapacityReached):
            granted += len((await h.start([key])).granted)
    assert granted == 100 - 60 - kept
    h.store.plan = no_faults
    await h.rounds(1)
    # What was committed is known again, and ends by its time-out if not before.
    assert used(h) == 60 + granted + (30 if fault is Fault.UNKNOWN_DONE else 0)
    await h.wait(31)
    await h.rounds()
    assert used(h) == 60
    await h.check_counters()
    await h.close()


async def test_room_of_a_write_that_certainly_failed_is_free_at_once(tmp_path: Path) -> None:
    h = await opened(tmp_path)
    h.store.plan = lambda op, _number: Fault.UNAVAILABLE if op is Op.COMMIT else None
    with pytest.raises(NotReady):
        await h.start(list(range(1000, 1030)))
    h.store.plan = no_faults
    await h.manager._writes.settled()
    assert used(h) == 60
    assert len((await h.start(list(range(2000, 2040)))).granted) == 40
    await h.close()


async def test_room_of_a_removed_instance_comes_back_whatever_is_unknown_of_it(
    tmp_path: Path,
) -> None:
    h = await opened(tmp_path)
    struck: list[int] = []

    def plan(op: Op, number: int) -> Fault | None:
        if op is Op.COMMIT and not struck:
            struck.append(number)
            return Fault.UNKNOWN_DONE
        return Fault.UNAVAILABLE if op in (Op.CLAIM, Op.COMMIT) else None

    h.store.plan = plan
    with pytest.raises(NotReady):
        await h.start(list(range(1000, 1030)))
    await h.manager.remove_instance("i1", None)
    h.store.plan = no_faults
    await h.drain()
    assert h.manager.index.by_uid == {}
    assert used(h) == 0
    assert h.manager.shared.ledger.groups == {}
    await h.close()
