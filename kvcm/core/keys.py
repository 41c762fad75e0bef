"""Block keys of one request, in the form they came in.

A request's keys are compared with an extent's keys as bytes. gRPC sends them as packed varints,
so those bytes are compared as they are and nothing is decoded; JSON and token requests use raw
little-endian int64. Both forms are bytes with known offsets of each key.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvcm.core.errors import InvalidArgument

INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1
_LITTLE = sys.byteorder == "little"
_CONTINUED = bytes(range(0x80, 0x100))
_SMALL_BYTES = 1024
_ONE_BYTE = [bytes([value]) for value in range(0x80)]
_PLACES = np.arange(10)
_SHIFTS = (7 * _PLACES).astype(np.uint64)
_BOUNDS = np.uint64(1) << _SHIFTS[1:]


class KeyForm(IntEnum):
    """How keys stand in memory."""

    RAW = 0
    PACKED = 1


def read_varint(data: bytes, pos: int) -> tuple[int, int]:
    """One varint at ``pos``: (unsigned value modulo 2^64, position after it).

    Raises:
        InvalidArgument: it does not end within the data or within 10 bytes.
    """
    if pos < len(data) and data[pos] < 0x80:
        return data[pos], pos + 1
    result = 0
    shift = 0
    for i in range(pos, min(pos + 10, len(data))):
        byte = data[i]
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & 0xFFFFFFFFFFFFFFFF, i + 1
        shift += 7
    raise InvalidArgument(f"a varint at byte {pos} does not end")


def encode_varint(value: int) -> bytes:
    """Varint of an int64 (negative ones as two's complement, 10 bytes) or uint64."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pack_keys(raw: bytes) -> tuple[bytes, array[int]]:
    """Varint form of raw little-endian int64 keys, and the n + 1 offsets of the keys in it."""
    values = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    last = np.zeros(len(values), dtype=np.intp)
    for bound in _BOUNDS:
        last += values >= bound
    # A row of the table per byte of a varint: its passes run over memory that lies together.
    data = (values >> _SHIFTS[:, np.newaxis]).astype(np.uint8)
    data |= 0x80
    data[last, np.arange(len(values))] &= 0x7F
    packed = data.T[last[:, np.newaxis] >= _PLACES].tobytes()
    offsets = array("I", bytes(4))
    offsets.frombytes(np.cumsum(last + 1, dtype=np.uint32).tobytes())
    return packed, offsets


def unpack_keys(packed: bytes) -> bytes:
    """Raw form of packed varints, decoded in whole-array passes.

    Raises:
        InvalidArgument: the last varint does not end, or one is longer than 10 bytes.
    """
    if not packed:
        return b""
    data = np.frombuffer(packed, dtype=np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) == 0 or ends[-1] != len(data) - 1:
        raise InvalidArgument("block_keys: the last varint does not end")
    lengths = np.diff(ends, prepend=-1)
    if int(lengths.max()) > 10:
        raise InvalidArgument("block_keys: a varint is longer than 10 bytes")
    starts = ends - lengths + 1
    # Of each byte, where its seven bits belong.
    shifts = np.arange(len(data), dtype=np.int64)
    shifts -= np.repeat(starts, lengths)
    shifts *= 7
    parts = (data & 0x7F).astype(np.uint64)
    parts <<= shifts.view(np.uint64)
    values: npt.NDArray[np.uint64] = np.bitwise_or.reduceat(parts, starts)
    return values.astype("<u8", copy=False).tobytes()


def unpack_together(batches: Iterable[KeyBatch]) -> None:
    """Decode packed batches at once: of small ones that is mostly fixed cost. Malformed ones are
    left as they are."""
    packed = [b for b in batches if b.form is KeyForm.PACKED and b.data and b.data[-1] < 0x80]
    packed = [b for b in packed if b._array is None]
    try:
        raw = unpack_keys(b"".join([batch.data for batch in packed]))
    except InvalidArgument:
        return
    at = 0
    for batch in packed:
        end = at + 8 * len(batch)
        batch._array = array_of(raw[at:end])
        at = end


def array_of(raw: bytes) -> array[int]:
    """The keys as an int64 array."""
    keys = array("q")
    keys.frombytes(raw)
    if not _LITTLE:
        keys.byteswap()
    return keys


class KeyBatch:
    """An ordered batch of int64 block keys.

    Attributes:
        form: the form ``data`` is in.
        data: the keys' bytes in that form.
    """

    __slots__ = ("_array", "_count", "data", "form")

    def __init__(self, form: KeyForm, data: bytes) -> None:
        self.form = form
        self.data = data
        self._array: array[int] | None = None
        self._count = -1

    @classmethod
    def from_packed(cls, data: bytes) -> KeyBatch:
        """Keys as gRPC sent them; malformed varints show when a key is read."""
        return cls(KeyForm.PACKED, data)

    @classmethod
    def from_ints(cls, keys: Iterable[int]) -> KeyBatch:
        """Keys as ints.

        Raises:
            InvalidArgument: one is not an int64.
        """
        try:
            values = array("q", keys)
        except (OverflowError, TypeError) as error:
            raise InvalidArgument(f"block_keys: not an int64: {error}") from error
        return cls.from_array(values)

    @classmethod
    def from_array(cls, values: array[int]) -> KeyBatch:
        """Keys as an int64 array, which is kept: do not change it."""
        if _LITTLE:
            data = values.tobytes()
        else:
            swapped = array("q", values)
            swapped.byteswap()
            data = swapped.tobytes()
        batch = cls(KeyForm.RAW, data)
        batch._array = values
        batch._count = len(values)
        return batch

    def __len__(self) -> int:
        if self._count < 0:
            if self.form is KeyForm.RAW:
                self._count = len(self.data) // 8
            elif len(self.data) <= _SMALL_BYTES:
                # NumPy's fixed cost is most of a small lookup's.
                self._count = len(self.data.translate(None, _CONTINUED))
            else:
                self._count = int(np.count_nonzero(np.frombuffer(self.data, dtype=np.uint8) < 0x80))
        return self._count

    def array(self) -> array[int]:
        """The keys as an int64 array (decoded once).

        Raises:
            InvalidArgument: malformed varints.
        """
        if self._array is None:
            raw = self.data if self.form is KeyForm.RAW else unpack_keys(self.data)
            self._array = array_of(raw)
            self._count = len(self._array)
        return self._array

    def some(self, start: int, stop: int, step: int = 1) -> Sequence[int]:
        """The keys at ``range(start, stop, step)``, as far as there are so many.

        Raises:
            InvalidArgument: malformed varints.
        """
        if self._array is not None or self.form is KeyForm.RAW:
            return self.array()[start:stop:step].tolist()
        ends = np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) < 0x80) + 1
        wanted = ends[start:stop:step].tolist()
        begins = np.concatenate(([0], ends))[start:stop:step].tolist()
        data = self.data
        chosen = b"".join([data[a:b] for a, b in zip(begins, wanted, strict=False)])
        return array_of(unpack_keys(chosen)).tolist()

    def key_at(self, offset: int) -> int:
        """The key whose bytes begin at ``offset`` of ``data``."""
        if self.form is KeyForm.RAW:
            return int(struct.unpack_from("<q", self.data, offset)[0])
        value, _ = read_varint(self.data, offset)
        return value - (1 << 64) if value >> 63 else value

    def index_at(self, offset: int) -> int:
        """The index of the key whose bytes begin at ``offset`` of ``data``."""
        if self.form is KeyForm.RAW:
            return offset // 8
        head = np.frombuffer(self.data, dtype=np.uint8, count=offset)
        return int(np.count_nonzero(head < 0x80))

    def offset_of(self, index: int) -> int:
        """Byte offset in ``data`` of the key at ``index`` (its length at ``len(self)``)."""
        if self.form is KeyForm.RAW:
            return index * 8
        if index <= 0:
            return 0
        if index >= len(self):
            return len(self.data)
        ends = np.flatnonzero(np.frombuffer(self.data, dtype=np.uint8) < 0x80)
        return int(ends[index - 1]) + 1

    def raw(self) -> bytes:
        """The keys as raw little-endian int64.

        Raises:
            InvalidArgument: malformed varints.
        """
        if self.form is KeyForm.RAW:
            return self.data
        return KeyBatch.from_array(self.array()).data

    def piece(self, at: int, count: int) -> tuple[bytes, int]:
        """Raw keys from byte ``at`` of ``data`` on, at most ``count`` (of packed ones, as many as
        are in ten bytes for each), and where the next piece begins.

        Raises:
            InvalidArgument: malformed varints.
        """
        if self.form is KeyForm.RAW:
            end = at + 8 * count
            return self.data[at:end], min(end, len(self.data))
        end = min(at + 10 * count, len(self.data))
        while end > at and self.data[end - 1] >= 0x80:
            end -= 1
        if end == at < len(self.data):
            raise InvalidArgument("block_keys: a varint is longer than 10 bytes")
        return unpack_keys(self.data[at:end]), end

    def select(self, keep: Sequence[bool]) -> KeyBatch:
        """The keys at the positions where ``keep`` is true, in order."""
        return KeyBatch.from_array(
            array("q", [k for k, flag in zip(self.array(), keep, strict=True) if flag])
        )
