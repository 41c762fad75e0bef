"""Which commits a full server must take, and names of shards."""

from __future__ import annotations

import random
from typing import Any

import hiredis
import pytest

from kvcm.core.errors import CorruptRecord, InvalidArgument
from kvcm.metaindex.store import Compare, Fence, Mutation, ShardId, Table, Write
from kvcm.metaindex.stores.valkey_scripts import (
    decode_fence,
    encode_fence,
    frees,
    shard_tag,
    space_of,
)
from kvcm.metaindex.stores.valkey_wire import pack

ROWS, EXTENTS, STATES = Table.ROWS, Table.EXTENTS, Table.STATES


@pytest.mark.parametrize(
    ("mutation", "is_freeing"),
    [
        (Mutation(), True),
        (Mutation([Write(EXTENTS, b"k", None), Write(STATES, b"k", None)]), True),
        (Mutation([Write(STATES, b"k", b"v"), Write(Table.TRASH, b"k", b"v")]), True),
        (Mutation([Write(Table.DUE, b"k", b"v")]), True),
        (Mutation([Write(EXTENTS, b"k", b"v"), Write(STATES, b"k", b"v")]), False),
        (Mutation([Write(ROWS, b"k", b"v")]), False),
        (Mutation([Write(ROWS, b"k", b"v")], [Compare(ROWS, b"k", b"vv", True)]), True),
        (Mutation([Write(ROWS, b"k", b"vv")], [Compare(ROWS, b"k", b"vv", True)]), False),
        (Mutation([Write(ROWS, b"k", b"v")], [Compare(ROWS, b"k", b"vv")]), False),
        (Mutation([Write(ROWS, b"k", b"v")], [Compare(ROWS, b"l", b"vv", True)]), False),
    ],
)
def test_a_commit_that_adds_no_extent_and_no_row_frees(
    mutation: Mutation, is_freeing: bool
) -> None:
    assert frees([mutation]) is is_freeing
    assert not frees([mutation, Mutation([Write(ROWS, b"x", b"y")])])


@pytest.mark.parametrize(
    "space", [b"abc-1.2_3", b"{", b"}", b"a}b", b"\0\xff", b"%7b", b"a:1", b"\n"]
)
def test_a_tag_has_no_brace_and_names_its_shard(space: bytes) -> None:
    tag = shard_tag(ShardId(space, 7))
    assert space_of(tag) == space
    assert not {b"{", b"}"} & {tag[i : i + 1] for i in range(len(tag))}


def test_tags_of_different_shards_differ() -> None:
    spaces = [b"a", b"a:1", b"%61", b"61", b"{", b"7b", b"%7b"]
    assert len({shard_tag(ShardId(s, n)) for s in spaces for n in (1, 11)}) == 2 * len(spaces)


def test_fences_sort_as_text() -> None:
    fences = [Fence(0, 0), Fence(0, 10), Fence(2, 9), Fence(2, 10), Fence(10, 0)]
    texts = [encode_fence(fence) for fence in fences]
    assert texts == sorted(texts)
    assert [decode_fence(text) for text in texts] == fences
    encode_fence(Fence(2**64 - 1, 2**64 - 1))
    for bad in (Fence(2**64, 0), Fence(0, -1)):
        with pytest.raises(InvalidArgument):
            encode_fence(bad)
    for text in (b"", b"1.2", texts[0][:-1] + b"x"):
        with pytest.raises(CorruptRecord):
            decode_fence(text)


@pytest.mark.parametrize("count", [1, 2, 16, 17, 63, 64, 65, 66, 501, 502])
@pytest.mark.parametrize("sizes", [(8,), (8, 14), (0, 0), (14, 8, 8), (8, 300)])
def test_a_long_command_is_packed_as_any_other(count: int, sizes: tuple[int, ...]) -> None:
    reference: Any = hiredis.pack_command
    chance = random.Random(count)
    for head in (0, 1, 2, 13):
        words = [chance.randbytes(chance.randrange(40)) for _ in range(min(head, count))]
        words += [chance.randbytes(sizes[i % len(sizes)]) for i in range(count - len(words))]
        for odd_one in (None, count - 1, count // 2):
            if odd_one is not None:
                words[odd_one] = b"\r\n$1\r\n"
            assert pack(tuple(words)) == reference(tuple(words))
