"""Request traces of the Mooncake format, and the hit rates no cache can beat.

One JSON object a line: ``timestamp`` (ms since the trace began), ``input_length`` and
``output_length`` (tokens) and ``hash_ids``, one id per block of the prompt, the last, partial one
included: ``ceil(input_length / block_size)`` ids. Equal ids mean equal prefixes up to that block's
end, so the ids serve as block keys. Files may be gzip-compressed.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, cast

import msgspec

from kvcm.core.errors import InvalidArgument
from kvcm.core.limits import KEYS_PER_REQUEST_MAX, TRACE_LINE_BYTES_MAX

TRACE_BLOCK_TOKENS = 512
"""Tokens a block where a trace does not say otherwise."""
_GZIP_MAGIC = b"\x1f\x8b"

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Count
    hash_ids: list[_Int64]
    output_length: _Count = 0
    block_size: _Count | None = None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. ``number`` is its line in the file, from 1."""

    number: int
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """The rows of a file in its order; what lenient reading met is counted."""

    rows: list[TraceRow] = field(default_factory=list)
    skipped: int = 0
    """Rows that did not parse or did not fit the block size."""
    reordered: int = 0
    """Rows earlier than the row before; they keep their place and take that row's time."""
    first_problem: str = ""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What an unlimited cache, empty at first, that stores every block at once would reach.

    ``blocks`` is N, ``distinct`` U. ``block_rate`` = (N - U) / N: block-weighted.
    ``request_rate`` is the mean over the requests with blocks of (leading blocks seen before /
    blocks). Both are 0.0 for a trace without blocks.
    """

    requests: int
    blocks: int
    distinct: int
    block_rate: float
    request_rate: float


def ceiling(requests: Iterable[tuple[int, ...]]) -> Ceiling:
    """The ceiling of requests given as their block ids, in order."""
    seen: set[int] = set()
    count = blocks = with_blocks = 0
    shares = 0.0
    for ids in requests:
        count += 1
        if not ids:
            continue
        known = 0
        for block in ids:
            if block not in seen:
                break
            known += 1
        seen.update(ids)
        blocks += len(ids)
        with_blocks += 1
        shares += known / len(ids)
    return Ceiling(
        requests=count,
        blocks=blocks,
        distinct=len(seen),
        block_rate=(blocks - len(seen)) / blocks if blocks else 0.0,
        request_rate=shares / with_blocks if with_blocks else 0.0,
    )


def read_trace(
    path: str | Path,
    *,
    block_size: int = TRACE_BLOCK_TOKENS,
    lenient: bool = False,
    skip: int = 0,
    limit: int | None = None,
) -> Trace:
    """Read a trace file, plain or gzip.

    Args:
        block_size: tokens a block.
        lenient: count and skip bad rows, and count rows out of order, instead of raising.
        skip: good rows to leave out at the start.
        limit: rows to keep at most; None = all.

    Raises:
        InvalidArgument: the file cannot be read, or a row is bad; the message names the line.
    """
    if block_size <= 0:
        raise InvalidArgument(f"block_size must be above 0, got {block_size}")
    trace = Trace()
    if limit is not None and limit <= 0:
        return trace
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if zipped else raw
            parse_into(trace, _lines(stream), block_size, lenient, skip, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidArgument(f"trace {path}: damaged gzip data ({error})") from error
    except OSError as error:
        raise InvalidArgument(f"trace {path}: {error.strerror or error}") from error
    except InvalidArgument as error:
        raise InvalidArgument(f"trace {path}: {error}") from error
    return trace


def parse_into(
    trace: Trace,
    lines: Iterable[bytes],
    block_size: int,
    lenient: bool,
    skip: int = 0,
    limit: int | None = None,
) -> None:
    """Append the rows of ``lines`` to ``trace``; see `read_trace`."""
    last = 0.0
    left_out = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = parse_row(line, number, block_size)
        except InvalidArgument as error:
            if not lenient:
                raise
            trace.skipped += 1
            trace.first_problem = trace.first_problem or str(error)
            continue
        if row.timestamp_ms < last:
            problem = f"row {number}: timestamp {row.timestamp_ms:g} is before {last:g}"
            if not lenient:
                raise InvalidArgument(problem)
            trace.reordered += 1
            trace.first_problem = trace.first_problem or problem
            row = TraceRow(number, last, row.input_length, row.output_length, row.hash_ids)
        last = row.timestamp_ms
        if left_out < skip:
            left_out += 1
            continue
        trace.rows.append(row)
        if limit is not None and len(trace.rows) >= limit:
            return


_decoder = msgspec.json.Decoder(_Line)


def parse_row(line: bytes, number: int, block_size: int) -> TraceRow:
    """One line as a row.

    Raises:
        InvalidArgument: it does not parse, or its ids do not fit its length; names the row.
    """
    if len(line) > TRACE_LINE_BYTES_MAX:
        raise InvalidArgument(f"row {number}: longer than {TRACE_LINE_BYTES_MAX} bytes")
    try:
        parsed = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"row {number}: {error}") from error
    if parsed.block_size is not None and parsed.block_size != block_size:
        raise InvalidArgument(
            f"row {number}: block_size {parsed.block_size}, but the trace is read with {block_size}"
        )
    wanted = -(-parsed.input_length // block_size)
    if len(parsed.hash_ids) != wanted:
        raise InvalidArgument(
            f"row {number}: {len(parsed.hash_ids)} hash_ids, but input_length "
            f"{parsed.input_length} at {block_size} tokens a block makes {wanted}"
        )
    if wanted > KEYS_PER_REQUEST_MAX:
        raise InvalidArgument(f"row {number}: more than {KEYS_PER_REQUEST_MAX} hash_ids")
    return TraceRow(
        number,
        parsed.timestamp,
        parsed.input_length,
        parsed.output_length,
        tuple(parsed.hash_ids),
    )


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines of at most one byte over the limit; the rest of a longer one is dropped."""
    while line := stream.readline(TRACE_LINE_BYTES_MAX + 1):
        rest = line
        while len(rest) > TRACE_LINE_BYTES_MAX and not rest.endswith(b"\n"):
            rest = stream.readline(TRACE_LINE_BYTES_MAX + 1)
        yield line
