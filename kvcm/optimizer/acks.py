"""The keys a replay was told are published: what a crash must not lose.

A file of lines: first a JSON object with what is needed to look the blocks up and check their
bytes, then one key a line. Several engines append whole lines to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvcm.core.errors import InvalidArgument


class AckHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which blocks the keys are of."""

    instance: str
    fingerprint: str
    spec_names: list[str]
    block_bytes: int
    storage_configs: str = ""
    """JSON of the storages, for the SDKs."""
    kvcm_acks: int = 1


class AckWriter:
    """Appends keys; a line is whole or absent, whoever else appends."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @staticmethod
    def begin(path: str, header: AckHeader) -> None:
        """Start the file anew.

        Raises:
            InvalidArgument: it cannot be written.
        """
        try:
            Path(path).write_bytes(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise InvalidArgument(f"acks file {path}: {error.strerror or error}") from error

    def add(self, keys: Sequence[int]) -> None:
        """Record acknowledged keys."""
        if keys:
            os.write(self._fd, "".join(f"{key}\n" for key in keys).encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_acks(path: str) -> tuple[AckHeader, list[int]]:
    """Header and the distinct keys, in their order. A torn last line is left out.

    Raises:
        InvalidArgument: no such file, or not of this form; names the line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InvalidArgument(f"acks file {path}: {error.strerror or error}") from error
    if not lines:
        raise InvalidArgument(f"acks file {path}: has no header")
    try:
        header = msgspec.json.decode(lines[0], type=AckHeader)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"acks file {path}: line 1: {error}") from error
    return header, list(dict.fromkeys(_keys(path, lines[1:])))


def _keys(path: str, lines: Sequence[bytes]) -> Iterator[int]:
    for number, line in enumerate(lines, start=2):
        try:
            yield int(line)
        except ValueError:
            raise InvalidArgument(f"acks file {path}: line {number} is no key") from None
