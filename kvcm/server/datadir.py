"""The data directory and its lock: one manager at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvcm.core.errors import ConfigError

LOCK_NAME = "kvcm.lock"


class DataDir:
    """A data directory held by this process until `release`, or until the process ends."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ConfigError: it cannot be made or written, or another manager holds it (with its pid).
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"data_dir {path} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with contextlib.closing(os.fdopen(self._fd)) as file:
                holder = file.read(20).strip()
            by = f" (pid {holder})" if holder.isdigit() else ""
            raise ConfigError(
                f"data_dir {path} is in use by another manager{by}; "
                "give this one a --data-dir of its own"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another manager have it. Idempotent."""
        if self._fd >= 0:
            # The file stays: removing it would let two managers lock two files of one name.
            os.close(self._fd)
            self._fd = -1
