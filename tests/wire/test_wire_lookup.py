"""GetCacheLocation and GetCacheMeta (wire.md §4)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from wire_harness import Instance, code_of, message_of, miss, succeeded, uris

Json = dict[str, Any]
P = miss()
PREFIX, BATCH, REVERSE = "QT_PREFIX_MATCH", "QT_BATCH_GET", "QT_REVERSE_ROLL_SW_MATCH"
LOCATION_ID = re.compile(r"[a-z0-9]{8}\Z")


class Page:
    """The state of the page's table: 1, 2, 4 serve, 3 is unknown, 5 is being written."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        one, two = instance.write([1, 2])
        (four,) = instance.write([4])
        self.open = instance.start([5])
        self.names: dict[str, Json] = {"L1": one, "L2": two, "L4": four, "P": P}

    def ask(self, query: str, keys: list[int], **fields: Any) -> list[Json]:
        return self.instance.lookup(query, keys, **fields)

    def expected(self, names: list[str]) -> list[Json]:
        return [self.names[name] for name in names]


@pytest.fixture
def page(instance: Instance) -> Page:
    return Page(instance)


def bools(*values: bool) -> Json:
    return {"block_mask": {"bool_masks": {"values": list(values)}}}


def offset(value: int) -> Json:
    return {"block_mask": {"offset": value}}


TABLE = [
    (PREFIX, [1, 2, 3, 4], {}, ["L1", "L2"]),
    (PREFIX, [1, 2, 3, 4], offset(1), ["L2"]),
    (PREFIX, [3, 4], offset(1), ["L4"]),
    (PREFIX, [1, 2], bools(True, True), []),
    (PREFIX, [1, 2], offset(6), []),
    (PREFIX, [5, 1], {}, []),
    (PREFIX, [1, 2, 4], bools(True, False, False, False), ["L2", "L4"]),
    (BATCH, [1, 3, 5], {}, ["L1", "P", "P"]),
    (REVERSE, [1, 2, 3, 4], {"sw_size": 2}, ["L1", "L2", "P", "P"]),
    (REVERSE, [1, 2, 4], {"sw_size": 2}, ["P", "L2", "L4"]),
    (REVERSE, [1, 3], {"sw_size": 2}, ["P", "P"]),
]
MORE = [
    # A mask as long as the keys, shorter, longer; present and empty; offsets at the borders.
    (PREFIX, [1, 2, 4], bools(), ["L1", "L2", "L4"]),
    (PREFIX, [1, 2, 4], {"block_mask": {"bool_masks": {}}}, ["L1", "L2", "L4"]),
    (PREFIX, [1, 2, 4], {"block_mask": {}}, ["L1", "L2", "L4"]),
    (PREFIX, [1, 2, 4], bools(True), ["L2", "L4"]),
    (PREFIX, [1, 2, 4], bools(*[False] * 50), ["L1", "L2", "L4"]),
    (PREFIX, [1, 2, 4], bools(False, False, True, True, True), ["L1", "L2"]),
    (PREFIX, [1, 2, 4], offset(0), ["L1", "L2", "L4"]),
    (PREFIX, [1, 2, 4], offset(3), []),
    (PREFIX, [1, 2, 4], offset(2147483647), []),
    # Masked keys are dropped and not checked, wherever they stand.
    (PREFIX, [1, 3, 2, 5, 4], bools(False, True, False, True, False), ["L1", "L2", "L4"]),
    (PREFIX, [3, 5, 77, 1], offset(3), ["L1"]),
    (PREFIX, [1, 3, 2], bools(True, False, False), []),
    # The order is that of the request, and a key may come twice.
    (PREFIX, [4, 2, 1], {}, ["L4", "L2", "L1"]),
    (PREFIX, [1, 1, 2], {}, ["L1", "L1", "L2"]),
    (BATCH, [4, 1, 4], {}, ["L4", "L1", "L4"]),
    (BATCH, [5], {}, ["P"]),
    # Batch and reverse ignore the mask.
    (BATCH, [1, 3, 2], offset(2), ["L1", "P", "L2"]),
    (BATCH, [1, 3, 2], bools(True, True, True), ["L1", "P", "L2"]),
    (REVERSE, [1, 2, 4], {"sw_size": 2, **offset(3)}, ["P", "L2", "L4"]),
    (REVERSE, [1, 2, 4], {"sw_size": 3, **bools(True, True, True)}, ["L1", "L2", "L4"]),
    # Windows.
    (REVERSE, [1, 2, 4], {"sw_size": 0}, ["P", "P", "P"]),
    (REVERSE, [1, 2, 4], {"sw_size": 1}, ["P", "P", "L4"]),
    (REVERSE, [1, 2, 4], {"sw_size": 3}, ["L1", "L2", "L4"]),
    (REVERSE, [1, 2, 3, 4], {"sw_size": 1}, ["P", "P", "P", "L4"]),
    (REVERSE, [1, 2, 3, 4], {"sw_size": 3}, ["P", "P", "P", "P"]),
    (REVERSE, [1, 2, 4, 3, 1, 2, 5], {"sw_size": 2}, ["P", "P", "P", "P", "L1", "L2", "P"]),
    (REVERSE, [1, 2, 4, 3, 1, 5], {"sw_size": 2}, ["P", "L2", "L4", "P", "P", "P"]),
    (REVERSE, [], {"sw_size": 0}, []),
]


