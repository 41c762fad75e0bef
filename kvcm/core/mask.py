"""Block masks: a leading count, or one bool a position (wire.md §2 BlockMask)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Exactly one form is set: ``offset`` (leading count) or ``values`` (a bool a position)."""

    offset: int | None = None
    values: Sequence[bool] | None = None

    def leading(self, count: int) -> int | None:
        """Masked positions when they are exactly a prefix of ``count`` keys, else None.

        Raises:
            InvalidArgument: a negative offset.
        """
        if self.values is None:
            offset = self.offset or 0
            if offset < 0:
                raise InvalidArgument(f"block_mask.offset is negative: {offset}")
            return min(offset, count)
        values = list(self.values[:count])
        ones = values.index(False) if False in values else len(values)
        return ones if not any(values[ones:]) else None

    def flags(self, count: int) -> list[bool]:
        """One bool for each of ``count`` positions; a longer vector is cut, a shorter one padded.

        Raises:
            InvalidArgument: a negative offset.
        """
        if self.values is not None:
            flags = list(self.values[:count])
            return flags + [False] * (count - len(flags))
        ones = self.leading(count) or 0
        return [True] * ones + [False] * (count - ones)
