"""What lies on a file storage, whoever knows of it (repair). Everything here blocks, in a thread.

Ages are by the file system's own clock: that of a server may be far from ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from kvcm.core.errors import StorageError
from kvcm.core.limits import NAMES_PER_JOB_MAX
from kvcm.storage_backends.base import FoundObject
from kvcm.storage_backends.posix_names import is_block_file
from kvcm.storage_backends.posix_tree import (
    failure,
    fan_out,
    folders_below,
    has_folder,
    root_folder,
)

PROBE_PREFIX = ".kvcm-probe-"
_PROBE = re.compile(re.escape(PROBE_PREFIX) + r"[0-9a-f]{24}")
_TOKEN = re.compile(r"[a-z0-9]{1,32}")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def present_roots(roots: Sequence[str]) -> list[str]:
    """The present root, and those of the former ones that are still there, with their markers.

    A present root that vanished stays in the list, so that looking into it fails.
    """
    return [roots[0], *(root for root in roots[1:] if _is_there(root))]


def _is_there(root: str) -> bool:
    try:
        with root_folder(root):
            return True
    except StorageError:
        return False


def file_system_time(root: str, name: str) -> float:
    """The present moment as the file system stamps files, in its seconds since the epoch.

    Raises:
        StorageError: the root cannot be written.
    """
    try:
        with root_folder(root) as root_fd:
            fd = os.open(name, _NEW_FILE, 0o666, dir_fd=root_fd)
            try:
                return os.fstat(fd).st_mtime
            finally:
                os.close(fd)
                os.unlink(name, dir_fd=root_fd)
    except OSError as error:
        raise failure(f"time of {root!r}", error) from error


def instances_of(root: str, cluster: str) -> list[str]:
    """Names of the folders of a cluster; links and strangers are not among them.

    Raises:
        StorageError: naming the cluster's folder.
    """
    try:
        with folders_below(root) as folders:
            if not has_folder(folders, cluster):
                return []
            with os.scandir(folders.get(cluster)) as entries:
                return [
                    entry.name
                    for entry in entries
                    if _TOKEN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
    except OSError as error:
        raise failure(f"{root}/{cluster}", error) from error


def folders_of(root: str, cluster: str, instance: str) -> list[str]:
    """Fan-out folders of an instance.

    Raises:
        StorageError: naming the instance's folder.
    """
    try:
        with folders_below(root) as folders:
            return list(fan_out(folders, cluster, instance))
    except OSError as error:
        raise failure(f"{root}/{cluster}/{instance}", error) from error


def files_in(
    root: str, cluster: str, instance: str, folders: Sequence[str], now: float
) -> tuple[list[FoundObject], int]:
    """The block files of some folders, and how many of those were read: as many as fit one job.

    ``now`` as ``file_system_time`` gives it.

    Raises:
        StorageError: naming the instance's folder.
    """
    found: list[FoundObject] = []
    done = 0
    try:
        with folders_below(root) as opened:
            for folder in folders:
                done += 1
                if not has_folder(opened, cluster, instance, folder):
                    continue
                prefix = f"{root}/{cluster}/{instance}/{folder}"
                with os.scandir(opened.get(cluster, instance, folder)) as entries:
                    for entry in entries:
                        each = _found(prefix, entry, now) if is_block_file(entry.name) else None
                        if each is not None:
                            found.append(each)
                opened.drop(cluster, instance, folder)
                if len(found) >= NAMES_PER_JOB_MAX:
                    break
    except OSError as error:
        raise failure(f"{root}/{cluster}/{instance}", error) from error
    return found, done


def probes_in(root: str, now: float) -> list[FoundObject]:
    """Files of probes right below the root.

    Raises:
        StorageError: naming the root.
    """
    try:
        with root_folder(root) as fd, os.scandir(fd) as entries:
            found = (_found(root, e, now) for e in entries if _PROBE.fullmatch(e.name))
            return [each for each in found if each is not None]
    except OSError as error:
        raise failure(root, error) from error


def delete_probes(root: str, names: Sequence[str]) -> list[Exception | None]:
    """Unlink files that ``probes_in`` named.

    Raises:
        StorageError: the root cannot be opened.
    """
    answers: list[Exception | None] = []
    with root_folder(root) as fd:
        for name in names:
            folder, _, file = name.rpartition("/")
            if folder != root or not _PROBE.fullmatch(file):
                answers.append(StorageError(f"{name[:256]!r} is not the file of a probe"))
                continue
            try:
                os.unlink(file, dir_fd=fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                answers.append(failure(name, error))
                continue
            answers.append(None)
    return answers


def _found(prefix: str, entry: os.DirEntry[str], now: float) -> FoundObject | None:
    """A regular file; None for anything else, and for what vanished meanwhile."""
    try:
        if not entry.is_file(follow_symlinks=False):
            return None
        stat = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    # A rename or a restored copy keeps the one and moves the other: the younger counts.
    age_s = now - max(stat.st_mtime, stat.st_ctime)
    return FoundObject(f"{prefix}/{entry.name}", stat.st_size, age_s)