@pytest.mark.parametrize(("query", "keys", "fields", "names"), TABLE)
def test_the_table_of_the_page(page: Page, query, keys, fields, names):
    assert page.ask(query, keys, **fields) == page.expected(names)


@pytest.mark.parametrize(("query", "keys", "fields", "names"), MORE)
def test_masks_windows_and_orders(page: Page, query, keys, fields, names):
    assert page.ask(query, keys, **fields) == page.expected(names)


@pytest.mark.parametrize(
    ("query", "keys", "fields", "names"),
    [
        (REVERSE, [1], {"sw_size": 2}, "sw_size"),
        (REVERSE, [], {"sw_size": 1}, "sw_size"),
        (REVERSE, [1, 2], {"sw_size": -1}, "sw_size"),
        (REVERSE, [1, 2], {"sw_size": 3}, "sw_size"),
        (PREFIX, [1, 2], offset(-1), "offset"),
        (PREFIX, [1, 2], offset(-2147483648), "offset"),
        (PREFIX, [], offset(-1), "offset"),
        ("QT_UNSPECIFIED", [1], {}, "query_type"),
        (77, [1], {}, "query_type"),
        (-1, [1], {}, "query_type"),
    ],
)
def test_wrong_requests_are_refused_naming_the_field(instance, query, keys, fields, names):
    answer = instance.call("GetCacheLocation", query_type=query, block_keys=keys, **fields)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert names in message_of(answer)
    assert answer["locations"] == []


def test_a_query_without_a_type_is_refused(instance: Instance):
    answer = instance.call("GetCacheLocation", block_keys=[1])
    assert code_of(answer) == "INVALID_ARGUMENT"


def test_a_negative_offset_is_refused_in_get_cache_meta_and_remove_cache_too(instance):
    for method in ("GetCacheMeta", "RemoveCache"):
        answer = instance.call(method, block_keys=[1], **offset(-1))
        assert code_of(answer) == "INVALID_ARGUMENT", method
        assert "offset" in message_of(answer)


# -- filters ----------------------------------------------------------------------------


def filtered(location: Json, *names: str) -> Json:
    specs = [spec for spec in location["location_specs"] if spec["name"] in names]
    return {**location, "location_specs": specs}


@pytest.mark.parametrize(
    "wanted",
    [["tp0"], ["tp1"], ["tp1", "tp0"], ["tp0", "nobody"], ["tp1", "tp1"]],
    ids="-".join,
)
def test_a_filter_keeps_the_named_specs_in_stored_order(page: Page, wanted):
    one, two = page.names["L1"], page.names["L2"]
    expected = [filtered(one, *wanted), filtered(two, *wanted)]
    fields = {"location_spec_names": wanted}
    assert page.ask(PREFIX, [1, 2, 3], **fields) == expected
    assert page.ask(BATCH, [1, 2, 3], **fields) == [*expected, filtered(P, *wanted)]
    assert page.ask(REVERSE, [1, 2, 3], sw_size=2, **fields) == [*expected, filtered(P, *wanted)]
    assert expected[0]["spec_size"] == 2


