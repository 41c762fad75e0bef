"""The tables of wire.md §4 at the service, in both wire forms."""

from __future__ import annotations

from typing import Any

import pytest

from kvcm.cache.api import WireForm
from kvcm.core.errors import InstanceNotExist, InvalidArgument, ReplyTooLarge
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType
from tests.cache.harness import SLOT, Grant, Harness, file_of, payload, read_slot

PREFIX, BATCH, REVERSE = (
    QueryType.PREFIX_MATCH,
    QueryType.BATCH_GET,
    QueryType.REVERSE_ROLL_SW_MATCH,
)
P = 0
FORMS = [(WireForm.PROTO, False), (WireForm.PROTO, True), (WireForm.JSON, False)]
BOOLS = BlockMask(values=[True, False, False, False])

TABLE: list[tuple[QueryType, list[int], dict[str, Any], list[int]]] = [
    (PREFIX, [1, 2, 3, 4], {}, [1, 2]),
    (PREFIX, [1, 2, 3, 4], {"mask": BlockMask(offset=1)}, [2]),
    (PREFIX, [3, 4], {"mask": BlockMask(offset=1)}, [4]),
    (PREFIX, [1, 2], {"mask": BlockMask(values=[True, True])}, []),
    (PREFIX, [1, 2], {"mask": BlockMask(offset=6)}, []),
    (PREFIX, [5, 1], {}, []),
    (PREFIX, [1, 2, 4], {"mask": BOOLS}, [2, 4]),
    (PREFIX, [], {}, []),
    (PREFIX, [2, 1, 4, 2], {}, [2, 1, 4, 2]),
    (PREFIX, [1, 3, 4], {"mask": BlockMask(values=[False, True])}, [1, 4]),
    (BATCH, [1, 3, 5], {}, [1, P, P]),
    (BATCH, [1, 3, 5], {"mask": BlockMask(offset=2)}, [1, P, P]),
    (BATCH, [4, 4, 1], {}, [4, 4, 1]),
    (BATCH, [], {}, []),
    (REVERSE, [1, 2, 3, 4], {"sw": 2}, [1, 2, P, P]),
    (REVERSE, [1, 2, 4], {"sw": 2}, [P, 2, 4]),
    (REVERSE, [1, 3], {"sw": 2}, [P, P]),
    (REVERSE, [1, 2, 4], {"sw": 3}, [1, 2, 4]),
    (REVERSE, [1, 2, 4], {"sw": 0}, [P, P, P]),
    (REVERSE, [3, 2, 5, 1], {"sw": 1}, [P, P, P, 1]),
    (REVERSE, [1, 2, 4], {"sw": 2, "mask": BlockMask(offset=3)}, [P, 2, 4]),
    (REVERSE, [], {"sw": 0}, []),
]


async def stock(h: Harness) -> dict[int, Grant]:
    """Keys 1, 2 and 4 serving, 3 unknown, 5 being written."""
    both = await h.put([1, 2])
    four = await h.put([4])
    five = await h.start([5])
    return {1: both, 2: both, 4: four, 5: five}


@pytest.mark.parametrize(("form", "packed"), FORMS)
async def test_table_of_queries(harness: Harness, form: WireForm, packed: bool) -> None:
    written = await stock(harness)
    messages = {key: grant.messages[grant.granted.index(key)] for key, grant in written.items()}
    for _ in range(2):  # from the store, then from the read cache
        for query, keys, options, expected in TABLE:
            answer = await harness.lookup_message(
                keys, query=query, form=form, packed=packed, **options
            )
            found = list(answer.locations)
            assert len(found) == len(expected), (query, keys, options)
            for location, key in zip(found, expected, strict=True):
                if key == P:
                    assert location.type == 0
                    assert location.spec_size == 2
                    assert [(s.name, s.uri) for s in location.location_specs] == [
                        ("tp0", ""),
                        ("tp1", ""),
                    ]
                else:
                    assert location == messages[key], (query, keys, options)


@pytest.mark.parametrize(("form", "packed"), FORMS)
async def test_answered_addresses_hold_what_the_session_wrote(
    harness: Harness, form: WireForm, packed: bool
) -> None:
    grant = await harness.put(list(range(-8, 9)))
    for location, key in zip(
        await harness.lookup(grant.keys, form=form, packed=packed), grant.keys, strict=True
    ):
        assert location.type == 4
        assert location.spec_size == 2
        for spec in ("tp0", "tp1"):
            uri = location.uris[spec]
            assert file_of(uri)[2] == SLOT
            assert read_slot(uri) == payload(grant.session, key, spec, SLOT)


@pytest.mark.parametrize(
    ("query", "keys", "sw"),
    [
        (REVERSE, [1], 2),
        (REVERSE, [1, 2], -1),
        (REVERSE, [], 1),
        (QueryType.UNSPECIFIED, [1], 0),
        (4, [1], 0),
        (-1, [1], 0),
    ],
)
async def test_impossible_queries_are_refused(
    harness: Harness, query: QueryType | int, keys: list[int], sw: int
) -> None:
    await stock(harness)
    with pytest.raises(InvalidArgument):
        await harness.lookup(keys, query=query, sw=sw)


async def test_negative_mask_offset_is_refused(harness: Harness) -> None:
    mask = BlockMask(offset=-1)
    with pytest.raises(InvalidArgument):
        await harness.lookup([1], mask=mask)
    with pytest.raises(InvalidArgument):
        await harness.meta([1], mask=mask)
    with pytest.raises(InvalidArgument):
        await harness.remove([1], mask=mask)


