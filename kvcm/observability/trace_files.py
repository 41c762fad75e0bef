"""Files of trace events: JSON lines, compressed, rotated.

What is appended at once is a gzip member of its own, and members one after the other are a gzip
file. So however the process ends, all that was appended before can be read.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

PREFIX = "events-"
SUFFIX = ".jsonl.gz"
_LEVEL = 1
"""Keys are chance: more effort takes seven times as long and gains 6 %."""
_READ_BYTES = 1 << 16


class TraceFiles:
    """Appends to the newest of at most ``files_max`` files in ``folder``.

    A file that has reached ``file_bytes_max`` is followed by a new one; one never goes on with a
    file of an earlier process, whose last member may be cut short. Blocking; one caller at a time.

    Args:
        now: wall clock in epoch seconds; names files.
    """

    def __init__(
        self, folder: Path, now: Callable[[], float], *, file_bytes_max: int, files_max: int
    ) -> None:
        self._folder = folder
        self._now = now
        self._file_bytes_max = file_bytes_max
        self._files_max = files_max
        self._file: BinaryIO | None = None
        self._written = 0

    def append(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: they may be written in part; what comes next goes to a new file.
        """
        if self._file is None or self._written >= self._file_bytes_max:
            self._rotate()
        assert self._file is not None
        member = gzip.compress(lines, _LEVEL, mtime=0)
        try:
            written = self._file.write(member)
        except OSError:
            self.close()
            raise
        if written != len(member):
            self.close()
            raise OSError(f"{self._folder}: {written} of {len(member)} bytes were written")
        self._written += len(member)

    def close(self) -> None:
        """Close the file; the next append begins a new one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        old = paths(self._folder)
        # Numbered: their order is right even when the clock is set back.
        number = _number(old[-1]) + 1 if old else 1
        began = datetime.fromtimestamp(self._now(), UTC)
        name = f"{PREFIX}{number:08}-{began:%Y%m%dT%H%M%SZ}{SUFFIX}"
        for path in old[: max(0, len(old) + 1 - self._files_max)]:
            path.unlink(missing_ok=True)
        # Unbuffered: what is written is out of this process.
        self._file = (self._folder / name).open("xb", buffering=0)
        self._written = 0


def paths(folder: Path) -> list[Path]:
    """The files in a folder, the oldest first."""
    found = [p for p in folder.glob(f"{PREFIX}*{SUFFIX}") if _number(p)]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    digits = path.name.removeprefix(PREFIX).partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, in order, up to where it was cut short (if it was).

    Raises:
        OSError: it cannot be read, or is damaged before its end.
    """
    rest = b""
    for chunk in _decompressed(path):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line)


def _decompressed(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        unpack = zlib.decompressobj(wbits=31)
        while data := file.read(_READ_BYTES):
            while data:
                try:
                    yield unpack.decompress(data)
                except zlib.error as error:
                    raise OSError(f"{path}: {error}") from None
                data = unpack.unused_data
                if unpack.eof:
                    unpack = zlib.decompressobj(wbits=31)
