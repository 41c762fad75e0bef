"""What became of a sample of the keys, to tell why those that are asked for are missed. Pure.

A key is in the sample by its hash, so it is in it always or never, and a miss in the sample stands
for as many as there are keys for one that is in it. When the keys become too many, or too often
asked for, the sample is halved. As long as neither happens it holds every key, and nothing is
estimated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from kvcm.core.limits import CEILING_SAMPLED_KEYS_MAX, CEILING_SAMPLED_KEYS_PER_S
from kvcm.core.mixing import Hashes
from kvcm.observability.tally import Cause

FORGET_S = 86_400
"""A key that nothing happened to for so long is forgotten."""
HALVINGS_MAX = 40
_USED_S = 60
_DROPPED_PER_STEP = 1_024
_SAVED_PER_STEP = 1_024


class Fate(IntEnum):
    """What last became of a key."""

    ASKED = 0
    REFUSED_QUOTA = 1
    REFUSED_ADMISSION = 2
    WRITING = 3
    FAILED = 4
    HELD = 5
    EVICTED = 6
    REMOVED = 7
    REFUSED_STORAGE = 8


_CAUSE_OF: Mapping[Fate, Cause] = {
    Fate.ASKED: Cause.NEVER_WRITTEN,
    Fate.REFUSED_QUOTA: Cause.REFUSED_QUOTA,
    Fate.REFUSED_ADMISSION: Cause.REFUSED_ADMISSION,
    Fate.WRITING: Cause.UNFINISHED,
    Fate.FAILED: Cause.UNFINISHED,
    Fate.HELD: Cause.UNREACHABLE,
    Fate.EVICTED: Cause.EVICTED,
    Fate.REMOVED: Cause.REMOVED,
    Fate.REFUSED_STORAGE: Cause.STORAGE_UNAVAILABLE,
}


class _Key(NamedTuple):
    """``at_s``: when that came about, and ``used_s`` when something last happened to it.
    ``evicted``: bytes its group had evicted before, if it was."""

    fate: Fate
    at_s: int
    used_s: int
    evicted: int = 0


class SavedKeys(msgspec.Struct, array_like=True):
    """Some keys of a `Sample` in a file: columns of one number per key."""

    hashes: bytes
    fates: bytes
    at_s: bytes
    used_s: bytes
    evicted: bytes


class Sample:
    """The keys of a manager's instances whose fate is followed.

    ``keys_max`` and ``per_s_max`` bound its size and how many it looks at in a second.
    """

    def __init__(
        self,
        keys_max: int = CEILING_SAMPLED_KEYS_MAX,
        per_s_max: int = CEILING_SAMPLED_KEYS_PER_S,
    ) -> None:
        self.halvings = 0
        self._keys_max = keys_max
        self._per_s_max = per_s_max
        self._keys: OrderedDict[int, _Key] = OrderedDict()
        self._to_drop: list[int] = []
        self._since_s = -math.inf
        self._looked_at = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def weight(self) -> int:
        """Keys that one in the sample stands for."""
        return 1 << self.halvings

    def chosen(self, values: Hashes) -> list[tuple[int, int]]:
        """(position, hash) of the keys that are in the sample."""
        if not self.halvings:
            return list(enumerate(values.tolist()))
        places = np.flatnonzero(values & np.uint64(self.weight - 1) == 0)
        return list(zip(places.tolist(), values[places].tolist(), strict=True))

    # ---- what happens ------------------------------------------------------------------------

    def hit(self, value: int, now_s: int) -> None:
        """A key was found."""
        self._looked_at += 1
        before = self._keys.get(value)
        if before is None or before.fate is not Fate.HELD:
            self._put(value, _Key(Fate.HELD, now_s, now_s))
        else:
            self._use(value, before, now_s)

    def miss(
        self, value: int, now_s: int, *, evicted: int, trimmed_s: int, unreadable: bool
    ) -> tuple[Cause, int, int]:
        """A key was not found.

        Args:
            evicted: bytes that its group has evicted until now.
            trimmed_s: when its instance was last trimmed; what was written before is gone.
            unreadable: the lookup ended at a block whose storage cannot be read.

        Returns:
            The cause; for an evicted block how long ago that was, in seconds, and how many bytes
            were evicted since, itself included: with so much more space it would be there still.
        """
        self._looked_at += 1
        known = self._keys.get(value)
        if known is None:
            self._put(value, _Key(Fate.ASKED, now_s, now_s))
            return Cause.NEW, 0, 0
        if known.fate is Fate.HELD and known.at_s <= trimmed_s:
            return Cause.REMOVED, 0, 0
        self._use(value, known, now_s)
        if known.fate is Fate.EVICTED:
            return Cause.EVICTED, now_s - known.at_s, evicted - known.evicted
        if known.fate is Fate.HELD and unreadable:
            return Cause.STORAGE_UNAVAILABLE, 0, 0
        return _CAUSE_OF[known.fate], 0, 0

    def become(self, values: Iterable[int], fate: Fate, now_s: int, evicted: int = 0) -> None:
        """Something happened to keys, other than being asked for.

        Args:
            evicted: bytes that their group had evicted before.
        """
        for value in values:
            self._looked_at += 1
            self._put(value, _Key(fate, now_s, now_s, evicted))

    def _use(self, value: int, key: _Key, now_s: int) -> None:
        # To the second it would be most of the work.
        if now_s - key.used_s >= _USED_S:
            self._put(value, key._replace(used_s=now_s))

    def _put(self, value: int, key: _Key) -> None:
        self._keys[value] = key
        self._keys.move_to_end(value)

    # ---- keeping it small --------------------------------------------------------------------

    def tidy(self, now_s: int, monotonic_s: float) -> bool:
        """One step of less than 2 ms towards its bounds; False when there is nothing to do."""
        if self._to_drop:
            for value in self._to_drop[-_DROPPED_PER_STEP:]:
                self._keys.pop(value, None)
            del self._to_drop[-_DROPPED_PER_STEP:]
            return True
        is_busy = self._is_busy(monotonic_s)
        for _ in range(_DROPPED_PER_STEP):
            value, key = next(iter(self._keys.items()), (0, None))
            if key is None or key.used_s > now_s - FORGET_S:
                break
            del self._keys[value]
        if not self._keys:
            self.halvings = 0
        if (len(self._keys) > self._keys_max or is_busy) and self.halvings < HALVINGS_MAX:
            self.halvings += 1
            mask = self.weight - 1
            self._to_drop = [value for value in self._keys if value & mask]
        return bool(self._to_drop)

    def _is_busy(self, monotonic_s: float) -> bool:
        passed_s = monotonic_s - self._since_s
        if 0 <= passed_s < 1 and self._looked_at <= self._per_s_max:
            return False
        is_busy = self._looked_at > self._per_s_max * max(1.0, min(passed_s, 60.0))
        self._since_s, self._looked_at = monotonic_s, 0
        return is_busy

    # ---- a file ------------------------------------------------------------------------------

    def save(self) -> Iterator[SavedKeys]:
        """Its keys, for a file, in steps of less than 2 ms; nothing may change meanwhile."""
        items = iter(self._keys.items())
        while part := list(islice(items, _SAVED_PER_STEP)):
            columns = np.array([(k.at_s, k.used_s, k.evicted) for _, k in part], dtype="<i8")
            yield SavedKeys(
                np.array([value for value, _ in part], dtype="<u8").tobytes(),
                bytes(k.fate for _, k in part),
                *(columns[:, i].tobytes() for i in range(3)),
            )

    def load(self, halvings: int, saved: Iterable[SavedKeys]) -> None:
        """Take over what ``save`` made.

        Raises:
            ValueError: damaged; nothing is taken over.
        """
        found: OrderedDict[int, _Key] = OrderedDict()
        for part in saved:
            columns = [
                np.frombuffer(data, dtype="<i8").tolist()
                for data in (part.at_s, part.used_s, part.evicted)
            ]
            values = np.frombuffer(part.hashes, dtype="<u8").tolist()
            for value, fate, *rest in zip(values, part.fates, *columns, strict=True):
                found[value] = _Key(Fate(fate), *rest)
        self._keys, self.halvings = found, min(max(halvings, 0), HALVINGS_MAX)
