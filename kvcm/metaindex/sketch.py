"""How often keys were asked for lately: a count-min sketch of small counters. Pure.

Counts fade: within ``period`` uses every counter is halved once, a few with each batch, so that no
step does more than its share. An estimate is at least half of a key's uses among the last
``period`` (all of them, since its counters were last halved), and little more than that while there
are about as many counters as keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.core.limits import SKETCH_CELLS_MAX, SKETCH_CELLS_MIN

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.uint8]

COUNT_MAX = 255
_ROWS = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Odd multipliers: the digits of the square roots of 2, 3, 5 and 7.
_MULTIPLIERS = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1],
    dtype=np.uint64,
)
_HALF = np.uint64(32)


def hashes(raw: bytes, seed: int) -> Hashes:
    """One well mixed 64-bit value per key.

    Args:
        raw: little-endian int64 keys.
        seed: of the keys' instance: equal keys of two instances are different things.
    """
    mixed: Hashes = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    mixed ^= np.uint64(seed)
    mixed *= _GOLDEN
    mixed ^= mixed >> _HALF
    return mixed


class FrequencySketch:
    """Counts uses of keys, each at most ``COUNT_MAX``.

    Attributes:
        period: uses within which all counts are halved.
        periods: how often that has happened; before the first time, counts mean little.
    """

    def __init__(self, cells: int, period: int) -> None:
        """``cells``: about as many as there are keys that matter; rounded up to a power of two
        within the limits. Memory is five bytes a cell."""
        self._bits = (min(max(cells, SKETCH_CELLS_MIN), SKETCH_CELLS_MAX) - 1).bit_length()
        self._rows = np.zeros((_ROWS, 1 << self._bits), dtype=np.uint8)
        self._announced = np.zeros(1 << self._bits, dtype=np.uint8)
        self.period = max(1, period)
        self.periods = 0
        self._uses = 0
        self._faded = 0

    @property
    def cells(self) -> int:
        """Counters in a row."""
        return 1 << self._bits

    def use(self, keys: Hashes) -> None:
        """Count one use of each key; one that comes twice in the batch counts once."""
        self._count(self._places(keys))
        self._fade(len(keys))

    def announce(self, keys: Hashes) -> None:
        """Count one use of each key, whose write, if one follows, is part of the same use."""
        places = self._places(keys)
        self._count(places)
        first = places[0]
        self._announced[first] += self._announced[first] < COUNT_MAX
        self._fade(len(keys))

    def write(self, keys: Hashes) -> None:
        """Count one use of those keys whose use was not announced."""
        first = self._places(keys)[0]
        known = self._announced[first] > 0
        self._announced[first[known]] -= 1
        if not known.all():
            self.use(keys[~known])

    def estimate(self, keys: Hashes) -> Counts:
        """Uses of each key: at least the true number of this period."""
        places = self._places(keys)
        found: Counts = np.take_along_axis(self._rows, places, axis=1).min(axis=0)
        return found

    def _places(self, keys: Hashes) -> npt.NDArray[np.intp]:
        shift = np.uint64(64 - self._bits)
        return (keys * _MULTIPLIERS[:, np.newaxis] >> shift).astype(np.intp)

    def _count(self, places: npt.NDArray[np.intp]) -> None:
        """Raise only the lowest counters of each key: the others count somebody else's uses too."""
        values = np.take_along_axis(self._rows, places, axis=1)
        least = values.min(axis=0)
        for row, cells, value in zip(self._rows, places, values, strict=True):
            row[cells[(value == least) & (least < COUNT_MAX)]] += 1

    def _fade(self, uses: int) -> None:
        """Halve the share of the counters that so many uses are of the period."""
        self._uses += uses
        while True:
            end = min(self.cells, self.cells * self._uses // self.period)
            self._rows[:, self._faded : end] >>= 1
            # Those of requests that found everything: no write followed.
            self._announced[self._faded : end] >>= 1
            self._faded = end
            if self._uses < self.period:
                return
            self._uses -= self.period
            self._faded = 0
            self.periods += 1
