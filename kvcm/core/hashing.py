"""Block keys from token ids: the compatibility hash of the protocol (wire.md §3)."""

from __future__ import annotations

from collections.abc import Sequence

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SIGN = 1 << 63
_HIGH32 = 0xFFFFFFFF00000000


def token_block_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """Keys of the full blocks of ``tokens``; the tail is dropped.

    Args:
        tokens: int64 token ids.
        block_size: tokens a block, > 0.

    Returns:
        ``len(tokens) // block_size`` int64 keys, each covering the whole prefix up to its block.
    """
    keys: list[int] = []
    h = 0
    count = len(tokens) // block_size * block_size
    for start in range(0, count, block_size):
        for token in tokens[start : start + block_size]:
            right = h >> 32
            if h & _SIGN:
                right |= _HIGH32
            h ^= (token + _GOLDEN + (h << 12) + right) & _MASK
        keys.append(h - (1 << 64) if h & _SIGN else h)
    return keys
