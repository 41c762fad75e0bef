"""What is counted of the blocks that were asked for, as one vector of numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Cause(StrEnum):
    """Why a block that was asked for was no hit."""

    NEW = "new"
    """Nobody asked for it before, within a day: no cache could have had it."""
    NEVER_WRITTEN = "never_written"
    """Asked for before, but nobody offered it since."""
    REFUSED_QUOTA = "refused_quota"
    """Its last write was cut by a quota or a capacity."""
    REFUSED_ADMISSION = "refused_admission"
    """Its last write was cut by admission."""
    EVICTED = "evicted"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    """It is there, but its storage cannot be read; or no storage could take its last write."""
    UNFINISHED = "unfinished"
    """Its write was under way, failed, or ran into its time-out."""
    REMOVED = "removed"
    """Removed, trimmed, older than its group's ttl, or found lost."""
    UNREACHABLE = "unreachable"
    """It is there, behind a block that is not."""


CAUSES = tuple(Cause)
_CAUSE_INDEX = {cause: i for i, cause in enumerate(CAUSES)}
AGES_S = (60, 600, 3_600, 21_600)
"""Borders of how long ago a missed block was evicted; the last class has no upper one."""
NEED_BYTES_MIN = 1 << 20
NEEDS = 64
"""Classes of space that would have kept a block, half an octave each, from ``NEED_BYTES_MIN``."""

Vector = npt.NDArray[np.int64]
REQUESTS, BLOCKS, HITS, SAMPLED = range(4)
_CAUSES_AT = 4
_AGES_AT = _CAUSES_AT + len(CAUSES)
_NEEDS_AT = _AGES_AT + len(AGES_S) + 1
LENGTH = _NEEDS_AT + NEEDS


def empty() -> Vector:
    """Nothing counted yet."""
    return np.zeros(LENGTH, dtype=np.int64)


def cause_at(cause: Cause) -> int:
    """Where a cause is counted: misses in the sample, each for as many as it stands for."""
    return _CAUSES_AT + _CAUSE_INDEX[cause]


def age_at(age_s: float) -> int:
    """Where a miss is counted whose block was evicted so long ago."""
    return _AGES_AT + sum(age_s >= border for border in AGES_S)


def need_at(size: int) -> int:
    """Where a miss is counted that so many bytes more would have made a hit."""
    if size <= NEED_BYTES_MIN:
        return _NEEDS_AT
    return _NEEDS_AT + min(math.ceil(2 * math.log2(size / NEED_BYTES_MIN)), NEEDS - 1)


def need_bytes(number: int) -> int:
    """The upper border of a class."""
    return math.ceil(NEED_BYTES_MIN * 2 ** (number / 2))


def causes_of(vector: Vector) -> Sequence[int]:
    """In the order of ``CAUSES``."""
    found: list[int] = vector[_CAUSES_AT:_AGES_AT].tolist()
    return found


def ages_of(vector: Vector) -> Sequence[int]:
    """In the order of ``AGES_S``, the last one open."""
    found: list[int] = vector[_AGES_AT:_NEEDS_AT].tolist()
    return found


def needs_of(vector: Vector) -> Sequence[int]:
    """By class of space."""
    found: list[int] = vector[_NEEDS_AT:].tolist()
    return found


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of ``total`` in proportion to ``weights``, which add up to it exactly (largest
    remainders first); all 0 without weights."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda i: -(total * weights[i] % whole))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts
