"""The access log: one line for a sample of the calls, and for each one refused, failed or slow.

Whoever serves a call only queues what it was; a background loop writes the lines, in a thread. A
line never has keys, token ids, URIs or bodies: of what clients send only the two ids.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.core import limits
from kvcm.core.clock import Clock
from kvcm.core.errors import ConfigError, ErrorCode
from kvcm.server import logs
from kvcm.server.settings import AccessLogOptions

log = logging.getLogger(__name__)
access = logging.getLogger(logs.ACCESS)

PERIOD_S = 0.2


@dataclass(slots=True)
class Seen:
    """A call, as far as it has come."""

    api: str
    transport: str
    peer: Callable[[], str]
    started: float
    """Monotonic, seconds."""
    bytes_in: int
    code: ErrorCode = ErrorCode.INVALID_ARGUMENT
    reason: str = ""
    """Of the answer, or the error that ended the call without one."""
    instance_id: str = ""
    request_id: str = ""
    keys: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class _Line:
    level: int
    at: float
    duration_us: int
    peer: str
    seen: Seen


class AccessLog(Collector):
    """The queue between calls and the log, and the loop that empties it."""

    name = "access_log"
    period_s = PERIOD_S

    def __init__(self, options: AccessLogOptions, form: str, clock: Clock) -> None:
        """``form`` of the lines: "text" or "json"."""
        self._options = options
        self._form = form
        self._clock = clock
        self._random = random.Random(int.from_bytes(clock.random_bytes(8), "big"))
        self._queue: deque[_Line] = deque()
        self._file: _File | None = None
        self._writing = threading.Lock()
        self._failing = False
        self.written = 0
        self.dropped = 0
        self.failed = 0

    @property
    def enabled(self) -> bool:
        """Whether calls are to be told at all."""
        return self._options.rate > 0

    def open(self) -> None:
        """Open the file, if one is set.

        Raises:
            ConfigError: it cannot be opened.
        """
        path = self._options.file
        if not self.enabled or path is None:
            return
        try:
            self._file = _File(path, logs.formatter(self._form))
        except OSError as error:
            raise ConfigError(f"access_log.file {path}: {error.strerror}") from None

    def begun(self, api: str, transport: str, peer: Callable[[], str], bytes_in: int) -> Seen:
        """A call begins, to be told to `ended`; ``peer`` is only asked when a line is written."""
        return Seen(api, transport, peer, self._clock.monotonic(), bytes_in)

    def ended(self, seen: Seen) -> None:
        """The call is over; queues its line if it gets one."""
        seconds = self._clock.monotonic() - seen.started
        notable = seen.code is not ErrorCode.OK or seconds * 1e3 > self._options.slow_ms
        if not notable and self._random.random() >= self._options.rate:
            return
        level = logging.WARNING if notable else logging.INFO
        if not access.isEnabledFor(level):
            return
        if len(self._queue) >= limits.ACCESS_LOG_QUEUE_LINES_MAX:
            self.dropped += 1
            return
        now, duration_us = self._clock.now(), int(seconds * 1e6)
        self._queue.append(_Line(level, now, duration_us, seen.peer(), seen))

    async def run_once(self, now: float) -> int:
        """Write what is queued; the number of lines."""
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if batch:
            await asyncio.to_thread(self._write, batch)
        return len(batch)

    async def close(self) -> None:
        """Write what is left and close the file; for after the last call."""
        await self.run_once(self._clock.monotonic())
        if self._file is not None:
            with self._writing:
                self._file.close()

    def collect(self) -> Iterable[Metric]:
        lines = CounterMetricFamily(
            "kvcm_access_log_lines",
            "Lines of the access log: written; dropped because too many waited; failed, because "
            "the file could not be written.",
            labels=["outcome"],
        )
        lines.add_metric(["written"], self.written)
        lines.add_metric(["dropped"], self.dropped)
        lines.add_metric(["failed"], self.failed)
        yield lines

    def _write(self, batch: list[_Line]) -> None:
        # A loop that is stopped in the middle leaves its thread behind, and `close` writes too.
        with self._writing:
            for line in batch:
                self._write_line(_record(line))

    def _write_line(self, record: logging.LogRecord) -> None:
        if self._file is None:
            access.handle(record)
            self.written += 1
            return
        try:
            self._file.handle(record)
        except OSError as error:
            self.failed += 1
            if not self._failing:
                log.warning("access log %s: %s", self._options.file, error.strerror)
            self._failing = True
        else:
            self.written += 1
            self._failing = False


class _File(WatchedFileHandler):
    """Appends lines; a file that was moved away is followed by a new one."""

    def __init__(self, path: Path, formatter: logging.Formatter) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(formatter)

    def handleError(self, record: logging.LogRecord) -> None:
        # Called while the error is handled; a traceback for each line would help nobody.
        raise


def _record(line: _Line) -> logging.LogRecord:
    seen = line.seen
    code = ErrorCode(seen.code).name
    message = f"{seen.api} {code}"
    record = logging.LogRecord(logs.ACCESS, line.level, "", 0, message, None, None)
    record.created = line.at
    record.msecs = line.at % 1 * 1e3
    fields = {
        "api": seen.api,
        "transport": seen.transport,
        "instance_id": seen.instance_id,
        "code": code,
        "reason": seen.reason,
        "keys": seen.keys,
        "bytes_in": seen.bytes_in,
        "bytes_out": seen.bytes_out,
        "duration_us": line.duration_us,
        "peer": line.peer,
        "request_id": seen.request_id,
    }
    setattr(record, logs.FIELDS, fields)
    return record
