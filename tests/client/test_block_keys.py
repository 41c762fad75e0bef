"""Block keys: identity, determinism, speed (field cases R17, R22)."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.client import KeyChain, block_keys, hash_fingerprint, token_block_keys
from kvcm.core.errors import InvalidArgument

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(alphabet=st.sampled_from("ab\0\x1f|:,/=\\;é\ud800"), max_size=6)
TOKENS = list(range(8))


def test_a_key_is_the_head_of_a_chained_sha256() -> None:
    first, second = block_keys(TOKENS, 4)
    again = block_keys(TOKENS[:4], 4)
    assert again == [first]
    assert first != second
    assert -(2**63) <= first < 2**63
    # Each digest goes on from the one before: a changed first token changes every key.
    assert not set(block_keys([99, *TOKENS[1:]], 4)) & {first, second}


def test_a_partial_last_block_gets_no_key() -> None:
    assert len(block_keys(TOKENS, 3)) == 2
    assert block_keys([1, 2], 3) == []
    assert block_keys([], 3) == []


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_that_is_not_positive_is_refused(block_size: int) -> None:
    with pytest.raises(InvalidArgument, match="block_size"):
        block_keys(TOKENS, block_size)


@pytest.mark.parametrize("token", [2**63, -(2**63) - 1, 1.5, "1"])
def test_a_token_that_is_no_int64_is_refused(token: object) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        block_keys([0, token], 1)  # type: ignore[list-item]


def test_int64_extremes_have_keys() -> None:
    assert len(set(block_keys([2**63 - 1, -(2**63), 0, -1], 1))) == 4


def test_float_arrays_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        block_keys(np.array([1.0, 2.0]), 1)  # type: ignore[arg-type]


@given(st.lists(INT64, max_size=40), st.integers(1, 7))
def test_every_kind_of_token_sequence_gives_the_same_keys(
    tokens: list[int], block_size: int
) -> None:
    keys = block_keys(tokens, block_size)
    assert block_keys(array("q", tokens), block_size) == keys
    assert block_keys(np.array(tokens, dtype=np.int64), block_size) == keys
    assert block_keys(tuple(tokens), block_size) == keys


@given(st.lists(st.lists(INT64, max_size=9)), st.integers(1, 5))
def test_a_chain_gives_the_same_keys_however_tokens_arrive(
    parts: list[list[int]], block_size: int
) -> None:
    chain = KeyChain(block_size, salt="s")
    new = [key for part in parts for key in chain.append(part)]
    whole = [token for part in parts for token in part]
    assert new == chain.keys == block_keys(whole, block_size, salt="s")


def test_a_refused_append_adds_nothing() -> None:
    chain = KeyChain(2)
    chain.append([1])
    with pytest.raises(InvalidArgument):
        chain.append([2, 2**64])
    assert chain.append([2]) == block_keys([1, 2], 2)


Identity = tuple[str, tuple[tuple[str, str], ...], str]
IDENTITY = st.tuples(TEXT, st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple), TEXT)


def canonical(identity: Identity) -> object:
    salt, extra, model = identity
    return salt, tuple(sorted((kind, value) for kind, value in extra if value)), model


@given(IDENTITY, IDENTITY)
def test_keys_are_equal_exactly_when_salt_extra_keys_and_model_are(
    one: Identity, other: Identity
) -> None:
    def keys(identity: Identity) -> list[int]:
        salt, extra, model = identity
        return block_keys(TOKENS, 4, salt=salt, extra=extra, model_fingerprint=model)

    same = canonical(one) == canonical(other)
    assert (keys(one) == keys(other)) is same
    assert bool(set(keys(one)) & set(keys(other))) is same


@given(TEXT.filter(bool))
def test_a_text_as_lora_salt_or_model_gives_different_keys(text: str) -> None:
    variants = [
        block_keys(TOKENS, 4),
        block_keys(TOKENS, 4, salt=text),
        block_keys(TOKENS, 4, extra={"lora": text}),
        block_keys(TOKENS, 4, extra={"salt": text}),
        block_keys(TOKENS, 4, extra={"lora": text}, salt=text),
        block_keys(TOKENS, 4, model_fingerprint=text),
        block_keys(TOKENS, 4, extra=[("lora", text), ("tenant", text)]),
    ]
    assert len({keys[0] for keys in variants}) == len(variants)


def test_the_order_of_extra_keys_does_not_matter() -> None:
    pairs = [("lora", "x"), ("image", "y")]
    assert block_keys(TOKENS, 4, extra=pairs) == block_keys(TOKENS, 4, extra=dict(pairs[::-1]))


def test_the_block_size_is_part_of_the_identity() -> None:
    assert not set(block_keys([0] * 8, 2)) & set(block_keys([0] * 8, 4))


def test_keys_do_not_change_between_releases() -> None:
    """Pinned: stored cache is found by these numbers."""

    def part(tag: bytes, value: bytes) -> bytes:
        return struct.pack(">I", len(tag)) + tag + struct.pack(">Q", len(value)) + value

    root = hashlib.sha256(
        part(b"version", b"kvcm-block-keys-1")
        + part(b"block_size", b"2")
        + part(b"salt", b"s")
        + part(b"model", b"m")
        + part(b"extra_kind", b"lora")
        + part(b"extra_value", b"x")
    ).digest()
    first = hashlib.sha256(root + struct.pack("<2q", 7, -1)).digest()
    second = hashlib.sha256(first + struct.pack("<2q", 8, 9)).digest()
    expected = [struct.unpack(">q", digest[:8])[0] for digest in (first, second)]
    keys = block_keys([7, -1, 8, 9], 2, salt="s", extra={"lora": "x"}, model_fingerprint="m")
    assert keys == expected
    assert hash_fingerprint() == "kvcm-block-keys-1:68b3bb01603be042"


def test_keys_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    code = (
        "from kvcm.client import block_keys, hash_fingerprint;"
        "print(block_keys(range(9), 2, salt='s', extra={'b': '1', 'a': '2'}), hash_fingerprint())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    here = block_keys(range(9), 2, salt="s", extra={"b": "1", "a": "2"})
    assert outputs == {f"{here} {hash_fingerprint()}\n"}


def test_the_compatibility_hash_is_the_protocols() -> None:
    assert token_block_keys(range(8), 4) == [455111276453135508, 6713779586671547074]
