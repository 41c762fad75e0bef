"""Block keys from token ids: the compatibility hash of the protocol (wire.md §3)."""

from __future__ import annotations

from collections.abc import Iterable

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SIGN = 1 << 63
_HIGH32 = 0xFFFFFFFF00000000


class TokenHasher:
    """The running hash, fed in pieces. ``keys`` are those of the full blocks so far."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._h = 0
        self._filled = 0
        self.keys: list[int] = []

    def update(self, tokens: Iterable[int]) -> None:
        """Hash further int64 token ids."""
        h, filled, size = self._h, self._filled, self._block_size
        for token in tokens:
            right = h >> 32
            if h & _SIGN:
                right |= _HIGH32
            h ^= (token + _GOLDEN + (h << 12) + right) & _MASK
            filled += 1
            if filled == size:
                filled = 0
                self.keys.append(h - (1 << 64) if h & _SIGN else h)
        self._h, self._filled = h, filled


def token_block_keys(tokens: Iterable[int], block_size: int) -> list[int]:
    """Keys of the full blocks of ``tokens``; the tail is dropped.

    Args:
        tokens: int64 token ids.
        block_size: tokens a block, > 0.

    Returns:
        ``len(tokens) // block_size`` int64 keys, each covering the whole prefix up to its block.
    """
    hasher = TokenHasher(block_size)
    hasher.update(tokens)
    return hasher.keys