def test_unknown_spec_names_are_ignored(page: Page):
    """A filter of unknown names alone asks for no spec, so it hides none of what serves."""
    answer = page.instance.call(
        "GetCacheLocation", query_type=BATCH, block_keys=[1, 3], location_spec_names=["nobody"]
    )
    assert code_of(answer) == "OK"
    hit, placeholder = answer["locations"]
    assert hit["type"] == "ST_NFS"
    assert hit["spec_size"] == placeholder["spec_size"] == 2
    assert placeholder["type"] == "ST_UNSPECIFIED"


@pytest.fixture
def hybrid(register: Callable[..., Instance]) -> Instance:
    """Keys 1 (specs a, b), 2 (a), 3 (b) of an instance with specs a, b, c."""
    instance = register(
        location_spec_infos=[{"name": n, "size": 100} for n in ("a", "b", "c")],
        location_spec_groups=[
            {"name": "both", "spec_names": ["a", "b"]},
            {"name": "first", "spec_names": ["a"]},
            {"name": "second", "spec_names": ["b"]},
            {"name": "all", "spec_names": ["c", "b", "a"]},
        ],
    )
    instance.write([1, 2, 3], location_spec_group_names=["both", "first", "second"])
    return instance


@pytest.mark.parametrize(
    ("wanted", "hits"),
    [
        ([], [1, 2, 3]),
        (["a"], [1, 2]),
        (["b"], [1, 3]),
        (["a", "b"], [1]),
        (["c"], []),
        (["a", "c"], []),
    ],
)
def test_a_hit_carries_every_spec_asked_for(hybrid: Instance, wanted, hits):
    found = hybrid.batch([1, 2, 3], location_spec_names=wanted)
    assert [i + 1 for i, entry in enumerate(found) if entry["type"] == "ST_NFS"] == hits
    for key, entry in zip([1, 2, 3], found, strict=True):
        if key not in hits:
            names = wanted or ["a", "b", "c"]
            assert entry == miss([n for n in ("a", "b", "c") if n in names], spec_size=3)
    leading = next((i for i, key in enumerate([1, 2, 3]) if key not in hits), 3)
    assert hybrid.prefix([1, 2, 3], location_spec_names=wanted) == found[:leading]


def test_spec_size_is_the_number_of_specs_that_a_location_holds(hybrid: Instance):
    sizes = [entry["spec_size"] for entry in hybrid.batch([1, 2, 3])]
    assert sizes == [2, 1, 1]
    shown = hybrid.batch([1], location_spec_names=["b"])[0]
    assert shown["spec_size"] == 2
    assert list(uris(shown)) == ["b"]


def test_a_location_with_the_whole_group_is_granted_beside_a_smaller_one(hybrid: Instance):
    """Key 2 has spec a only; asked for with all three, it is written whole."""
    (whole,) = hybrid.write([2], location_spec_group_names=["all"])
    assert set(uris(whole)) == {"a", "b", "c"}
    assert hybrid.batch([2], location_spec_names=["c"])[0]["location_specs"]
    assert hybrid.prefix([2], location_spec_names=["a", "b", "c"]) == [whole]
    assert len(hybrid.prefix([1, 2], location_spec_names=["a"])) == 2


# -- GetCacheMeta -----------------------------------------------------------------------


def test_meta_has_one_location_and_one_json_for_every_unmasked_key(page: Page):
    answer = page.instance.ok("GetCacheMeta", block_keys=[1, 3, 5, 4])
    metas = [json.loads(meta) for meta in answer["metas"]]
    assert [m["status"] for m in metas] == [
        "CLS_SERVING",
        "CLS_NOT_FOUND",
        "CLS_WRITING",
        "CLS_SERVING",
    ]
    open_location = page.open["locations"][0]
    assert answer["locations"] == [page.names["L1"], P, open_location, page.names["L4"]]


def test_metas_are_compact_json_of_exactly_these_keys(page: Page):
    serving, missing = page.instance.ok("GetCacheMeta", block_keys=[1, 3])["metas"]
    assert missing == '{"status":"CLS_NOT_FOUND"}'
    id_ = json.loads(serving)["id"]
    assert LOCATION_ID.match(id_)
    assert serving == f'{{"id":"{id_}","status":"CLS_SERVING"}}'


