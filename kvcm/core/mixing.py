"""Hashes of many keys at once, for sketches and samples. Not for anything that is looked up."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def hashes(raw: bytes, seed: int) -> Hashes:
    """One well mixed 64-bit value per key (the finalizer of splitmix64).

    Args:
        raw: little-endian int64 keys.
        seed: of the keys' instance: equal keys of two instances are different things.
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


def seed_of(uid: str) -> int:
    """What tells an instance's keys from equal ones of others."""
    return crc32(uid.encode()) << 32
