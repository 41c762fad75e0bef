"""How often keys were asked for lately: a count-min sketch of small counters. Pure.

Counts fade: within ``period`` uses every counter is halved once, a few with each batch, so that no
step does more than its share. An estimate is at least half of a key's uses among the last
``period`` (all of them, if its counters were not halved since), and little more than the truth
while there are about as many counters as keys.

The four counters of a key lie in one block of 64 bytes: one access to memory finds them all, and
they fade together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcm.core.limits import SKETCH_CELLS_MAX, SKETCH_CELLS_MIN
from kvcm.core.mixing import Hashes

Counts = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]

COUNT_MAX = 255
_ROWS = 4
_BLOCK_CELLS = 16
"""Counters of each row in a block: four bits of the hash choose one."""
_PREPARED_CELLS = 1 << 16
_CELL_SHIFTS = np.array([[0], [4], [8], [12]], dtype=np.uint64)
_CELL_MASK = np.uint64(_BLOCK_CELLS - 1)
_ROW_STARTS = np.array([[0], [16], [32], [48]], dtype=np.intp)


class FrequencySketch:
    """Counts uses of keys, each at most ``COUNT_MAX``.

    Attributes:
        period: uses within which all counts are halved.
        periods: how often that has happened; before the first time, counts mean little.
    """

    def __init__(self, cells: int, period: int) -> None:
        """``cells``: about as many as there are keys that matter; rounded up to a power of two
        within the limits. Memory is five bytes a cell; call ``prepare`` until it is done."""
        bits = (min(max(cells, SKETCH_CELLS_MIN), SKETCH_CELLS_MAX) - 1).bit_length()
        self.cells = 1 << bits
        self._shift = np.uint64(64 + 4 - bits)
        self._counts = np.zeros(_ROWS * self.cells, dtype=np.uint8)
        self._announced = np.zeros(self.cells, dtype=np.uint8)
        self.period = max(1, period)
        self.periods = 0
        self._uses = 0
        self._faded = 0
        self._prepared = 0

    def prepare(self) -> bool:
        """Make the system hand over a piece of the memory, which takes it longer than a batch
        does; False when it all is here."""
        start, self._prepared = self._prepared, self._prepared + _PREPARED_CELLS
        if start >= self.cells:
            return False
        self._counts[_ROWS * start : _ROWS * self._prepared] = 0
        self._announced[start : self._prepared] = 0
        return True

    def use(self, keys: Hashes) -> None:
        """Count one use of each key; one that comes twice in the batch counts once."""
        self._fade(len(keys))
        self._count(self._places(keys))

    def announce(self, keys: Hashes) -> None:
        """Count one use of each key, whose write, if one follows, is part of the same use."""
        self.use(keys)
        first = self._announcements(keys)
        self._announced[first] += self._announced[first] < COUNT_MAX

    def write(self, keys: Hashes) -> None:
        """Count one use of those keys whose use was not announced."""
        first = self._announcements(keys)
        known = self._announced[first] > 0
        self._announced[first[known]] -= 1
        if not known.all():
            self.use(keys[~known])

    def estimate(self, keys: Hashes) -> Counts:
        """Uses of each key: at least those since its counters were last halved."""
        found: Counts = self._counts[self._places(keys)].min(axis=0)
        return found

    def _places(self, keys: Hashes) -> Places:
        """The four counters of each key."""
        found: Places = (keys >> _CELL_SHIFTS & _CELL_MASK).astype(np.intp)
        found += _ROW_STARTS
        found += (keys >> self._shift).astype(np.intp) * (_ROWS * _BLOCK_CELLS)
        return found

    def _announcements(self, keys: Hashes) -> Places:
        block = (keys >> self._shift).astype(np.intp)
        found: Places = block * _BLOCK_CELLS + (keys & _CELL_MASK).astype(np.intp)
        return found

    def _count(self, places: Places) -> None:
        """Raise only the lowest counters of each key: the others count somebody else's uses too."""
        values = self._counts[places]
        least = values.min(axis=0)
        self._counts[places[(values == least) & (least < COUNT_MAX)]] += 1

    def _fade(self, uses: int) -> None:
        """Halve the share of the counters that so many uses are of the period."""
        self._uses += uses
        blocks = self.cells // _BLOCK_CELLS
        while True:
            end = min(blocks, blocks * self._uses // self.period) * _BLOCK_CELLS
            self._counts[_ROWS * self._faded : _ROWS * end] >>= 1
            # Those of requests that found everything: no write followed.
            self._announced[self._faded : end] >>= 1
            self._faded = max(self._faded, end)
            if self._uses < self.period:
                return
            self._uses -= self.period
            self._faded = 0
            self.periods += 1
