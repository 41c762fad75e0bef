"""Write sessions: the tables of wire.md §5 and the rows of §9 about cache calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvcm.cache.api import FinishWriteRequest, WireForm
from kvcm.core.errors import (
    CapacityReached,
    InvalidArgument,
    SessionNotExist,
)
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, TrimStrategy
from tests.cache.harness import SLOT, Harness, group, read_slot

T, F = True, False


async def test_start_table(harness: Harness) -> None:
    first = await harness.start_raw([1, 2, 3, 4])
    assert (first.mask, first.granted) == (BlockMask(offset=0), 4)
    again = await harness.start_raw([1, 2, 3, 4])
    assert (again.mask, again.granted, again.body) == (BlockMask(offset=4), 0, b"")
    longer = await harness.start_raw([1, 2, 3, 4, 5, 6])
    assert (longer.mask, longer.granted) == (BlockMask(offset=4), 2)
    overlap = await harness.start_raw([5, 6, 7, 8])
    assert (overlap.mask, overlap.granted) == (BlockMask(offset=2), 2)
    mixed = await harness.start_raw([5, 55, 66, 6])
    assert mixed.mask.values is not None
    assert list(mixed.mask.values) == [T, F, F, T]
    assert mixed.granted == 2
    for answer in (first, again, longer, overlap, mixed):
        assert len(answer.session_id) == 32
        assert answer.session_id.isalnum()
        assert answer.session_id == answer.session_id.lower()


@pytest.mark.parametrize("form", list(WireForm))
async def test_grant_equals_the_later_lookup_field_for_field(
    harness: Harness, form: WireForm
) -> None:
    keys = [-(1 << 63), (1 << 63) - 1, 0, 5, 6, 7, 8]
    grant = await harness.put(keys, form=form)
    for other in WireForm:
        for query in (QueryType.PREFIX_MATCH, QueryType.BATCH_GET):
            answer = await harness.lookup_message(keys, form=other, query=query)
            assert list(answer.locations) == grant.messages
    assert [found for found, _ in await harness.meta(keys)] == grant.locations


@pytest.mark.parametrize("form", list(WireForm))
async def test_grant_of_spec_groups_equals_the_later_lookup(
    harness: Harness, form: WireForm
) -> None:
    await harness.register("g", groups=[("a", ["tp1"]), ("b", ["tp1", "tp0"])])
    names = ["a", "b", "b", "a", "a"]
    grant = await harness.put([1, 2, 3, 4, 5], "g", names=names, form=form)
    answer = await harness.lookup_message([1, 2, 3, 4, 5], "g", form=form)
    assert list(answer.locations) == grant.messages
    assert [found.spec_size for found in grant.locations] == [1, 2, 2, 1, 1]
    assert [list(found.uris) for found in grant.locations] == [
        ["tp1"] if n == "a" else ["tp0", "tp1"] for n in names
    ]


async def test_no_two_slots_share_an_address(harness: Harness) -> None:
    uris: list[str] = []
    for start in range(0, 40, 10):
        grant = await harness.put(list(range(start, start + 10)))
        uris += [uri for found in grant.locations for uri in found.uris.values()]
    assert len(set(uris)) == len(uris) == 80


async def test_a_key_twice_in_one_request_is_granted_once(harness: Harness) -> None:
    grant = await harness.start([1, 2, 1, 3, 2, 2])
    assert grant.existing == [F, F, T, F, T, T]
    assert grant.granted == [1, 2, 3]
    harness.fill(grant)
    await harness.finish(grant)
    assert await harness.hits([1, 2, 1, 3, 2, 2]) == 6


async def test_no_keys_make_an_empty_session(harness: Harness) -> None:
    grant = await harness.start([])
    assert grant.granted == []
    await harness.finish(grant, BlockMask(offset=0))


@pytest.mark.parametrize("names", [["a"], ["a", "a", "a"], ["a", "nope"], ["", ""]])
async def test_group_names_must_fit(harness: Harness, names: list[str]) -> None:
    await harness.register("g", groups=[("a", ["tp0"])])
    with pytest.raises(InvalidArgument, match="location_spec_group_names"):
        await harness.start([1, 2], "g", names=names)
    assert await harness.statuses([1, 2], "g") == ["NOT_FOUND"] * 2


async def test_a_location_with_fewer_specs_gets_one_with_the_whole_group_beside_it(
    harness: Harness,
) -> None:
    await harness.register("g", groups=[("front", ["tp0"]), ("whole", ["tp0", "tp1"])])
    front = await harness.put([1, 2], "g", names=["front", "front"])
    whole = await harness.start([1, 2], "g", names=["whole", "front"])
    assert whole.granted == [1]
    # Until it is finished the narrow one goes on serving.
    assert await harness.lookup([1], "g") == front.locations[:1]
    assert await harness.lookup([1], "g", specs=["tp1"]) == []
    harness.fill(whole)
    await harness.finish(whole)
    assert await harness.lookup([1], "g", specs=["tp1"]) != []
    assert (await harness.start([1, 1], "g")).existing == [T, T]


@pytest.mark.parametrize(
    "success",
    [
        BlockMask(values=[T, F, T]),
        BlockMask(values=[T, F, T, F, T]),
        BlockMask(values=[]),
        BlockMask(offset=5),
        BlockMask(offset=-1),
        BlockMask(),
    ],
)
async def test_a_mask_of_wrong_length_leaves_the_session_open(
    harness: Harness, success: BlockMask
) -> None:
    grant = await harness.start([1, 2, 3, 4])
    harness.fill(grant)
    with pytest.raises(InvalidArgument, match="success_blocks"):
        await harness.finish(grant, success)
    assert await harness.hits([1, 2, 3, 4]) == 0
    await harness.finish(grant)
    assert await harness.hits([1, 2, 3, 4]) == 4


async def test_success_blocks_must_be_present(harness: Harness) -> None:
    for grant in (await harness.start([1]), await harness.start([1])):
        with pytest.raises(InvalidArgument, match="success_blocks"):
            await harness.manager.finish_write(FinishWriteRequest("i1", grant.session, None))


@pytest.mark.parametrize("success", [BlockMask(values=[T]), BlockMask(offset=1)])
async def test_an_empty_session_counts_no_blocks(harness: Harness, success: BlockMask) -> None:
    await harness.put([1])
    grant = await harness.start([1])
    with pytest.raises(InvalidArgument, match="success_blocks"):
        await harness.finish(grant, success)
    for fine in (BlockMask(), BlockMask(values=[]), BlockMask(offset=0)):
        await harness.finish(grant, fine)


async def test_an_empty_session_is_short_lived(harness: Harness) -> None:
    await harness.put([1])
    grant = await harness.start([1])
    await harness.wait(harness.settings.empty_session_timeout_s + 1)
    with pytest.raises(SessionNotExist):
        await harness.finish(grant, BlockMask(offset=0))


async def test_an_offset_publishes_the_leading_blocks(harness: Harness) -> None:
    grant = await harness.start([1, 2, 3, 4])
    harness.fill(grant)
    await harness.finish(grant, BlockMask(offset=3))
    assert await harness.hits([1, 2, 3, 4]) == 3
    assert await harness.statuses([4]) == ["NOT_FOUND"]


async def test_failed_blocks_are_free_at_once(harness: Harness) -> None:
    grant = await harness.start([1, 2, 3, 4])
    harness.fill(grant, [1, 3])
    await harness.finish(grant, [T, F, T, F])
    batch = await harness.lookup([1, 2, 3, 4], query=QueryType.BATCH_GET)
    assert [found.hit for found in batch] == [T, F, T, F]
    again = await harness.start([1, 2, 3, 4])
    assert again.granted == [2, 4]
    assert not {u for found in again.locations for u in found.uris.values()} & {
        u for found in grant.locations for u in found.uris.values()
    }
    harness.fill(again)
    await harness.finish(again)
    assert await harness.hits([1, 2, 3, 4]) == 4


async def test_the_same_finish_again_is_ok_and_another_mask_is_not(harness: Harness) -> None:
    grant = await harness.start([1, 2, 3, 4], timeout=30)
    harness.fill(grant)
    success = BlockMask(values=[T, T, F, T])
    await harness.finish(grant, success)
    await harness.wait(29)
    await harness.finish(grant, success)
    for other in (BlockMask(offset=4), BlockMask(offset=2), BlockMask(values=[F, T, T, T])):
        with pytest.raises(InvalidArgument):
            await harness.finish(grant, other)
    with pytest.raises(InvalidArgument):
        await harness.finish(grant, BlockMask(values=[T]))
    assert await harness.hits([1, 2, 3, 4]) == 2
    await harness.restart()
    await harness.finish(grant, success)


async def test_equal_masks_in_either_form_are_the_same_finish(harness: Harness) -> None:
    grant = await harness.start([1, 2, 3])
    await harness.finish(grant, BlockMask(offset=2))
    await harness.finish(grant, BlockMask(values=[T, T, F]))


@pytest.mark.parametrize("failed", [[F, F], [T, T]])
async def test_a_finish_is_remembered_after_its_blocks_are_gone(
    harness: Harness, failed: list[bool]
) -> None:
    grant = await harness.start([1, 2], timeout=60)
    harness.fill(grant)
    await harness.finish(grant, failed)
    await harness.remove([1, 2])
    await harness.wait(30)
    await harness.finish(grant, failed)
    assert await harness.hits([1, 2]) == 0


async def test_a_late_finish_is_an_error_and_publishes_nothing(harness: Harness) -> None:
    grant = await harness.start([1, 2], timeout=5)
    harness.fill(grant)
    harness.clock.advance(5)  # no loop has run yet
    with pytest.raises(SessionNotExist):
        await harness.finish(grant)
    assert await harness.hits([1, 2]) == 0
    await harness.rounds()
    with pytest.raises(SessionNotExist):
        await harness.finish(grant)
    assert await harness.statuses([1, 2]) == ["NOT_FOUND"] * 2


async def test_a_finish_just_before_the_time_out_counts(harness: Harness) -> None:
    grant = await harness.start([1, 2], timeout=5)
    harness.fill(grant)
    await harness.wait(4.9)
    await harness.finish(grant)
    assert await harness.hits([1, 2]) == 2


async def test_a_late_finish_never_touches_the_session_that_came_after(harness: Harness) -> None:
    old = await harness.start([1, 2], timeout=5)
    harness.fill(old)
    await harness.wait(6)
    new = await harness.start([1, 2])
    assert new.granted == [1, 2]
    harness.fill(new)
    await harness.finish(new)
    before = await harness.lookup([1, 2])
    for success in (BlockMask(offset=2), BlockMask(offset=0)):
        with pytest.raises(SessionNotExist):
            await harness.finish(old, success)
    assert await harness.lookup([1, 2]) == before == new.locations


async def test_an_expired_key_is_granted_again_even_before_the_loops_ran(
    harness: Harness,
) -> None:
    await harness.start([1, 2], timeout=5)
    harness.clock.advance(5.1)
    assert (await harness.start([1, 2])).granted == [1, 2]


async def test_time_outs_default_and_are_capped(harness: Harness) -> None:
    for wanted, effective in (
        (0, harness.settings.write_timeout_s_default),
        (-5, harness.settings.write_timeout_s_default),
        (1 << 30, harness.settings.write_timeout_s_max),
        (7, 7),
    ):
        key = wanted + 10
        grant = await harness.start([key], timeout=wanted)
        await harness.wait(effective - 0.5)
        assert await harness.statuses([key]) == ["WRITING"]
        await harness.wait(1)
        assert await harness.statuses([key]) == ["NOT_FOUND"]
        with pytest.raises(SessionNotExist):
            await harness.finish(grant)


async def test_a_session_belongs_to_its_instance(harness: Harness) -> None:
    await harness.register("i2")
    grant = await harness.start([1])
    harness.fill(grant)
    grant.instance_id = "i2"
    with pytest.raises(SessionNotExist):
        await harness.finish(grant)
    with pytest.raises(SessionNotExist):
        await harness.manager.abandon("i2", grant.session)
    grant.instance_id = "i1"
    await harness.finish(grant)
    assert await harness.hits([1]) == 1
    assert await harness.hits([1], "i2") == 0


@pytest.mark.parametrize("form", ["", "x", "a" * 32, "0" * 32, "ä" * 32, "A" * 32, "a" * 400])
async def test_an_invented_session_is_unknown(harness: Harness, form: str) -> None:
    with pytest.raises(SessionNotExist):
        await harness.manager.finish_write(FinishWriteRequest("i1", form, BlockMask(offset=0)))


async def test_no_character_of_a_session_id_can_be_changed(harness: Harness) -> None:
    grant = await harness.start([1])
    harness.fill(grant)
    right = grant.session
    for i in range(32):
        grant.session = right[:i] + ("b" if right[i] != "b" else "c") + right[i + 1 :]
        with pytest.raises(SessionNotExist):
            await harness.finish(grant)
    grant.session = right
    await harness.finish(grant)


async def test_sessions_survive_a_restart_and_their_time_out_begins_anew(
    harness: Harness,
) -> None:
    kept, lost = await harness.start([1], timeout=20), await harness.start([2], timeout=20)
    harness.fill(kept)
    await harness.wait(15)
    await harness.crash()
    await harness.wait(15)
    await harness.finish(kept)
    assert await harness.hits([1]) == 1
    await harness.wait(6)
    with pytest.raises(SessionNotExist):
        await harness.finish(lost)


async def test_an_abandoned_session_frees_its_keys_at_once(harness: Harness) -> None:
    grant = await harness.start([1, 2])
    await harness.manager.abandon("i1", grant.session)
    with pytest.raises(SessionNotExist):
        await harness.finish(grant)
    assert (await harness.start([1, 2])).granted == [1, 2]
    await harness.manager.abandon("i1", grant.session)


async def test_abandoning_a_finished_session_changes_nothing(harness: Harness) -> None:
    grant = await harness.put([1, 2])
    await harness.manager.abandon("i1", grant.session)
    assert await harness.hits([1, 2]) == 2


# ---- wire.md §9 --------------------------------------------------------------------------------


async def test_remove_keeps_masked_keys(harness: Harness) -> None:
    await harness.put([1, 2, 3, 4])
    await harness.remove([1, 2, 3, 4, 77], mask=BlockMask(values=[T, F, T]))
    batch = await harness.lookup([1, 2, 3, 4], query=QueryType.BATCH_GET)
    assert [found.hit for found in batch] == [T, F, T, F]
    await harness.remove([1, 2, 3, 4], mask=BlockMask(offset=1))
    assert await harness.statuses([1, 2, 3, 4]) == ["SERVING"] + ["NOT_FOUND"] * 3
    assert (await harness.start([1, 2, 3, 4])).granted == [2, 3, 4]


async def test_remove_cancels_named_blocks_of_a_write_in_flight(harness: Harness) -> None:
    grant = await harness.start([1, 2, 3])
    harness.fill(grant)
    await harness.remove([2])
    assert await harness.statuses([1, 2, 3]) == ["WRITING", "NOT_FOUND", "WRITING"]
    other = await harness.start([2])
    assert other.granted == [2]
    await harness.finish(grant)
    assert await harness.statuses([1, 2, 3]) == ["SERVING", "WRITING", "SERVING"]
    harness.fill(other)
    await harness.finish(other)
    assert await harness.lookup([2]) == other.locations


async def test_remove_of_all_blocks_of_a_write_lets_its_finish_pass(harness: Harness) -> None:
    grant = await harness.start([1, 2])
    harness.fill(grant)
    await harness.remove([1, 2])
    await harness.finish(grant)
    await harness.finish(grant)
    assert await harness.hits([1, 2]) == 0
    await harness.drain()
    await harness.check_rest()


@pytest.mark.parametrize("strategy", [TrimStrategy.REMOVE_ALL_CACHE, TrimStrategy.REMOVE_ALL_META])
async def test_trim_cancels_writes_in_flight_and_frees_every_key(
    harness: Harness, strategy: TrimStrategy
) -> None:
    await harness.put([1, 2])
    flying = await harness.start([3, 4])
    harness.fill(flying)
    await harness.lookup([1, 2, 3, 4])
    await harness.trim(strategy)
    assert await harness.hits([1, 2, 3, 4]) == 0
    assert await harness.statuses([1, 2, 3, 4]) == ["NOT_FOUND"] * 4
    fresh = await harness.start([1, 2, 3, 4])
    assert fresh.granted == [1, 2, 3, 4]
    await harness.finish(flying)
    assert await harness.hits([3, 4]) == 0
    harness.fill(fresh)
    await harness.finish(fresh)
    assert await harness.lookup([1, 2, 3, 4]) == fresh.locations
    await harness.rounds(5)
    assert await harness.lookup([1, 2, 3, 4]) == fresh.locations


async def test_trim_all_meta_leaves_the_files_and_the_states_of_open_sessions(
    harness: Harness,
) -> None:
    grant = await harness.put([1, 2])
    flying = await harness.start([3], timeout=30)
    await harness.trim(TrimStrategy.REMOVE_ALL_META)
    await harness.wait(20)
    await harness.finish(flying)
    await harness.drain()
    assert all(read_slot(u) for found in grant.locations for u in found.uris.values())
    assert await harness.extents(harness.index()) == {}
    await harness.check_counters()


async def test_trim_by_time_takes_what_was_finished_within_begin_and_end(
    harness: Harness,
) -> None:
    base = int(harness.clock.now())
    for key in range(5):
        grant = await harness.start([key])
        harness.clock.advance(1)
        harness.fill(grant)
        await harness.finish(grant)  # at base + key + 1
    writing = await harness.start([9])
    with pytest.raises(InvalidArgument):
        await harness.trim(TrimStrategy.TIMESTAMP, begin=base + 2, end=base + 2)
    await harness.trim(TrimStrategy.TIMESTAMP, begin=base + 2, end=base + 4)
    batch = await harness.lookup(list(range(5)), query=QueryType.BATCH_GET)
    assert [found.hit for found in batch] == [T, F, F, T, T]
    harness.fill(writing)
    await harness.finish(writing)
    assert await harness.hits([9]) == 1


@pytest.mark.parametrize("strategy", [0, 4, -1])
async def test_unknown_trim_strategies_are_refused(harness: Harness, strategy: int) -> None:
    await harness.put([1])
    with pytest.raises(InvalidArgument, match="strategy"):
        await harness.trim(strategy)
    assert await harness.hits([1]) == 1


async def test_an_instance_registered_again_sees_nothing_of_the_old(harness: Harness) -> None:
    old = await harness.put([1, 2])
    open_session = await harness.start([3])
    await harness.manager.remove_instance("i1", None)
    await harness.register("i1")
    assert await harness.hits([1, 2]) == 0
    for session in (old, open_session):
        with pytest.raises(SessionNotExist):
            await harness.finish(session)
    new = await harness.put([1, 2, 3])
    assert new.granted == [1, 2, 3]
    await harness.drain()
    assert await harness.lookup([1, 2, 3]) == new.locations
    await harness.check_rest()
    assert list(harness.manager.index.by_uid) == [harness.index().uid]
    await harness.crash()
    assert await harness.lookup([1, 2, 3]) == new.locations


async def test_limits_grant_a_leading_part_and_say_why(tmp_path: Path) -> None:
    limited = group(capacity=2 * SLOT * 5)
    h = await Harness(root=tmp_path, groups=[limited]).open()
    await h.register()
    await h.put([1, 2])
    cut = await h.start([1, 10, 2, 11, 12, 13])
    assert cut.existing == [T, F, T, F, F, T]
    assert cut.reason == "QUOTA_GROUP"
    with pytest.raises(CapacityReached) as refused:
        await h.start([14, 15])
    assert refused.value.reason == "QUOTA_GROUP"
    # What exists is still answered.
    assert (await h.start([1, 2])).existing == [T, T]
    await h.close()


async def test_sixteen_writers_of_the_same_keys_get_one_grant_a_key(harness: Harness) -> None:
    keys = list(range(50))
    grants = await asyncio.gather(*(harness.start(keys) for _ in range(16)))
    granted = [k for g in grants for k in g.granted]
    assert sorted(granted) == keys
    for grant in grants:
        harness.fill(grant)
    await asyncio.gather(*(harness.finish(g) for g in grants for _ in range(2)))
    assert await harness.hits(keys) == 50
    await harness.check_counters()


async def test_a_trimmed_key_is_gone_or_there_never_between(harness: Harness) -> None:
    """R05: after a trim shortly after a read, a key is listed with bytes, or can be written."""
    grant = await harness.put([1, 2, 3])
    assert await harness.hits([1, 2, 3]) == 3
    trimming = asyncio.ensure_future(harness.trim())
    while not trimming.done():
        await asyncio.sleep(0)
        found = await harness.lookup([1, 2, 3])
        assert len(found) in (0, 3)
        assert all(read_slot(u) for x in found for u in x.uris.values())
    await trimming
    again = await harness.start([1, 2, 3])
    assert again.granted == [1, 2, 3]
    # The reader before the trim still has its bytes for the time of its lease.
    await harness.wait(9.9, step=1)
    assert all(read_slot(u) for x in grant.locations for u in x.uris.values())
    await harness.wait(2)
    assert not any(read_slot(u) for x in grant.locations for u in x.uris.values())


async def test_a_cancelled_session_keeps_the_mask_it_was_finished_with(harness: Harness) -> None:
    grant = await harness.start([1, 2])
    await harness.trim()
    await harness.round()
    await harness.finish(grant, [True, False])
    await harness.finish(grant, [True, False])
    with pytest.raises(InvalidArgument, match="differs"):
        await harness.finish(grant, [True, True])
    assert await harness.hits([1, 2]) == 0


async def test_a_trimmed_session_that_is_abandoned_still_finishes_and_publishes_nothing(
    harness: Harness,
) -> None:
    grant = await harness.start([1, 2])
    harness.fill(grant)
    await harness.trim()
    await harness.rounds()
    await harness.manager.abandon(grant.instance_id, grant.session)
    await harness.finish(grant)
    assert await harness.hits([1, 2]) == 0
