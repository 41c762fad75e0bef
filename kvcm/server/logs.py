"""Logging: one line a record, as text or JSON, to standard error; levels change at run time."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from kvcm.core.errors import InvalidArgument

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "critical": logging.CRITICAL,
}
ROOT = "kvcm"
ACCESS = "kvcm.access"
"""Logger of calls; no module has its name."""
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Everything that can be logged under; other names are typing errors.
_FOREIGN = ("uvicorn", "grpc", "sqlalchemy", "alembic")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The trace id of the call under way, as its client gave it; "" outside of calls."""
FIELDS = "kvcm_fields"
"""Attribute of a record: a dict of what its line says beside the message."""


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Fields follow the message as ``name=value``."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = (f"{name}={_plain(value)}" for name, value in _fields(record).items())
        return " ".join((super().formatMessage(record), *fields))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] | None = getattr(record, FIELDS, None)
    if fields is not None:
        return fields
    current = request_id.get()
    return {"request_id": current} if current else {}


def _plain(value: object) -> str:
    # Clients choose ids: one with a line end in it would forge lines of the log.
    text = str(value)
    return text if text.isprintable() and not set(text) & {" ", '"'} else json.dumps(text)


def formatter(form: str) -> logging.Formatter:
    """What gives records the form "text" or "json"."""
    return JsonFormatter() if form == "json" else TextFormatter()


def configure(level: str, form: str) -> None:
    """Send all logs to standard error in that form ("text" or "json")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(LEVELS[level])
    # Has a switch of its own, the setting access_log.rate.
    logging.getLogger(ACCESS).setLevel(logging.INFO)


def set_level(module_name: str, log_level: str) -> None:
    """Change the level of a module's logger, "kvcm.cache" or just "cache"; "" means all of kvcm.

    "access", the log of calls, is not among "all".

    Raises:
        InvalidArgument: an unknown level, or a name that is no logger of ours.
    """
    level = LEVELS.get(log_level.lower())
    if level is None:
        raise InvalidArgument(f"log_level is {log_level!r}, not one of {', '.join(sorted(LEVELS))}")
    known = known_modules()
    for name in (module_name or ROOT, f"{ROOT}.{module_name}"):
        if name in known:
            logging.getLogger(name).setLevel(level)
            return
    raise InvalidArgument(f"module_name {module_name!r} names no module of the manager")


def known_modules() -> set[str]:
    """Names that `set_level` accepts: packages and modules of kvcm that are loaded."""
    names = {n for n in sys.modules if n == ROOT or n.startswith(ROOT + ".")}
    return names | {ACCESS} | {n for n in _FOREIGN if n in sys.modules}