async def test_unknown_instance_is_named(harness: Harness) -> None:
    grant = await harness.start([1])
    grant.instance_id = "nobody"
    for call in (
        harness.lookup([1], "nobody"),
        harness.meta([1], "nobody"),
        harness.start([1], "nobody"),
        harness.finish(grant),
        harness.remove([1], "nobody"),
        harness.trim(1, "nobody"),
    ):
        with pytest.raises(InstanceNotExist, match="nobody"):
            await call


@pytest.mark.parametrize(("form", "packed"), FORMS)
@pytest.mark.parametrize("query", [PREFIX, BATCH, REVERSE])
async def test_filter_keeps_named_specs_in_stored_order(
    harness: Harness, query: QueryType, form: WireForm, packed: bool
) -> None:
    await harness.put([1])
    options: dict[str, Any] = {"query": query, "form": form, "packed": packed, "sw": 1}
    for names, kept in (
        (["tp1"], ["tp1"]),
        (["tp1", "tp0"], ["tp0", "tp1"]),
        (["tp1", "other"], ["tp1"]),
        (["other"], []),
        ([], ["tp0", "tp1"]),
    ):
        answer = await harness.lookup([1], specs=names, **options)
        assert [list(found.uris) for found in answer] == [kept]
        assert [found.spec_size for found in answer] == [2]


@pytest.mark.parametrize("form", list(WireForm))
async def test_filter_applies_to_placeholders_too(harness: Harness, form: WireForm) -> None:
    for names, kept in ((["tp1", "x"], ["tp1"]), (["x"], []), ([], ["tp0", "tp1"])):
        (miss,) = await harness.lookup([7], query=BATCH, specs=names, form=form)
        assert list(miss.uris) == kept
        assert miss.spec_size == 2
        assert not miss.hit


async def test_a_location_without_an_asked_spec_is_no_hit(harness: Harness) -> None:
    await harness.register("g", groups=[("front", ["tp0"]), ("whole", ["tp0", "tp1"])])
    await harness.put([1, 2, 3], "g", names=["whole", "front", "whole"])
    assert len(await harness.lookup([1, 2, 3], "g")) == 3
    assert len(await harness.lookup([1, 2, 3], "g", specs=["tp0"])) == 3
    assert len(await harness.lookup([1, 2, 3], "g", specs=["tp1"])) == 1
    batch = await harness.lookup([1, 2, 3], "g", specs=["tp1"], query=BATCH)
    assert [found.hit for found in batch] == [True, False, True]
    (partial,) = await harness.lookup([2], "g")
    assert partial.spec_size == 1
    assert list(partial.uris) == ["tp0"]


async def test_meta_names_the_state_of_every_unmasked_key(harness: Harness) -> None:
    written = await stock(harness)
    found = await harness.meta([1, 3, 5, 4], mask=BlockMask(values=[False, False, False, True]))
    assert [m["status"] for _, m in found] == ["CLS_SERVING", "CLS_NOT_FOUND", "CLS_WRITING"]
    assert found[0][0] == written[1].by_key[1]
    assert found[2][0] == written[5].by_key[5]
    assert found[1][0].uris == {"tp0": "", "tp1": ""}
    assert found[1][1] == {"status": "CLS_NOT_FOUND"}
    assert set(found[0][1]) == {"id", "status"}
    assert len(found[0][1]["id"]) == 8


@pytest.mark.parametrize("form", list(WireForm))
async def test_meta_details_tell_size_times_and_place(harness: Harness, form: WireForm) -> None:
    began = int(harness.clock.now() * 1000)
    grant = await harness.start([1])
    harness.clock.advance(2)
    harness.fill(grant)
    await harness.finish(grant)
    harness.clock.advance(2)
    await harness.lookup([1])
    ((location, meta),) = await harness.meta([1], detail=1, form=form)
    assert location == grant.by_key[1]
    assert meta["size"] == 2 * SLOT
    assert meta["create_time_ms"] == began
    assert meta["finish_time_ms"] == began + 2000
    assert meta["last_access_time_ms"] == began + 4000
    assert meta["storage"] == "nfs_01"
    assert [place["id"] for place in meta["locations"]] == [meta["id"]]


async def test_location_ids_differ(harness: Harness) -> None:
    await harness.put(list(range(300)))
    ids = {m["id"] for _, m in await harness.meta(list(range(300)))}
    assert len(ids) == 300
    assert all(len(i) == 8 and i.isalnum() and i == i.lower() for i in ids)


async def test_prefix_answers_are_cut_at_the_reply_limit_and_batches_refused(
    harness: Harness,
) -> None:
    keys = list(range(40))
    await harness.put(keys)
    whole = await harness.manager.lookup(_request(keys))
    size = len(whole.body)
    settings = harness.settings
    for limit, hits in ((size, 40), (size - 1, 39), (size // 2, 20)):
        harness.settings = type(settings)(reply_bytes_max=limit, grace_s_min=settings.grace_s_min)
        await harness.restart()
        assert await harness.hits(keys) == hits
        if limit < size:
            with pytest.raises(ReplyTooLarge):
                await harness.lookup(keys, query=BATCH)
        else:
            assert len(await harness.lookup(keys, query=BATCH)) == 40


def _request(keys: list[int]) -> Any:
    from kvcm.cache.api import LookupRequest
    from kvcm.core.keys import KeyBatch

    return LookupRequest("i1", KeyBatch.from_ints(keys))
