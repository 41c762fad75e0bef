"""Stored records: what goes in comes out, and no flipped bit passes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvcm.core.errors import CorruptRecord
from kvcm.metaindex import records
from kvcm.metaindex.records import Cause, Extent, Phase, Run, State, Trash, Use

EID = bytes(range(12))


def extent(count: int) -> Extent:
    return Extent(
        extent_id=EID,
        keys=b"".join((7 * i - 3).to_bytes(8, "little", signed=True) for i in range(count)),
        storage="nfs_01",
        storage_type=4,
        descriptor=b"\x01where",
        specs=(("tp0", 64), ("tp1", 32)),
        spec_sets=(3, 1),
        subset_of=bytes(i % 2 for i in range(count)),
        trim=2,
        runs=(Run(0, 5, bytes(12), 4),),
        started_ms=1_700_000_000_000,
        timeout_s=30,
    )


STATE = State(b"version1", Phase.SETTLED, 17, 0b1011, 0b1111, 0b0100, 18, Cause.NONE, 64)
TRASH = Trash(EID, b"version1", "nfs_01", 0b101, 4096, True)


def read(count: int, chunks: list[tuple[bytes, bytes]]) -> Extent:
    header, found = records.decode_header(EID, chunks[0][1])
    assert found == count
    return records.join_chunks(header, count, [value for _, value in chunks[1:]])


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1025])
def test_an_extent_comes_back(count: int) -> None:
    chunks = records.encode_extent(extent(count))
    assert len(chunks) == records.chunk_count(count)
    assert read(count, chunks) == extent(count)


def test_followers_come_back() -> None:
    wanted = replace(extent(3), followers=(b"f" * 12, b"g" * 12))
    assert read(3, records.encode_extent(wanted)) == wanted


def test_state_and_trash_come_back() -> None:
    assert records.decode_state(EID, records.encode_state(STATE)) == STATE
    assert records.decode_trash(TRASH.key, records.encode_trash(TRASH)) == TRASH


def flips(data: bytes, start: int = 0) -> list[bytes]:
    out = []
    for at in range(start, len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        out.append(bytes(changed))
    return out


def test_no_flipped_bit_of_an_extent_passes() -> None:
    chunks = records.encode_extent(extent(513))
    for number, (key, value) in enumerate(chunks):
        for changed in flips(value):
            with pytest.raises(CorruptRecord):
                read(513, [*chunks[:number], (key, changed), *chunks[number + 1 :]])


def test_no_flipped_bit_of_a_state_or_of_trash_passes() -> None:
    for changed in flips(records.encode_state(STATE)):
        with pytest.raises(CorruptRecord):
            records.decode_state(EID, changed)
    for changed in flips(records.encode_trash(TRASH)):
        with pytest.raises(CorruptRecord):
            records.decode_trash(TRASH.key, changed)


def test_a_record_under_another_key_does_not_pass() -> None:
    chunks = records.encode_extent(extent(1025))
    swapped = [chunks[0], (chunks[1][0], chunks[2][1]), (chunks[2][0], chunks[1][1])]
    with pytest.raises(CorruptRecord):
        read(1025, swapped)
    with pytest.raises(CorruptRecord):
        records.decode_header(bytes(12), chunks[0][1])


@pytest.mark.parametrize("heat", [-math.inf, -3.25, 0.0, 1e6])
@pytest.mark.parametrize("parents", [(), (bytes(12),), (b"a" * 12, b"b" * 12)])
def test_a_use_is_read_as_it_was_written(heat: float, parents: tuple[bytes, ...]) -> None:
    use = Use(1_700_000_000_123, heat, parents)
    assert records.decode_use(records.encode_use(use)) == use


def test_a_stamp_of_before_uses_were_counted_is_read() -> None:
    assert records.decode_use((77).to_bytes(8, "big")) == Use(77)


@pytest.mark.parametrize("data", [b"", b"\x02" + bytes(16), bytes(9), bytes(18)])
def test_a_use_that_does_not_parse_was_never(data: bytes) -> None:
    assert records.decode_use(data) == Use()
