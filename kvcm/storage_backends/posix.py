"""Files on a mounted file system: ``file`` (ST_NFS: local or NFS), ``hf3fs`` (ST_3FS) and
``vcns_hf3fs`` (ST_VCNS_3FS).

For kvcm a 3FS mount is a POSIX tree like any other. They differ in their spec's fields only; those
that ``vcns_hf3fs`` adds are for clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, StorageError, Unsupported
from kvcm.core.limits import NAMES_PER_JOB_MAX, STORAGE_JOBS_MAX, STORAGE_THREADS_MAX
from kvcm.core.types import STORAGE_TYPE_NAMES, StorageConfig, StorageType
from kvcm.storage_backends import posix_survey
from kvcm.storage_backends import posix_tree as tree
from kvcm.storage_backends.base import (
    Capability,
    ExtentName,
    FoundObject,
    ObjectRef,
    ProbeResult,
    SpecSlots,
)
from kvcm.storage_backends.posix_names import (
    Layout,
    ObjectPath,
    check_keys_per_file,
    check_root,
    check_storage_name,
    check_tokens,
    decode_layout,
    encode_layout,
    file_objects,
    parse_object,
    slot_uris,
)
from kvcm.storage_backends.threads import DaemonPool

T = TypeVar("T")


def root_of(config: StorageConfig) -> str:
    """The folder below which everything of a storage lies.

    Raises:
        InvalidArgument: naming the field of the spec that is wrong.
    """
    if config.type is StorageType.NFS:
        return check_root("root_path", config.spec.get("root_path"))
    mountpoint = check_root("mountpoint", config.spec.get("mountpoint"))
    root_dir = config.spec.get("root_dir", "")
    if not isinstance(root_dir, str):
        raise InvalidArgument(f"root_dir {root_dir!r} must be a path below the mountpoint")
    return check_root("root_dir", f"{mountpoint}/{root_dir}")


class PosixBackend:
    """One file storage. Pure methods work without ``open``; nothing blocks the event loop."""

    def __init__(self, config: StorageConfig, clock: Clock) -> None:
        """Check the config; starts and touches nothing.

        Raises:
            InvalidArgument: the config is wrong; the message names the field.
        """
        check_storage_name(config.global_unique_name)
        self.config = config
        self.type = config.type
        self.capabilities = Capability.EXISTS | Capability.LIST
        if _flag(config, "touch_file_when_create"):
            self.capabilities |= Capability.TOUCH
        self.touched = Capability.TOUCH in self.capabilities
        self._clock = clock
        self._root = root_of(config)
        self._roots = (self._root, *_former_roots(config))
        self._layout = Layout(
            STORAGE_TYPE_NAMES[config.type],
            config.global_unique_name,
            self._root,
            check_keys_per_file(config.spec),
        )
        self._descriptor = encode_layout(self._layout)
        self._pool: DaemonPool | None = None
        self._probe_pool: DaemonPool | None = None
        self._probing: asyncio.Task[ProbeResult] | None = None

    async def create(self) -> None:
        name = f"storage {self.config.global_unique_name}"
        pool = DaemonPool(name, threads_max=1, jobs_max=1)
        try:
            if self.config.check_storage_available_when_open and self.type is not StorageType.NFS:
                # Else the bytes would go to the disk below a file system not mounted yet.
                await pool.run(partial(tree.require_folder, self.config.spec["mountpoint"]))
            await pool.run(partial(tree.make_root, self._root))
        finally:
            pool.close()

    async def open(self) -> None:
        if self._pool is None:
            name = f"storage {self.config.global_unique_name}"
            self._pool = DaemonPool(
                name, threads_max=STORAGE_THREADS_MAX, jobs_max=STORAGE_JOBS_MAX
            )
            # Its own thread: a long queue of deletes must not look like a dead storage.
            self._probe_pool = DaemonPool(f"{name} probe", threads_max=1, jobs_max=1)
        await self._run(partial(tree.open_root, self._root))
        if self.config.check_storage_available_when_open:
            result = await self.probe()
            if not result.available:
                raise StorageError(result.detail)

    async def close(self) -> None:
        for pool in (self._pool, self._probe_pool):
            if pool is not None:
                pool.close()
        self._pool = self._probe_pool = None

    async def probe(self) -> ProbeResult:
        """One probe runs at a time: callers that come meanwhile, or after one that gave up, wait
        for the same. So a hung mount holds one thread, however often it is probed."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> ProbeResult:
        name = posix_survey.PROBE_PREFIX + self._clock.random_bytes(12).hex()
        content = self._clock.random_bytes(256)
        if self._probe_pool is None:
            return ProbeResult(False, f"root {self._root!r} is not open")
        try:
            return await self._probe_pool.run(partial(tree.probe_root, self._root, name, content))
        except StorageError as error:
            return ProbeResult(False, str(error))

    def place(self, extent: ExtentName, specs: Sequence[SpecSlots]) -> bytes:
        """Raises InvalidArgument for names that are not tokens."""
        check_tokens(extent.cluster_uid, extent.instance_uid, extent.extent)
        return self._descriptor

    def uris(
        self, descriptor: bytes, extent: ExtentName, spec: SpecSlots, first: int, count: int
    ) -> list[str]:
        return slot_uris(decode_layout(descriptor), extent, spec, first, count)

    def objects(
        self, descriptor: bytes, extent: ExtentName, specs: Sequence[SpecSlots]
    ) -> list[ObjectRef]:
        return file_objects(decode_layout(descriptor), extent, specs)

    async def prepare(self, cluster_uid: str, instance_uid: str) -> None:
        check_tokens(cluster_uid, instance_uid)
        await self._run(partial(tree.make_instance, self._root, cluster_uid, instance_uid))

    async def touch(self, names: Sequence[str]) -> None:
        if Capability.TOUCH not in self.capabilities:
            raise Unsupported(
                f"storage {self.config.global_unique_name} does not create files ahead of writers"
            )
        for answer in await self._each(names, lambda _: tree.touch, create=True):
            if isinstance(answer, Exception):
                raise answer

    async def delete(self, names: Sequence[str]) -> list[Exception | None]:
        answers = await self._each(names, lambda _: tree.unlink)
        return [answer if isinstance(answer, Exception) else None for answer in answers]

    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        def act(indices: Sequence[int]) -> Callable[[int, str, int], bool]:
            return lambda i, file, fd: tree.file_size(file, fd) >= sizes[indices[i]]

        result: list[bool] = []
        for answer in await self._each(names, act):
            if isinstance(answer, Exception):
                raise answer
            result.append(answer)
        return result

    async def list_objects(self, cluster_uid: str, instance_uid: str) -> list[str]:
        check_tokens(cluster_uid, instance_uid)
        return await self._run(partial(tree.list_instance, self._root, cluster_uid, instance_uid))

    async def survey(
        self, cluster_uid: str, instance_uid: str
    ) -> AsyncIterator[Sequence[FoundObject]]:
        """Some folders a page, below the present root and former ones that are still there."""
        check_tokens(cluster_uid, instance_uid)
        for root in await self._run(partial(posix_survey.present_roots, self._roots)):
            # Taken first: what is written while this goes on can only seem younger.
            now = await self._file_system_time(root)
            where = (root, cluster_uid, instance_uid)
            left = await self._run(partial(posix_survey.folders_of, *where))
            while left:
                job = partial(posix_survey.files_in, *where, left, now)
                found, number = await self._run(job)
                left = left[number:]
                yield found

    async def instances(self, cluster_uid: str) -> list[str]:
        check_tokens(cluster_uid)
        found: dict[str, None] = {}
        for root in await self._run(partial(posix_survey.present_roots, self._roots)):
            names = await self._run(partial(posix_survey.instances_of, root, cluster_uid))
            found |= dict.fromkeys(names)
        return list(found)

    async def leftovers(self) -> list[FoundObject]:
        now = await self._file_system_time(self._root)
        return await self._run(partial(posix_survey.probes_in, self._root, now))

    async def delete_leftovers(self, names: Sequence[str]) -> list[Exception | None]:
        return await self._run(partial(posix_survey.delete_probes, self._root, names))

    async def _file_system_time(self, root: str) -> float:
        name = posix_survey.PROBE_PREFIX + self._clock.random_bytes(12).hex()
        return await self._run(partial(posix_survey.file_system_time, root, name))

    async def remove_instance(self, cluster_uid: str, instance_uid: str) -> None:
        check_tokens(cluster_uid, instance_uid)
        await self._run(partial(tree.remove_instance, self._root, cluster_uid, instance_uid))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._pool is None:
            raise StorageError(f"storage {self.config.global_unique_name} is not open")
        return await self._pool.run(work)

    async def _each(
        self,
        names: Sequence[str],
        act: Callable[[Sequence[int]], Callable[[int, str, int], bool]],
        *,
        create: bool = False,
    ) -> list[bool | Exception]:
        """Act on files in jobs of NAMES_PER_JOB_MAX; one answer a name, in order.

        ``act`` is given the positions that a job works on and returns what to do with each file.
        """
        answers: list[bool | Exception] = [False] * len(names)
        by_root: dict[str, list[tuple[ObjectPath, int]]] = {}
        for i, name in enumerate(names):
            try:
                path = parse_object(name, self._roots)
            except StorageError as error:
                answers[i] = error
            else:
                by_root.setdefault(path.root, []).append((path, i))

        async def job(part: Sequence[tuple[ObjectPath, int]]) -> None:
            indices = [i for _, i in part]
            paths = [path for path, _ in part]
            done: Sequence[bool | Exception]
            try:
                done = await self._run(
                    partial(tree.for_each_file, paths, act(indices), create=create)
                )
            except StorageError as error:
                done = [error] * len(part)
            for i, answer in zip(indices, done, strict=True):
                answers[i] = answer

        jobs = []
        for found in by_root.values():
            found.sort()
            jobs += [
                job(found[at : at + NAMES_PER_JOB_MAX])
                for at in range(0, len(found), NAMES_PER_JOB_MAX)
            ]
        await asyncio.gather(*jobs)
        return answers


def _former_roots(config: StorageConfig) -> list[str]:
    """Roots the storage had before a forced update: files there may still be deleted."""
    roots: Any = config.spec.get("former_roots", ())
    if not isinstance(roots, list | tuple):
        raise InvalidArgument(f"former_roots {roots!r} must be a list of paths")
    return [check_root("former_roots", root) for root in roots]


def _flag(config: StorageConfig, field: str) -> bool:
    value = config.spec.get(field, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"{field} {value!r} must be true or false")
    return value
