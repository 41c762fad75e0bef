"""How many distinct keys there were, in 64 KiB: HyperLogLog over whole arrays of keys. Pure.

Why not a sketch library: those known update one key per call, which took five times as long for a
request of thousands of keys (docs/decisions/0020).
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt

from kvcm.core.errors import InvalidArgument

Hashes = npt.NDArray[np.uint64]

PLACES_LOG2 = 16
"""A standard error of 1.04 / sqrt(2 ** 16) = 0.41 %."""
STANDARD_ERROR = 1.04 / math.sqrt(1 << PLACES_LOG2)
_PLACES = 1 << PLACES_LOG2
_RANK_MAX = 64 - PLACES_LOG2 + 1
_MANTISSA_BITS = 52
_EXPONENT_BIAS = 1023
_PLACE_SHIFT = np.uint64(64 - PLACES_LOG2)
_REST_SHIFT = np.uint64(PLACES_LOG2)
_TO_MANTISSA = np.uint64(63 - _MANTISSA_BITS)
_SENTINEL = np.uint64(1 << (_MANTISSA_BITS + 1 - _RANK_MAX))
_ZLIB_LEVEL = 1


def hashes(raw: bytes, seed: int) -> Hashes:
    """One well mixed 64-bit value per key (the finalizer of splitmix64).

    Args:
        raw: little-endian int64 keys.
        seed: of the keys' instance: equal keys of two instances are different blocks.
    """
    mixed: Hashes = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    mixed ^= np.uint64(seed)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class Marks:
    """What hashes say, ready for any number of sketches: where, and how rare."""

    __slots__ = ("places", "ranks")

    def __init__(self, values: Hashes) -> None:
        self.places: npt.NDArray[np.intp] = (values >> _PLACE_SHIFT).astype(np.intp)
        # Leading zeros by way of a float's exponent; the sentinel ends them at the last bit used.
        rest = (((values << _REST_SHIFT) >> _TO_MANTISSA) | _SENTINEL).astype(np.float64)
        exponents = (rest.view(np.uint64) >> np.uint64(_MANTISSA_BITS)).astype(np.int64)
        self.ranks: npt.NDArray[np.uint8] = (
            _MANTISSA_BITS + 1 + _EXPONENT_BIAS - exponents
        ).astype(np.uint8)


class Distinct:
    """A set of which only the size is known, within ``STANDARD_ERROR``."""

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        self._ranks = np.zeros(_PLACES, dtype=np.uint8)

    def add(self, marks: Marks) -> None:
        """Add keys."""
        places, ranks = marks.places, marks.ranks
        rarer = ranks > self._ranks[places]
        if rarer.any():
            np.maximum.at(self._ranks, places[rarer], ranks[rarer])

    def merge(self, other: Distinct) -> None:
        """Add what is in another set."""
        np.maximum(self._ranks, other._ranks, out=self._ranks)

    def copy(self) -> Distinct:
        """A set of its own."""
        made = Distinct()
        made.merge(self)
        return made

    def clear(self) -> None:
        """Make it empty."""
        self._ranks.fill(0)

    def pack(self) -> bytes:
        """Compressed: a few bytes when nearly empty, 30 KiB at most in practice."""
        return zlib.compress(self._ranks.tobytes(), _ZLIB_LEVEL)

    @classmethod
    def unpack(cls, packed: bytes) -> Distinct:
        """What ``pack`` made.

        Raises:
            InvalidArgument: it is something else.
        """
        reader = zlib.decompressobj()
        try:
            data = reader.decompress(packed, _PLACES + 1)
        except zlib.error as error:
            raise InvalidArgument(f"a packed sketch is damaged: {error}") from error
        made = cls()
        if len(data) == _PLACES:
            made._ranks = np.frombuffer(data, dtype=np.uint8).copy()
        if len(data) != _PLACES or int(made._ranks.max()) > _RANK_MAX:
            raise InvalidArgument("a packed sketch is not one")
        return made

    def count(self) -> float:
        """Distinct keys, estimated (O. Ertl, "New cardinality estimation algorithms for
        HyperLogLog sketches", 2017, algorithm 6: without tables, and without bias for few keys)."""
        held = np.bincount(self._ranks, minlength=_RANK_MAX + 1).tolist()
        if held[0] == _PLACES:
            return 0.0
        total = _PLACES * _tau(1 - held[_RANK_MAX] / _PLACES)
        for rank in range(_RANK_MAX - 1, 0, -1):
            total = (total + held[rank]) / 2
        total += _PLACES * _sigma(held[0] / _PLACES)
        return _PLACES * _PLACES / (2 * math.log(2) * total)


def _sigma(x: float) -> float:
    factor, total, before = 1.0, x, -1.0
    while total != before:
        x *= x
        before = total
        total += x * factor
        factor += factor
    return total


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    factor, total, before = 1.0, 1 - x, -1.0
    while total != before:
        x = math.sqrt(x)
        before = total
        factor /= 2
        total -= (1 - x) ** 2 * factor
    return total / 3
