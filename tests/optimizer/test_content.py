"""Every way in which a block's bytes can be wrong is noticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.optimizer.content import BlockContent

int64 = st.integers(-(2**63), 2**63 - 1)
content = BlockContent("instance")


@given(int64, st.integers(0, 300))
def test_the_right_bytes_have_the_right_size_and_no_fault(key, size):
    data = content.make(key, "tp0", size)
    assert len(data) == size
    assert content.fault(key, "tp0", size, data) is None


@given(int64, int64, st.integers(8, 300))
def test_another_key_spec_or_instance_makes_other_bytes(key, other, size):
    data = content.make(key, "tp0", size)
    assert content.fault(key, "tp1", size, data)
    assert BlockContent("other").fault(key, "tp0", size, data)
    if other != key:
        assert content.fault(other, "tp0", size, data)


def test_a_swapped_block_is_named():
    assert content.fault(1, "tp0", 4096, content.make(-9, "tp0", 4096)) == (
        "holds the bytes of block -9"
    )


@pytest.mark.parametrize("size", [24, 4096, 4099])
def test_zeroed_cut_shifted_and_torn_bytes_are_noticed(size):
    right = content.make(5, "tp0", size)
    other = content.make(6, "tp0", size)
    assert content.fault(5, "tp0", size, bytes(size)) == "all bytes are zero"
    assert content.fault(5, "tp0", size, right[:-1]) == f"{size - 1} bytes instead of {size}"
    assert content.fault(5, "tp0", size, right[8:] + right[:8])
    middle = slice(8, size - 8)
    torn = right[:8] + other[middle] + right[-8:]
    assert content.fault(5, "tp0", size, torn) == "differs from byte 8 on"


def test_no_part_of_a_block_repeats_inside_it():
    data = content.make(5, "tp0", 4096)
    words = {data[i : i + 8] for i in range(8, 4088, 8)}
    assert len(words) == 510
