"""What the SDKs that move blocks have in common: answers, forms of a call, a caller's buffers."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import msgspec

from kvcm.core.errors import InvalidArgument, KvcmError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcm.client.types import StorageInfo

MISSING = "MISSING"
"""``reason`` of the error when a block's file or object is not there."""
TRUNCATED = "TRUNCATED"
"""``reason`` when there is less of it than the block has."""
DEADLINE = "DEADLINE"
"""``reason`` when the time ran out before a block's turn came."""

PutResult: TypeAlias = KvcmError | None
GetResult: TypeAlias = bytes | KvcmError | None


class TransferSdk(abc.ABC):
    """Moves blocks between a caller's buffers and the places that location URIs name."""

    @abc.abstractmethod
    def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        """Write blocks; one answer an item, in order: None = written."""

    @abc.abstractmethod
    def get_many(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        """Read blocks; one answer an item, in order: the bytes, or None = in the buffer given."""

    async def put_many_async(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        """``put_many`` in a worker thread."""
        return await asyncio.to_thread(self.put_many, items, deadline_s=deadline_s)

    async def get_many_async(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        """``get_many`` in a worker thread."""
        return await asyncio.to_thread(self.get_many, items, deadline_s=deadline_s)

    def announce(self, buffer: Buffer) -> None:
        """Tell of writable memory that blocks will be moved from and to, and that outlives the
        SDK. One that needs its memory registered (RDMA) does so once; others need nothing.

        Raises:
            InvalidArgument: the buffer is read-only or not contiguous.
            StorageError: the memory cannot be registered.
        """
        del buffer

    def close(self) -> None:  # noqa: B027 - most SDKs hold nothing open
        """Leave the storages; no call may be under way. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class StorageSpec(NamedTuple):
    """One storage as a client sees it: its type, which is the scheme of its URIs, and fields."""

    type: str
    fields: dict[str, Any]


def storage_specs(storages: str | Sequence[StorageInfo]) -> dict[str, StorageSpec]:
    """What RegisterInstance answered in ``storage_configs`` (wire.md §6), by storage name.

    Args:
        storages: as the client library gives it, or the JSON array of the wire.

    Raises:
        InvalidArgument: it does not parse.
    """
    try:
        entries = (
            msgspec.json.decode(storages or "[]", type=list[_StorageEntry])
            if isinstance(storages, str)
            else storages
        )
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"storage_configs: {error}") from error
    return {
        entry.global_unique_name: StorageSpec(entry.type, dict(entry.storage_spec))
        for entry in entries
    }


class _StorageEntry(msgspec.Struct):
    type: str
    global_unique_name: str
    storage_spec: dict[str, Any]


def view_of(uri: str, size: int, buffer: Buffer, *, writable: bool) -> memoryview:
    """The bytes of a caller's buffer for one block of ``size`` bytes.

    Raises:
        InvalidArgument: not contiguous, of another size, or read-only though ``writable``.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise InvalidArgument(f"location uri {uri!r}: the buffer is not contiguous")
    if view.nbytes != size:
        raise InvalidArgument(
            f"location uri {uri!r}: the buffer has {view.nbytes} bytes, the block {size}"
        )
    if writable and view.readonly:
        raise InvalidArgument(f"location uri {uri!r}: the buffer is read-only")
    return view.cast("B")
