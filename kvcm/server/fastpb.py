"""Requests with thousands of packed keys, parsed without decoding the keys.

The keys' field is found by walking the top-level fields and cut out as one slice; everything else
is parsed by the generated class. A message in which the field is anything but one packed slice is
left whole to the generated class, so the outcome is protobuf's in every case.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvcm.core.errors import InvalidArgument
from kvcm.core.keys import KeyBatch, read_varint

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class Cut(NamedTuple):
    """Where the packed field lies: [start, end) with its tag, [content, end) without."""

    number: int
    start: int
    content: int
    end: int


def find_packed(data: bytes, numbers: Collection[int]) -> Cut | None:
    """The first length-delimited field of these numbers; None when there is none to cut safely.

    Malformed input is None too: the generated class then refuses it in its own words.
    """
    pos = 0
    size = len(data)
    try:
        while pos < size:
            start = pos
            tag, pos = read_varint(data, pos)
            kind = tag & 7
            if kind == _LENGTH:
                length, pos = read_varint(data, pos)
                end = pos + length
                if end > size:
                    return None
                if tag >> 3 in numbers:
                    # A last varint without its end is malformed.
                    whole = length == 0 or data[end - 1] < 0x80
                    return Cut(tag >> 3, start, pos, end) if whole else None
                pos = end
            elif kind == _VARINT:
                _, pos = read_varint(data, pos)
            elif kind == _FIXED64:
                pos += 8
            elif kind == _FIXED32:
                pos += 4
            else:
                return None
    except InvalidArgument:
        return None
    return None


class Split(NamedTuple):
    """A message without its packed field, and the field's number and values."""

    rest: bytes
    number: int
    values: KeyBatch


def split(data: bytes, numbers: Collection[int]) -> Split | None:
    """Cut the first packed field of these numbers out; None when there is nothing to cut.

    Whoever parses the rest looks whether that field occurs there again; if so the whole message has
    to be parsed.
    """
    cut = find_packed(data, numbers)
    if cut is None:
        return None
    values = KeyBatch.from_packed(data[cut.content : cut.end])
    return Split(data[: cut.start] + data[cut.end :], cut.number, values)
