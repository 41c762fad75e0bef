"""For commands that need the manager to be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcm.server.datadir import DataDir


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """The data directory's lock, if there is one: a manager that runs on it holds it.

    Raises:
        ConfigError: one runs.
    """
    lock = DataDir(data_dir) if data_dir.is_dir() else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
