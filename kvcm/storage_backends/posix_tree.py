"""The file-system calls of file storages. Everything here blocks and runs in a thread.

Every folder below a root is opened relative to its parent and never through a symbolic link, so
whatever somebody plants in the tree, nothing outside of it is touched.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvcm.core.errors import StorageError
from kvcm.core.storage import MARKER
from kvcm.storage_backends.base import ProbeResult
from kvcm.storage_backends.posix_names import FOLDERS, ObjectPath, is_block_file

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INNER_FOLDER = _FOLDER | os.O_NOFOLLOW
_NO_WRITES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MARKER_CONTENT = b'{"kvcm": 1}\n'


def failure(what: str, error: OSError) -> StorageError:
    """The error of a file-system call, with the place it was about."""
    return StorageError(f"{what}: {error.strerror or error}")


@contextmanager
def root_folder(root: str) -> Iterator[int]:
    """A root that vanished, or lies without its marker below a file system that is not mounted,
    is an error, not an empty storage: its files come back with the mount."""
    try:
        fd = os.open(root, _FOLDER)
    except FileNotFoundError as error:
        raise StorageError(
            f"root {root!r} is missing: is its file system mounted? "
            f"(make it, with a file {MARKER!r}, if this is the right place)"
        ) from error
    except OSError as error:
        raise failure(f"root {root!r} cannot be opened", error) from error
    try:
        _require_marker(root, fd)
        yield fd
    finally:
        os.close(fd)


def _require_marker(root: str, root_fd: int) -> None:
    try:
        found = os.stat(MARKER, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise failure(f"{root}/{MARKER}", error) from error
    else:
        if stat.S_ISREG(found.st_mode):
            return
    raise StorageError(
        f"root {root!r} has no file {MARKER!r}: is its file system mounted? "
        "(create that file if this is the right place)"
    )


class _Folders:
    """Open folders below one root, each opened once. ``get`` raises OSError."""

    def __init__(self, root_fd: int, *, create: bool = False) -> None:
        self._root = root_fd
        self._create = create
        self._open: dict[tuple[str, ...], int] = {}

    def get(self, *parts: str) -> int:
        if not parts:
            return self._root
        found = self._open.get(parts)
        if found is None:
            parent = self.get(*parts[:-1])
            if self._create:
                make_folder(parts[-1], parent)
            found = self._open[parts] = os.open(parts[-1], _INNER_FOLDER, dir_fd=parent)
        return found

    def drop(self, *parts: str) -> None:
        """Close one early, to hold few descriptors."""
        fd = self._open.pop(parts, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def make_folder(name: str, parent_fd: int) -> None:
    """Create one folder; one that exists is fine."""
    try:
        os.mkdir(name, dir_fd=parent_fd)
    except FileExistsError:
        pass


@contextmanager
def folders_below(root: str, *, create: bool = False) -> Iterator[_Folders]:
    with root_folder(root) as root_fd:
        folders = _Folders(root_fd, create=create)
        try:
            yield folders
        finally:
            folders.close()


def make_root(root: str) -> None:
    """Make the root and its marker where they are missing.

    Raises:
        StorageError: naming the root.
    """
    try:
        os.makedirs(root, exist_ok=True)
        root_fd = os.open(root, _FOLDER)
        try:
            _make_marker(root_fd)
        finally:
            os.close(root_fd)
    except OSError as error:
        raise failure(f"root {root!r} cannot be created", error) from error


def _make_marker(root_fd: int) -> None:
    try:
        fd = os.open(MARKER, _NEW_FILE, 0o666, dir_fd=root_fd)
    except FileExistsError:
        return
    try:
        os.write(fd, _MARKER_CONTENT)
        os.fsync(fd)
    finally:
        os.close(fd)


def open_root(root: str) -> None:
    """See that the root is there and can be used.

    Raises:
        StorageError: naming the root.
    """
    with root_folder(root) as root_fd:
        needed = os.R_OK | os.X_OK
        if not os.fstatvfs(root_fd).f_flag & os.ST_RDONLY:
            needed |= os.W_OK
        if not os.access(root, needed):
            raise StorageError(f"root {root!r} is not writable")


def require_folder(path: str) -> None:
    """Refuse a folder that is not there, such as the mount point of a file system not mounted.

    Raises:
        StorageError: naming it.
    """
    if not os.path.isdir(path):
        raise StorageError(f"{path!r} is not a folder")


def probe_root(root: str, name: str, content: bytes) -> ProbeResult:
    """Write, sync, read back, compare and unlink one small file right below the root; see what is
    free there for users without privileges. A file system that is full or read-only can be read.

    Raises:
        StorageError: the root is not there, or is not the storage's.
    """
    try:
        with root_folder(root) as root_fd:
            fd = os.open(name, _NEW_FILE, 0o666, dir_fd=root_fd)
            try:
                try:
                    os.write(fd, content)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root_fd)
                with open(fd, "rb") as file:
                    same = file.read() == content
                    space = os.fstatvfs(file.fileno())
            finally:
                os.unlink(name, dir_fd=root_fd)
    except OSError as error:
        detail = f"probe of {root!r} failed: {error.strerror or error}"
        if error.errno in _NO_WRITES:
            # What lies there is as good as ever.
            return ProbeResult(True, free_bytes=0, unwritable=detail)
        return ProbeResult(False, detail)
    if not same:
        return ProbeResult(False, f"probe of {root!r} read back other bytes than it wrote")
    return ProbeResult(True, free_bytes=space.f_bavail * space.f_frsize)


def for_each_file(
    paths: Sequence[ObjectPath], act: Callable[[int, str, int], bool], *, create: bool = False
) -> list[bool | StorageError]:
    """Call ``act(index, file name, folder descriptor)`` for files of one root; one answer a path.

    Where a folder or file is missing the answer is False.

    Raises:
        StorageError: the root itself cannot be opened, or has no marker.
    """
    answers: list[bool | StorageError] = [False] * len(paths)
    order = sorted(range(len(paths)), key=lambda i: paths[i][:4])
    with folders_below(paths[0].root, create=create) as folders:
        last: tuple[str, str, str] | None = None
        for i in order:
            path = paths[i]
            parts = (path.cluster, path.instance, path.folder)
            if last is not None and parts != last:
                folders.drop(*last)
            last = parts
            try:
                answers[i] = act(i, path.file, folders.get(*parts))
            except FileNotFoundError:
                continue
            except OSError as error:
                answers[i] = failure("/".join(path), error)
    return answers


def unlink(_index: int, file: str, folder_fd: int) -> bool:
    """Remove one file (a link itself, never its target)."""
    os.unlink(file, dir_fd=folder_fd)
    return True


def touch(_index: int, file: str, folder_fd: int) -> bool:
    """Create an empty file; one that exists keeps its bytes."""
    try:
        os.close(os.open(file, _NEW_FILE, 0o666, dir_fd=folder_fd))
    except FileExistsError:
        pass
    return True


def file_size(file: str, folder_fd: int) -> int:
    """Bytes of a regular file; -1 for anything else."""
    found = os.stat(file, dir_fd=folder_fd, follow_symlinks=False)
    return found.st_size if stat.S_ISREG(found.st_mode) else -1


def make_instance(root: str, cluster: str, instance: str) -> None:
    """Make the fan-out folders of an instance.

    Raises:
        StorageError: naming the instance's folder.
    """
    try:
        with folders_below(root, create=True) as folders:
            parent = folders.get(cluster, instance)
            for folder in FOLDERS:
                make_folder(folder, parent)
    except OSError as error:
        raise failure(f"folders below {root}/{cluster}/{instance}", error) from error


def list_instance(root: str, cluster: str, instance: str) -> list[str]:
    """Absolute paths of all block files of an instance; none when it has no folder.

    Raises:
        StorageError: naming the instance's folder.
    """
    prefix = f"{root}/{cluster}/{instance}"
    result: list[str] = []
    try:
        with folders_below(root) as folders:
            for folder in fan_out(folders, cluster, instance):
                fd = folders.get(cluster, instance, folder)
                with os.scandir(fd) as entries:
                    result += [
                        f"{prefix}/{folder}/{entry.name}"
                        for entry in entries
                        if is_block_file(entry.name) and entry.is_file(follow_symlinks=False)
                    ]
                folders.drop(cluster, instance, folder)
    except OSError as error:
        raise failure(prefix, error) from error
    return result


def remove_instance(root: str, cluster: str, instance: str) -> None:
    """Remove the fan-out folders of an instance that are empty, and then its own.

    Raises:
        StorageError: naming the instance's folder.
    """
    try:
        with folders_below(root) as folders:
            for folder in fan_out(folders, cluster, instance):
                _remove_empty(folder, folders.get(cluster, instance))
            if has_folder(folders, cluster):
                _remove_empty(instance, folders.get(cluster))
    except OSError as error:
        raise failure(f"{root}/{cluster}/{instance}", error) from error


def fan_out(folders: _Folders, cluster: str, instance: str) -> Iterable[str]:
    """Fan-out folders that exist. Links and strangers are not among them."""
    if not has_folder(folders, cluster, instance):
        return []
    with os.scandir(folders.get(cluster, instance)) as entries:
        present = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
    return [folder for folder in FOLDERS if folder in present]


def has_folder(folders: _Folders, *parts: str) -> bool:
    try:
        folders.get(*parts)
    except FileNotFoundError:
        return False
    return True


def _remove_empty(name: str, parent_fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
