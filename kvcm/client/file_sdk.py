"""Bytes of blocks in files: storages of type ``file``, ``hf3fs`` and ``vcns_hf3fs``.

A location URI names the file and the slot in it: ``blkid × size`` is the offset (wire.md §6). A
file becomes whole piece by piece, and a slot that nobody wrote reads as zeros; neither matters,
because the manager hands a location to readers only after its writer reported success. So write,
look at every answer, and finish with exactly what succeeded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcm.client.transfer import (
    DEADLINE,
    MISSING,
    TRUNCATED,
    GetResult,
    PutResult,
    TransferSdk,
    view_of,
)
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import InvalidArgument, StorageError, Unavailable
from kvcm.core.storage import MARKER
from kvcm.core.uri import parse_uri

if TYPE_CHECKING:
    from typing_extensions import Buffer

SCHEMES = frozenset({"file", "hf3fs", "vcns_hf3fs"})
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_OFFSET_MAX = (1 << 63) - 1
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# Never O_TRUNC: other slots of the file may have been written by an earlier call.
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_COMMON_URI = re.compile(
    r"(?:file|hf3fs|vcns_hf3fs)://[A-Za-z0-9_.-]+(/[^?#%\0]+)\?(?:blkid=(\d{1,9})&)?size=(\d{1,18})",
    re.ASCII,
)
# As docs/decisions/0003-storage-paths.md has it.
_OWN_PATH = re.compile(
    r"(/.+)/[a-z0-9]{1,32}/[a-z0-9]{1,32}/[0-9a-f]{2}/[a-z0-9]{1,32}_[A-Za-z0-9_.-]{1,60}_[0-9]{1,6}"
)


class Slot(NamedTuple):
    """Where one block's bytes lie."""

    path: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte behind the block."""
        return self.offset + self.size


class _Item(NamedTuple):
    """One position of a batch: where, and from or to which memory."""

    position: int
    slot: Slot
    view: memoryview | None
    """None: memory is taken when it is read, so that a wild size costs nothing."""


def parse_slot(uri: str) -> Slot:
    """File, offset and size that a location URI names.

    Raises:
        InvalidArgument: a URI of another scheme, no size, a slot out of range, or a path that is
            not absolute or has ``..`` in it.
    """
    match = _COMMON_URI.fullmatch(uri)
    if match is not None:
        path, blkid, size = match[1], int(match[2] or 0), int(match[3])
    else:
        path, blkid, size = _parse_any(uri)
    if not path.startswith("/") or path.endswith("/") or "\0" in path or "/../" in f"{path}/":
        raise InvalidArgument(f"location uri {uri!r}: {path!r} is no path of a block file")
    if size <= 0 or blkid < 0 or (blkid + 1) * size > _OFFSET_MAX:
        raise InvalidArgument(f"location uri {uri!r}: size {size} or blkid {blkid} out of range")
    return Slot(path, blkid * size, size)


def _parse_any(uri: str) -> tuple[str, int, int]:
    try:
        parsed = parse_uri(uri)
        if parsed.scheme not in SCHEMES:
            raise InvalidArgument(f"location uri {uri!r} is not of {sorted(SCHEMES)}")
        numbers = parsed.params.get("blkid", "0"), parsed.params["size"]
        if not all(text.isascii() and text.isdecimal() for text in numbers):
            raise InvalidArgument(f"location uri {uri!r}: blkid and size must be decimal numbers")
        return parsed.path, int(numbers[0]), int(numbers[1])
    except KeyError:
        raise InvalidArgument(f"location uri {uri!r} has no size") from None
    except ValueError as error:
        raise InvalidArgument(f"location uri {uri!r}: {error}") from error


class FileSdk(TransferSdk):
    """Reads and writes blocks in files. Holds no state: safe to share between threads."""

    def __init__(self, *, fsync: bool = False, clock: Clock | None = None) -> None:
        """With ``fsync`` a put answers only after its files' bytes reached the disk."""
        self._fsync = fsync
        self._clock = clock or SystemClock()

    def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        """Write blocks; parent folders are made when missing.

        Args:
            items: (location URI, contiguous buffer of exactly the URI's ``size`` bytes).
            deadline_s: seconds from now after which no further write is begun. A call that hangs
                in the kernel cannot be broken off.

        Returns:
            One answer an item: None = written. Otherwise InvalidArgument (URI or buffer),
            Unavailable with reason DEADLINE (its turn did not come), or StorageError. When a file
            fails, in any write, the sync or the close, none of its blocks counts as written.
        """
        answers: list[PutResult] = [None] * len(items)
        expired = self._deadline(deadline_s)

        def work(path: str, part: Sequence[_Item]) -> Iterator[tuple[_Item, PutResult]]:
            fd = _open_for_writing(path)
            done: list[_Item] = []
            try:
                for run in _runs(part):
                    if expired():
                        yield from ((item, _late(item)) for item in run)
                        continue
                    _write_all(fd, run)
                    done += run
                if self._fsync:
                    os.fsync(fd)
            finally:
                # Network file systems report a failed write-back only here.
                os.close(fd)
            yield from ((item, None) for item in done)

        self._each_file(_checked(items, answers, writable=False), answers, expired, work)
        return answers

    def get_many(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        """Read blocks.

        Args:
            items: (location URI, writable contiguous buffer of exactly the URI's ``size`` bytes,
                or None to get new ``bytes``).
            deadline_s: as in ``put_many``.

        Returns:
            One answer an item: the bytes, or None when they are in the buffer given. Otherwise
            StorageError (``reason`` MISSING: no such file; TRUNCATED: the file ends too early),
            InvalidArgument, or Unavailable with reason DEADLINE. After an error the content of the
            buffer is undefined.
        """
        answers: list[GetResult] = [None] * len(items)
        expired = self._deadline(deadline_s)

        def work(path: str, part: Sequence[_Item]) -> Iterator[tuple[_Item, GetResult]]:
            fd = os.open(path, _READ)
            try:
                length = os.fstat(fd).st_size
                yield from ((item, _truncated(item)) for item in part if item.slot.end > length)
                for run in _runs([item for item in part if item.slot.end <= length]):
                    if expired():
                        yield from ((item, _late(item)) for item in run)
                    else:
                        yield from _read_run(fd, run)
            finally:
                os.close(fd)

        self._each_file(_checked(items, answers, writable=True), answers, expired, work)
        return answers

    def _deadline(self, deadline_s: float | None) -> Callable[[], bool]:
        if deadline_s is None:
            return lambda: False
        end = self._clock.monotonic() + deadline_s
        return lambda: self._clock.monotonic() >= end

    def _each_file(
        self,
        items: Iterable[_Item],
        answers: list[Any],
        expired: Callable[[], bool],
        work: Callable[[str, Sequence[_Item]], Iterator[tuple[_Item, GetResult]]],
    ) -> None:
        """Open each file once; what ``work`` does not answer gets the error that stopped it."""
        files: dict[str, list[_Item]] = {}
        for item in items:
            files.setdefault(item.slot.path, []).append(item)
        for path, part in files.items():
            if expired():
                for item in part:
                    answers[item.position] = _late(item)
                continue
            part.sort(key=lambda item: item.slot.offset)
            left = {item.position for item in part}
            try:
                for item, answer in work(path, part):
                    answers[item.position] = answer
                    left.discard(item.position)
            except (OSError, ValueError, MemoryError) as error:
                failure = _failure(path, error)
                for position in left:
                    answers[position] = failure


def _checked(
    items: Sequence[tuple[str, Buffer | None]],
    answers: list[Any],
    *,
    writable: bool,
) -> Iterator[_Item]:
    """The items that can be tried; the others get their error at once."""
    for position, (uri, buffer) in enumerate(items):
        try:
            slot = parse_slot(uri)
            view = _view(uri, slot, buffer, writable=writable)
        except InvalidArgument as error:
            answers[position] = error
        else:
            yield _Item(position, slot, view)


def _view(uri: str, slot: Slot, buffer: Buffer | None, *, writable: bool) -> memoryview | None:
    if buffer is None:
        if not writable:
            raise InvalidArgument(f"location uri {uri!r}: no buffer to write from")
        return None
    return view_of(uri, slot.size, buffer, writable=writable)


def _runs(part: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Cut items, sorted by offset, into runs that lie next to each other in the file."""
    run: list[_Item] = []
    for item in part:
        if run:
            last = run[-1].slot
            if len(run) == _IOV_MAX or last.end != item.slot.offset:
                yield run
                run = []
        run.append(item)
    if run:
        yield run


def _open_for_writing(path: str) -> int:
    try:
        return os.open(path, _WRITE, 0o666)
    except FileNotFoundError:
        _make_parents(path)
        return os.open(path, _WRITE, 0o666)


def _make_parents(path: str) -> None:
    """Where a file system is not mounted lies an empty folder: what is written below it vanishes
    with the next mount, so a manager's own root is known by the marker it put there."""
    own = _OWN_PATH.fullmatch(path)
    if own is not None and not os.path.exists(f"{own[1]}/{MARKER}"):
        raise OSError(None, f"{own[1]!r} has no file {MARKER!r}: is its file system mounted here?")
    os.makedirs(os.path.dirname(path), exist_ok=True)


def _transfer(
    call: Callable[[Sequence[memoryview], int], int], views: Sequence[memoryview], offset: int
) -> int:
    """Repeat a vectored call until all views are done or it moves nothing; bytes moved."""
    left = list(views)
    moved = 0
    while left:
        count = call(left, offset + moved)
        if count == 0:
            break
        moved += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return moved


def _write_all(fd: int, run: Sequence[_Item]) -> None:
    views = [item.view for item in run if item.view is not None]
    wanted = sum(map(len, views))
    moved = _transfer(lambda part, at: os.pwritev(fd, part, at), views, run[0].slot.offset)
    if moved != wanted:
        raise OSError(None, f"only {moved} of {wanted} bytes were taken")


def _read_run(fd: int, run: Sequence[_Item]) -> Iterator[tuple[_Item, GetResult]]:
    offset = run[0].slot.offset
    views = [
        memoryview(bytearray(item.slot.size)) if item.view is None else item.view for item in run
    ]
    end = offset + _transfer(lambda part, at: os.preadv(fd, part, at), views, offset)
    for item, view in zip(run, views, strict=True):
        if item.slot.end > end:
            yield item, _truncated(item)
        else:
            yield item, bytes(view) if item.view is None else None


def _truncated(item: _Item) -> StorageError:
    slot = item.slot
    return StorageError(f"{slot.path!r} ends before the block's end {slot.end}", reason=TRUNCATED)


def _late(item: _Item) -> Unavailable:
    return Unavailable(
        f"the deadline passed before {item.slot.path!r} at {item.slot.offset}", reason=DEADLINE
    )


def _failure(path: str, error: Exception) -> StorageError:
    reason = MISSING if isinstance(error, FileNotFoundError) else ""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return StorageError(f"{path!r}: {text}", reason=reason)
