"""Block contents that prove whose bytes they are.

The bytes of a block's spec follow from (fingerprint, key, spec name) alone: the key at both ends,
between them 64-bit words that differ at every position. So a block that is another's, shifted,
cut short, torn or zeroed never compares equal.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_KEY_BYTES = 8
_WHOLE_BYTES = 3 * _KEY_BYTES
"""Below this a block is a prefix of its digest: two keys and a word do not fit."""


class BlockContent:
    """Makes and checks the bytes of one instance's blocks."""

    def __init__(self, fingerprint: str) -> None:
        """``fingerprint`` names the instance (and what else must not be confused)."""
        self._key = blake2b(fingerprint.encode(), digest_size=64).digest()

    def make(self, key: int, spec: str, size: int) -> bytes:
        """``size`` bytes of the block ``key``, part ``spec``."""
        tag = key.to_bytes(_KEY_BYTES, "little", signed=True)
        digest = blake2b(tag + spec.encode(), key=self._key, digest_size=64).digest()
        if size < _WHOLE_BYTES:
            return digest[:size]
        words = -(-size // 8)
        # An odd step visits 2^64 different words before it repeats.
        start = np.uint64(int.from_bytes(digest[:8], "little"))
        step = np.uint64(int.from_bytes(digest[8:16], "little") | 1)
        body = (_positions(words) * step + start).tobytes()
        return tag + body[_KEY_BYTES : size - _KEY_BYTES] + tag

    def fault(self, key: int, spec: str, size: int, data: bytes) -> str | None:
        """None when ``data`` is right, otherwise what is wrong with it, for people."""
        expected = self.make(key, spec, size)
        if data == expected:
            return None
        if len(data) != size:
            return f"{len(data)} bytes instead of {size}"
        if not any(data):
            return "all bytes are zero"
        if size >= _WHOLE_BYTES:
            head = int.from_bytes(data[:_KEY_BYTES], "little", signed=True)
            tail = int.from_bytes(data[-_KEY_BYTES:], "little", signed=True)
            if head == tail and head != key:
                return f"holds the bytes of block {head}"
        first = next(i for i, (a, b) in enumerate(zip(data, expected, strict=True)) if a != b)
        return f"differs from byte {first} on"


@lru_cache(maxsize=8)
def _positions(count: int) -> npt.NDArray[np.uint64]:
    return np.arange(count, dtype=np.uint64)