@pytest.mark.parametrize(
    ("mask", "asked"),
    [
        (offset(1), [3, 4]),
        (offset(9), []),
        (bools(True, False, True), [3]),
        (bools(False, True), [1, 4]),
        (bools(*[True] * 9), []),
        ({"block_mask": {"bool_masks": {}}}, [1, 3, 4]),
    ],
)
def test_masked_keys_have_no_meta(page: Page, mask, asked):
    masked = page.instance.ok("GetCacheMeta", block_keys=[1, 3, 4], **mask)
    plain = page.instance.ok("GetCacheMeta", block_keys=asked)
    assert masked["locations"] == plain["locations"]
    assert masked["metas"] == plain["metas"]
    assert len(masked["metas"]) == len(asked)


def test_details_add_size_times_storage_and_all_locations(page: Page):
    before = int(time.time() * 1000)
    (meta,) = page.instance.ok("GetCacheMeta", block_keys=[1], detail_level=1)["metas"]
    shown = json.loads(meta)
    assert shown["status"] == "CLS_SERVING"
    assert shown["size"] == 1500
    assert shown["storage"] == "nfs_01"
    assert before - 60_000 < shown["create_time_ms"] <= shown["finish_time_ms"] <= before
    assert shown["last_access_time_ms"] >= shown["create_time_ms"]
    assert [entry["id"] for entry in shown["locations"]] == [shown["id"]]
    same = page.instance.ok("GetCacheMeta", block_keys=[1, 3], detail_level=7)["metas"]
    assert json.loads(same[0]) == shown
    assert same[1] == '{"status":"CLS_NOT_FOUND"}'


def test_location_ids_differ_and_stay(page: Page):
    def ids() -> list[str]:
        metas = page.instance.ok("GetCacheMeta", block_keys=[1, 2, 4, 5])["metas"]
        return [json.loads(meta)["id"] for meta in metas]

    first = ids()
    assert len(set(first)) == 4
    assert all(LOCATION_ID.match(id_) for id_ in first)
    assert ids() == first


def test_meta_does_not_count_as_an_access(page: Page):
    def accessed() -> int:
        (meta,) = page.instance.ok("GetCacheMeta", block_keys=[4], detail_level=1)["metas"]
        stamp: int = json.loads(meta)["last_access_time_ms"]
        return stamp

    first = accessed()
    assert accessed() == first


@pytest.mark.parametrize(
    ("keys", "fields"),
    [([4], {}), ([4], offset(1)), ([4, 3], bools(True, False))],
    ids=["hit", "masked-by-offset", "masked-by-bools"],
)
def test_a_hit_and_a_masked_key_count_as_used(page: Page, keys, fields):
    def accessed() -> int:
        (meta,) = page.instance.ok("GetCacheMeta", block_keys=[4], detail_level=1)["metas"]
        stamp: int = json.loads(meta)["last_access_time_ms"]
        return stamp

    first = accessed()
    # The clock has to move on by a millisecond; the calls in between see to that.
    deadline = time.monotonic() + 10
    while accessed() == first and time.monotonic() < deadline:
        page.ask(PREFIX, keys, **fields)
    assert accessed() > first


def test_admin_get_cache_meta_answers_the_same(page: Page):
    body = {"instance_id": page.instance.id, "block_keys": [1, 3, 5], "block_mask": {"offset": 1}}
    meta = succeeded(page.instance.wire.call("GetCacheMeta", body))
    admin = succeeded(page.instance.wire.admin("GetCacheMeta", body))
    assert admin["locations"] == meta["locations"]
    assert admin["metas"] == meta["metas"]


# -- many keys --------------------------------------------------------------------------


def test_long_chains_in_many_extents_are_walked_to_the_first_miss(instance: Instance):
    locations = []
    for first in range(0, 600, 40):
        locations += instance.write(range(first, first + 40))
    keys = list(range(600))
    assert instance.prefix(keys) == locations
    assert instance.prefix([*keys[:317], 9999, *keys[317:]]) == locations[:317]
    assert instance.prefix(keys, **offset(123)) == locations[123:]
    shuffled = keys[::-1]
    assert instance.batch(shuffled) == locations[::-1]
    window = instance.lookup(REVERSE, keys, sw_size=100)
    assert window == [P] * 500 + locations[500:]
    flags = [i % 3 == 0 for i in keys]
    assert instance.prefix(keys, **bools(*flags)) == [
        entry for entry, flag in zip(locations, flags, strict=True) if not flag
    ]
