"""Key batches: both forms of the same keys agree."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm._pb import meta_pb2
from kvcm.core.errors import InvalidArgument
from kvcm.core.hashing import TokenHasher, token_block_keys
from kvcm.core.keys import INT64_MAX, INT64_MIN, KeyBatch, encode_varint, pack_keys, unpack_keys

EXTREMES = [0, 1, -1, 127, 128, INT64_MIN, INT64_MAX, 1 << 35, -(1 << 35)]
int64 = st.integers(INT64_MIN, INT64_MAX) | st.sampled_from(EXTREMES)


@given(st.lists(int64, max_size=60))
def test_packed_form_is_protobufs(keys: list[int]) -> None:
    raw = KeyBatch.from_ints(keys).data
    packed, offsets = pack_keys(raw)
    message = meta_pb2.GetCacheLocationRequest()
    field = b"\x22" + encode_varint(len(packed)) + packed if keys else b""
    message.ParseFromString(field)
    assert list(message.block_keys) == keys
    assert message.SerializeToString() == field
    assert unpack_keys(packed) == raw
    assert list(offsets) == [
        sum(len(encode_varint(k)) for k in keys[:i]) for i in range(len(keys) + 1)
    ]


@given(st.lists(int64, min_size=1, max_size=40), st.data())
def test_positions_agree_between_forms(keys: list[int], data: st.DataObject) -> None:
    raw = KeyBatch.from_ints(keys)
    packed = KeyBatch.from_packed(pack_keys(raw.data)[0])
    index = data.draw(st.integers(0, len(keys) - 1))
    for batch in (raw, packed):
        assert len(batch) == len(keys)
        assert batch.key_at(batch.offset_of(index)) == keys[index]
        assert batch.index_at(batch.offset_of(index)) == index
        assert batch.offset_of(len(keys)) == len(batch.data)
        assert batch.array() == array("q", keys)
        assert batch.raw() == raw.data


@given(st.lists(int64, max_size=40), st.integers(0, 45), st.integers(0, 45), st.integers(1, 9))
def test_some_keys_are_those_of_the_range(
    keys: list[int], start: int, stop: int, step: int
) -> None:
    for decoded in (False, True):
        batch = KeyBatch.from_packed(pack_keys(KeyBatch.from_ints(keys).data)[0])
        if decoded:
            batch.array()
        assert batch.some(start, stop, step) == keys[start:stop:step]


@pytest.mark.parametrize("data", [b"\x80", b"\x01\xff", b"\xff" * 11 + b"\x01"])
def test_malformed_varints_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="varint"):
        unpack_keys(data)


@given(st.lists(int64, max_size=60), st.integers(1, 20))
def test_pieces_are_all_keys_in_order(keys: list[int], count: int) -> None:
    raw = KeyBatch.from_ints(keys)
    for batch in (raw, KeyBatch.from_packed(pack_keys(raw.data)[0])):
        at, pieces = 0, []
        while at < len(batch.data):
            piece, at = batch.piece(at, count)
            pieces.append(piece)
        assert b"".join(pieces) == raw.data
        assert all(0 < len(piece) <= 8 * 10 * count for piece in pieces)


def test_a_piece_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        KeyBatch.from_packed(b"\x01" + b"\xff" * 10 + b"\x01").piece(1, 1)


@pytest.mark.parametrize("key", [INT64_MIN - 1, INT64_MAX + 1, 1.5, "7"])
def test_only_int64_are_keys(key: object) -> None:
    with pytest.raises(InvalidArgument, match="int64"):
        KeyBatch.from_ints([key])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("tokens", "block_size", "keys"),
    [
        (
            [1, 2, 3, 4],
            1,
            [
                -7046029254386353130,
                -8366447769517741626,
                8024479182958521834,
                455111481605203084,
            ],
        ),
        ([1, 2, 3, 4], 2, [-8366447769517741626, 455111481605203084]),
        ([0], 1, [-7046029254386353131]),
        ([-1], 1, [-7046029254386353132]),
        (list(range(8)), 4, [455111276453135508, 6713779586671547074]),
        ([1, 2, 3], 4, []),
    ],
)
def test_token_hash_vectors(tokens: list[int], block_size: int, keys: list[int]) -> None:
    assert token_block_keys(tokens, block_size) == keys


@given(st.lists(int64, max_size=50), st.integers(1, 7), st.integers(1, 9))
def test_token_hash_in_pieces_is_the_same(tokens: list[int], block: int, step: int) -> None:
    hasher = TokenHasher(block)
    for start in range(0, len(tokens), step):
        hasher.update(tokens[start : start + step])
    assert hasher.keys == token_block_keys(tokens, block)
