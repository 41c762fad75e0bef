"""Keys from tokens (wire.md §3), seen through a server that is told tokens and asked for keys."""

from __future__ import annotations

import pytest
from wire_harness import Instance

VECTORS = [
    (
        1,
        [1, 2, 3, 4],
        [-7046029254386353130, -8366447769517741626, 8024479182958521834, 455111481605203084],
    ),
    (2, [1, 2, 3, 4], [-8366447769517741626, 455111481605203084]),
    (1, [0], [-7046029254386353131]),
    (1, [-1], [-7046029254386353132]),
    (4, [0, 1, 2, 3, 4, 5, 6, 7], [455111276453135508, 6713779586671547074]),
]
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1


@pytest.mark.parametrize(("block_size", "tokens", "keys"), VECTORS)
def test_blocks_written_by_tokens_are_found_by_the_keys_of_the_page(
    register, block_size, tokens, keys
):
    instance = register(block_size=block_size)
    started = instance.ok("StartWriteCache", token_ids=tokens)
    assert len(started["locations"]) == len(keys)
    instance.finish(started["write_session_id"], {"offset": len(keys)})
    assert instance.prefix(keys) == started["locations"]


@pytest.mark.parametrize(("block_size", "tokens", "keys"), VECTORS)
def test_blocks_written_by_keys_are_found_by_tokens(register, block_size, tokens, keys):
    instance = register(block_size=block_size)
    locations = instance.write(keys)
    for query in ("QT_PREFIX_MATCH", "QT_BATCH_GET"):
        assert instance.lookup(query, [], token_ids=tokens) == locations


def test_the_tail_that_fills_no_block_is_dropped(register):
    instance = register(block_size=4)
    locations = instance.write([455111276453135508, 6713779586671547074])
    assert instance.prefix([], token_ids=list(range(7))) == locations[:1]
    assert instance.prefix([], token_ids=list(range(11))) == locations
    assert instance.lookup("QT_BATCH_GET", [], token_ids=list(range(11))) == locations


def test_block_keys_win_over_tokens(register):
    instance = register(block_size=1)
    locations = instance.write([7])
    assert instance.prefix([7], token_ids=[1, 2, 3]) == locations
    assert instance.prefix([8], token_ids=[7]) == []


@pytest.mark.parametrize("tokens", [[], [1, 2, 3]], ids=["none", "less-than-a-block"])
def test_zero_keys_are_an_empty_match_and_an_empty_session(instance: Instance, tokens):
    assert instance.prefix([], token_ids=tokens) == []
    assert instance.batch([], token_ids=tokens) == []
    started = instance.ok("StartWriteCache", token_ids=tokens)
    assert started["block_mask"] == {"offset": 0}
    assert started["locations"] == []
    assert len(started["write_session_id"]) == 32
    answer = instance.finish(started["write_session_id"], {"offset": 0})
    assert answer["header"]["status"]["code"] == "OK"


def test_any_int64_is_a_key(instance: Instance):
    keys = [0, -1, INT64_MIN, INT64_MAX, 1 << 53, (1 << 53) + 1]
    locations = instance.write(keys)
    assert len(locations) == len(keys)
    assert instance.batch(keys) == locations
    assert instance.prefix(keys) == locations
    assert instance.batch([INT64_MIN + 1, INT64_MAX - 1]) != locations[2:4]


def test_tokens_of_the_whole_int64_range_hash(register):
    instance = register(block_size=1)
    tokens = [INT64_MIN, INT64_MAX, 0, -1, 1 << 40]
    locations = instance.ok("StartWriteCache", token_ids=tokens)["locations"]
    assert len({str(location) for location in locations}) == len(tokens)


def test_tokens_work_in_every_call_that_takes_keys(register):
    instance = register(block_size=2)
    keys = [-8366447769517741626, 455111481605203084]
    instance.write(keys)
    tokens = [1, 2, 3, 4, 5]
    assert len(instance.ok("GetCacheMeta", token_ids=tokens)["metas"]) == 2
    instance.ok("RemoveCache", token_ids=tokens, block_mask={"offset": 1})
    assert instance.statuses(keys) == ["SERVING", "NOT_FOUND"]
