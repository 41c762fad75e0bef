"""Mounts that only a test's own processes see, and that fail when the test says so."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcm.testing import fuse
from kvcm.testing.processes import ending_with_us

_PATIENCE_S = 20.0
_PAGE_BYTES = 4096


def why_not() -> str:
    """What keeps private mounts from working here; empty when nothing does."""
    if not shutil.which("unshare") or not shutil.which("nsenter"):
        return "unshare and nsenter are missing (Debian's package util-linux)"
    try_it = "mount -t tmpfs -o size=64k kvcm /tmp"
    done = subprocess.run(["unshare", "-m", "sh", "-c", try_it], capture_output=True, check=False)
    if done.returncode:
        return f"private mounts are not permitted: {done.stderr.decode(errors='replace').strip()}"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened"
    return ""


class FaultyMount:
    """A file system in memory (`kvcm.testing.fuse`) that hangs, crawls or fails on demand."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answered()

    def hang(self) -> None:
        """From now on whoever touches it waits in the kernel."""
        self._tell("hang")

    def slow(self, delay_s: float) -> None:
        """Every operation takes so much longer."""
        self._tell(f"slow {delay_s}")

    def fail(self, number: int) -> None:
        """Every operation fails with an errno."""
        self._tell(f"error {number}")

    def fail_writes(self, number: int) -> None:
        """Writing bytes fails with an errno; all else works."""
        self._tell(f"writes {number}")

    def heal(self) -> None:
        """Undoes the others; calls that waited go on."""
        self._tell("well")

    def kill(self) -> None:
        """Its server is gone for good: calls fail (ENOTCONN), those that wait too. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._answered()

    def _answered(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ok\n":
            raise AssertionError(f"the faulty file system ended: {self._process.poll()}")


class PrivateMounts:
    """A mount namespace of its own, which a child process holds. Paths are as seen inside."""

    def __init__(self, holder: subprocess.Popen[bytes], stack: ExitStack) -> None:
        self._holder = holder
        self._stack = stack

    @property
    def inside(self) -> list[str]:
        """Put before a command it makes that run inside, as the same process."""
        return [_program("nsenter"), "-t", str(self._holder.pid), "-m", "--"]

    def seen(self, path: Path | str) -> Path:
        """Where processes outside find a path."""
        return Path(f"/proc/{self._holder.pid}/root{path}")

    def tmpfs(self, path: Path, size_bytes: int) -> None:
        """Mount an empty file system of so many bytes; the folder is made when missing."""
        path.mkdir(parents=True, exist_ok=True)
        self._run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "kvcm", str(path))

    def bind(self, source: Path, path: Path) -> None:
        """Show a folder at another path, so that unmounting that one loses nothing."""
        path.mkdir(parents=True, exist_ok=True)
        self._run("mount", "--bind", str(source), str(path))

    def unmount(self, path: Path) -> None:
        """What lay below the mount, commonly an empty folder, shows again."""
        self._run("umount", "--lazy", str(path))

    def remount(self, path: Path, *, read_only: bool) -> None:
        """Make a mounted file system read-only, or writable again."""
        self._run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(path))

    def fill(self, path: Path) -> Path:
        """Take all space that a mounted file system has left; the file that does (as seen from
        outside), so that deleting it gives it back. Others may write meanwhile."""
        filler = self.seen(path) / "filler"
        size, step = 0, 1 << 20
        with filler.open("wb") as file:
            while step >= _PAGE_BYTES:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2
        return filler

    def faulty(self, path: Path) -> FaultyMount:
        """Mount a file system that fails on demand."""
        path.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            ending_with_us([*self.inside, sys.executable, "-m", fuse.__name__, str(path)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.communicate)
        self._stack.callback(process.kill)
        return FaultyMount(process)

    def _run(self, *command: str) -> None:
        subprocess.run([*self.inside, *command], check=True, timeout=_PATIENCE_S)


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, name  # why_not looked
    return path


@contextmanager
def private_mounts() -> Iterator[PrivateMounts]:
    """All mounts vanish, and calls that hang in one fail, when this is left or this process ends.

    Skips the test that asks where mounting is not permitted.
    """
    if reason := why_not():
        pytest.skip(reason)
    hold = [_program("unshare"), "-m", "sh", "-c", "echo; exec sleep infinity"]
    with ExitStack() as stack:
        holder = subprocess.Popen(ending_with_us(hold), stdout=subprocess.PIPE)
        stack.callback(holder.communicate)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        holder.stdout.readline()
        yield PrivateMounts(holder, stack)
