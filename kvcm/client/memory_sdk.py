"""Blocks in this process's own memory: storages of type ``memory``, for tests and demos.

It reaches what a manager in the *same process* serves; elsewhere every block is unsupported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcm.client.transfer import MISSING, TRUNCATED, GetResult, PutResult, TransferSdk, view_of
from kvcm.core.errors import InvalidArgument, KvcmError, StorageError, Unsupported
from kvcm.core.memory import has_pool, pool_of
from kvcm.core.uri import LocationUri, parse_uri

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemorySdk(TransferSdk):
    """Copies blocks into and out of the process's pools. Holds no state; deadlines never pass."""

    def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        del deadline_s
        return [_put(uri, data) for uri, data in items]

    def get_many(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        del deadline_s
        return [_get(uri, buffer) for uri, buffer in items]


def _put(uri: str, data: Buffer) -> PutResult:
    try:
        parsed, key = _key_of(uri)
        view = view_of(uri, parsed.size, data, writable=False)
    except KvcmError as error:
        return error
    pool_of(parsed.storage)[key] = bytes(view)
    return None


def _get(uri: str, buffer: Buffer | None) -> GetResult:
    try:
        parsed, key = _key_of(uri)
        view = None if buffer is None else view_of(uri, parsed.size, buffer, writable=True)
    except KvcmError as error:
        return error
    data = pool_of(parsed.storage).get(key)
    if data is None:
        return StorageError(f"{uri}: no such block in this process", reason=MISSING)
    if len(data) != parsed.size:
        text = f"{uri}: the block has {len(data)} bytes"
        return StorageError(text, reason=TRUNCATED)
    if view is None:
        return data
    view[:] = data
    return None


def _key_of(uri: str) -> tuple[LocationUri, str]:
    parsed = parse_uri(uri)
    key = parsed.params.get("key", "")
    try:
        size = parsed.size
    except ValueError:
        size = 0
    if parsed.scheme != "memory" or not key or size <= 0:
        raise InvalidArgument(f"location uri {uri!r} names no block in memory")
    if not has_pool(parsed.storage):
        # A put would be acknowledged, and its bytes be nowhere that others can read.
        raise Unsupported(
            f"storage {parsed.storage!r} lies in its manager's memory: another process than this "
            "one, so this client cannot use it"
        )
    return parsed, key
