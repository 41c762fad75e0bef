"""Logging: one line a record, as text or JSON, to standard error; levels change at run time."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

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
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Everything that can be logged under; other names are typing errors.
_FOREIGN = ("uvicorn", "grpc", "sqlalchemy", "alembic")


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure(level: str, form: str) -> None:
    """Send all logs to standard error in that form ("text" or "json")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(LEVELS[level])


def set_level(module_name: str, log_level: str) -> None:
    """Change the level of a module's logger, "kvcm.cache" or just "cache"; "" means all of kvcm.

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
    return names | {n for n in _FOREIGN if n in sys.modules}
