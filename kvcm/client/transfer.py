"""What the SDKs that move blocks have in common: answers, forms of a call, a caller's buffers."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvcm.core.errors import InvalidArgument, KvcmError

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
