"""Blocks kept in this process: the bytes of storages of type ``memory``, for tests and demos.

A manager and a client that run in one process meet here. Nothing leaves the process, and all is
gone with it.
"""

from __future__ import annotations

_POOLS: dict[str, dict[str, bytes]] = {}


def pool_of(storage: str) -> dict[str, bytes]:
    """The blocks of a storage by key; the same dict for all who ask.

    Only single calls of its own methods: each is atomic, and there is no lock.
    """
    return _POOLS.setdefault(storage, {})


def has_pool(storage: str) -> bool:
    """Whether somebody in this process, as its manager, keeps blocks of that storage."""
    return storage in _POOLS
