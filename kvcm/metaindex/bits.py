"""Bit sets over block positions, kept as ints: bit i is position i."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def ones(count: int) -> int:
    """The set {0 … count - 1}."""
    return (1 << count) - 1


def from_flags(flags: Sequence[bool]) -> int:
    """The set of positions whose flag is true."""
    if not flags:
        return 0
    packed = np.packbits(np.asarray(flags, dtype=np.bool_), bitorder="little")
    return int.from_bytes(packed.tobytes(), "little")


def to_flags(bits: int, count: int) -> npt.NDArray[np.bool_]:
    """One flag for each of ``count`` positions."""
    packed = np.frombuffer(bits.to_bytes((count + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)


def to_bytes(bits: int) -> bytes:
    """Little-endian bytes, as short as possible."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def from_bytes(data: bytes) -> int:
    """Inverse of ``to_bytes``."""
    return int.from_bytes(data, "little")


def run_from(bits: int, position: int) -> int:
    """How many consecutive positions from ``position`` on are in the set."""
    x = bits >> position
    return ((x + 1) & ~x).bit_length() - 1


def positions(bits: int) -> Iterator[int]:
    """Members in ascending order."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
