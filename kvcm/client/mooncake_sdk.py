"""Bytes of blocks in Mooncake: storages of type ``mooncake``.

Blocks are put hard-pinned: kvcm's quotas and eviction own the space, so Mooncake must not evict by
itself. Keys are never used twice. Needs the extra ``kvcm[mooncake]``.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcm.client.transfer import (
    DEADLINE,
    MISSING,
    TRUNCATED,
    GetResult,
    PutResult,
    TransferSdk,
    storage_specs,
    view_of,
)
from kvcm.core import mooncake
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import InvalidArgument, KvcmError, StorageError, Unavailable
from kvcm.core.limits import MOONCAKE_BATCH_BYTES_MAX, MOONCAKE_BATCH_KEYS_MAX
from kvcm.core.uri import parse_uri

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcm.client.types import StorageInfo

SCHEMES = frozenset({"mooncake"})

_CONNECT_S = 3.0
_SIZE = re.compile(r"\d{1,18}", re.ASCII)
_COMMON_URI = re.compile(
    r"mooncake://([A-Za-z0-9_.-]+)/\?key=([A-Za-z0-9_.~-]+)&size=(\d{1,18})", re.ASCII
)


class Key(NamedTuple):
    """Where one block's bytes lie."""

    storage: str
    key: str
    size: int


class _Item(NamedTuple):
    """One position of a batch: where, and from or to which memory."""

    position: int
    where: Key
    view: memoryview
    is_ours: bool
    address: int


def parse_key(uri: str) -> Key:
    """Storage, key and size that a location URI names.

    Raises:
        InvalidArgument: not a ``mooncake`` URI, or one without a key or a size above 0.
    """
    match = _COMMON_URI.fullmatch(uri)
    if match is not None:
        where = Key(match[1], match[2], int(match[3]))
    else:
        parsed = parse_uri(uri)
        size = parsed.params.get("size", "")
        if parsed.scheme not in SCHEMES or _SIZE.fullmatch(size) is None:
            raise InvalidArgument(f"location uri {uri!r} is not of Mooncake, or has no size")
        where = Key(parsed.storage, parsed.params.get("key", ""), int(size))
    if not where.key or not where.size:
        raise InvalidArgument(f"location uri {uri!r}: no key, or size {where.size}")
    return where


def storages_of(storages: str | Sequence[StorageInfo]) -> dict[str, mooncake.MooncakeSpec]:
    """The Mooncake storages among those that RegisterInstance answered, by name.

    Raises:
        InvalidArgument: it does not parse, or a field is wrong; the message names it.
    """
    return {
        name: mooncake.check_spec(spec.fields)
        for name, spec in storage_specs(storages).items()
        if spec.type in SCHEMES
    }


class MooncakeSdk(TransferSdk):
    """Puts and gets blocks in Mooncake stores. Safe to share between threads.

    Connects at the first call to each store. While it connects to a master that hangs, Mooncake's
    library holds the interpreter's lock, for up to half a minute; one that refuses connections is
    noticed before.
    """

    def __init__(
        self,
        storages: Mapping[str, mooncake.MooncakeSpec],
        *,
        segment_bytes: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            storages: configuration by storage name, as from ``storages_of``.
            segment_bytes: memory that this process lends to each store; what lies there is lost
                when the process ends.
        """
        self._links = {name: _Link(name, spec, segment_bytes) for name, spec in storages.items()}
        self._clock = clock or SystemClock()

    def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        """Put blocks, hard-pinned.

        Args:
            items: (location URI, contiguous buffer of exactly the URI's ``size`` bytes). The store
                reads them where they are.
            deadline_s: seconds from now after which no further batch is begun. A call that hangs
                in the library cannot be broken off.

        Returns:
            One answer an item: None = the store holds a complete object of that size. Otherwise
            InvalidArgument (URI, buffer, unknown storage), Unavailable with reason DEADLINE (its
            turn did not come), or StorageError.
        """
        return self._batches(items, deadline_s, _Link.put, _put_answer, writable=False)

    def get_many(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        """Get blocks.

        Args:
            items: (location URI, writable contiguous buffer of exactly the URI's ``size`` bytes,
                or None to get new ``bytes``). The store writes into the buffer itself.
            deadline_s: as in ``put_many``.

        Returns:
            One answer an item: the bytes, or None when they are in the buffer given. Otherwise
            StorageError (``reason`` MISSING: no such object; TRUNCATED: of another size),
            InvalidArgument, or Unavailable with reason DEADLINE. After an error the content of the
            buffer is undefined.
        """
        return self._batches(items, deadline_s, _Link.get, _got_answer, writable=True)

    def register(self, storage: str, buffer: Buffer) -> None:
        """Announce memory that blocks are put from and got into, once and for good: RDMA wants
        memory registered, and doing so at every call is slow. It must outlive the SDK.

        Raises:
            InvalidArgument: unknown storage, or a read-only buffer.
            StorageError: no connection, or the library refuses.
        """
        link = self._links.get(storage)
        if link is None:
            raise InvalidArgument(f"storage {storage!r} has no Mooncake configuration here")
        link.register(_piece(buffer))

    def announce(self, buffer: Buffer) -> None:
        """``register`` for all stores; those not connected yet learn of it when they are."""
        piece = _piece(buffer)
        for link in self._links.values():
            link.announce(piece)

    def close(self) -> None:
        """Leave all stores; memory lent to them, and the blocks in it, are lost. Idempotent."""
        for link in self._links.values():
            link.close()

    def _batches(
        self,
        items: Sequence[tuple[str, Buffer | None]],
        deadline_s: float | None,
        move: Callable[[_Link, Any, Sequence[_Item]], list[int]],
        conclude: Callable[[_Link, _Item, int], Any],
        *,
        writable: bool,
    ) -> list[Any]:
        answers: list[Any] = [None] * len(items)
        end = None if deadline_s is None else self._clock.monotonic() + deadline_s
        by_storage: dict[str, list[_Item]] = {}
        for item in _checked(items, answers, writable=writable):
            by_storage.setdefault(item.where.storage, []).append(item)
        for storage, part in by_storage.items():
            link = self._links.get(storage)
            if link is None:
                error = InvalidArgument(f"storage {storage!r} has no Mooncake configuration here")
                for item in part:
                    answers[item.position] = error
                continue
            for batch in _cut(part):
                done = self._move(link, batch, end, move)
                for item, code in zip(batch, done, strict=True):
                    answers[item.position] = (
                        conclude(link, item, code) if isinstance(code, int) else code
                    )
        return answers

    def _move(
        self,
        link: _Link,
        batch: Sequence[_Item],
        end: float | None,
        move: Callable[[_Link, Any, Sequence[_Item]], list[int]],
    ) -> Sequence[int | KvcmError]:
        """Result codes, or the errors that kept the batch from being tried."""
        left = None if end is None else end - self._clock.monotonic()
        if left is not None and (left <= 0 or not link.lock.acquire(timeout=left)):
            return [_late(item) for item in batch]
        if left is None:
            link.lock.acquire()
        try:
            codes = move(link, link.connected(), batch)
            if all(code in mooncake.NO_MASTER for code in codes):
                # The master may have been started anew; nothing was done, so once more is safe.
                codes = move(link, link.connected(), batch)
            return codes
        except StorageError as error:
            return [error] * len(batch)
        finally:
            link.lock.release()


class _Link:
    """One store. Its lock is held by whoever uses the library: the library's queue to a peer is
    bounded, and a transfer that finds it full fails and can spoil the connection."""

    def __init__(self, name: str, spec: mooncake.MooncakeSpec, segment_bytes: int) -> None:
        self.label = f"storage {name} (Mooncake master {spec.master})"
        self.lock = threading.Lock()
        self._spec = spec
        self._segment_bytes = segment_bytes
        self._store: Any = None
        self._pinned: Any = None
        self._is_stale = False
        self._registered: list[tuple[int, int]] = []

    # ---- under the lock ----------------------------------------------------------------------

    def connected(self) -> Any:
        """The library's client; a fresh one after calls to the master or transfers failed.

        Raises:
            StorageError: no connection; naming the master, or the extra that is missing.
        """
        # One that lends memory stays: its blocks would be gone. It finds the master again itself.
        if self._store is not None and (not self._is_stale or self._segment_bytes):
            return self._store
        self._greet()
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig
        except ImportError as error:
            raise StorageError(f"{mooncake.INSTALL_HINT}: {error}") from error
        self._leave()
        # The library's own twenty tries hold the interpreter's lock all the while.
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        spec, store = self._spec, MooncakeDistributedStore()
        code = store.setup(
            spec.local_hostname,
            spec.metadata_connstring,
            self._segment_bytes,
            0,
            spec.protocol,
            spec.rdma_device,
            spec.master,
        )
        if code:
            raise StorageError(f"{self.label}: cannot connect (code {code})")
        self._pinned = ReplicateConfig()
        self._pinned.with_hard_pin = True
        for address, size in self._registered:
            store.register_buffer(address, size)
        self._store, self._is_stale = store, False
        return store

    def put(self, store: Any, batch: Sequence[_Item]) -> list[int]:
        """Result codes; 0 only where the store holds an object of the right size: a put on an
        existing key answers 0 as well, and keeps what was there."""
        codes = self._transfer(store, batch, lambda *to: store.batch_put_from(*to, self._pinned))
        # Only of those: it complains to standard error about each key that it does not find.
        keys = [
            item.where.key for item, code in zip(batch, codes, strict=True) if code == mooncake.OK
        ]
        held = store.batch_get_replica_desc(keys) if keys else {}
        return [
            mooncake.WRONG_SIZE
            if code == mooncake.OK and not _holds(held.get(item.where.key, ()), item.where.size)
            else code
            for item, code in zip(batch, codes, strict=True)
        ]

    def get(self, store: Any, batch: Sequence[_Item]) -> list[int]:
        """Bytes got, or negative codes."""
        return self._transfer(store, batch, store.batch_get_into)

    def _transfer(
        self, store: Any, batch: Sequence[_Item], call: Callable[..., list[int]]
    ) -> list[int]:
        pieces = [(item.address, item.where.size) for item in batch]
        # TCP needs no registered memory. A buffer that cannot be registered is tried all the same.
        strange = [] if self._spec.protocol == "tcp" else self._unknown(pieces)
        strange = [piece for piece in strange if store.register_buffer(*piece) == mooncake.OK]
        try:
            codes = call(
                [item.where.key for item in batch],
                [address for address, _ in pieces],
                [size for _, size in pieces],
            )
        finally:
            for address, _ in strange:
                store.unregister_buffer(address)
        lost = (*mooncake.NO_MASTER, mooncake.TRANSFER_FAILED)
        self._is_stale = self._is_stale or any(code in lost for code in codes)
        return codes

    def _unknown(self, pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [
            (address, size)
            for address, size in dict(pieces).items()
            if not any(a <= address and address + size <= a + n for a, n in self._registered)
        ]

    def _greet(self) -> None:
        """Whether anybody listens there, asked without the library (which asks for long)."""
        address = self._spec.master_address
        if address is None:
            return
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
        except OSError as error:
            raise StorageError(f"{self.label} does not answer: {error}") from error

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    # ---- without it --------------------------------------------------------------------------

    def register(self, piece: tuple[int, int]) -> None:
        with self.lock:
            self._register(self.connected(), piece)

    def announce(self, piece: tuple[int, int]) -> None:
        with self.lock:
            if self._store is None:
                self._registered.append(piece)
            else:
                self._register(self._store, piece)

    def _register(self, store: Any, piece: tuple[int, int]) -> None:
        code = store.register_buffer(*piece)
        if code:
            raise StorageError(f"{self.label}: memory not registered (code {code})")
        self._registered.append(piece)

    def close(self) -> None:
        with self.lock:
            self._leave()


def _checked(
    items: Sequence[tuple[str, Buffer | None]], answers: list[Any], *, writable: bool
) -> Iterator[_Item]:
    """The items that can be tried; the others get their error at once."""
    for position, (uri, buffer) in enumerate(items):
        try:
            where = parse_key(uri)
            view = _view(uri, where, buffer, writable=writable)
        except InvalidArgument as error:
            answers[position] = error
        except (MemoryError, OverflowError):
            answers[position] = StorageError(f"location uri {uri!r}: no memory for {where.size} B")
        else:
            yield _Item(position, where, view, buffer is None, _address(view))


def _view(uri: str, where: Key, buffer: Buffer | None, *, writable: bool) -> memoryview:
    if buffer is None:
        if not writable:
            raise InvalidArgument(f"location uri {uri!r}: no buffer to put from")
        return memoryview(bytearray(where.size))
    return view_of(uri, where.size, buffer, writable=writable)


def _piece(buffer: Buffer) -> tuple[int, int]:
    """Address and length of memory to register."""
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        raise InvalidArgument("memory to register must be writable and contiguous")
    return _address(view.cast("B")), view.nbytes


def _address(view: memoryview) -> int:
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    # ctypes takes no read-only memory; this takes ten times as long.
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _cut(items: Sequence[_Item]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    total = 0
    for item in items:
        full = len(batch) == MOONCAKE_BATCH_KEYS_MAX
        if batch and (full or total + item.where.size > MOONCAKE_BATCH_BYTES_MAX):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += item.where.size
    if batch:
        yield batch


def _holds(copies: Sequence[Any], size: int) -> bool:
    return any(
        copy.status.name == "COMPLETE"
        and copy.is_memory_replica()
        and copy.get_memory_descriptor().buffer_descriptor.size == size
        for copy in copies
    )


def _late(item: _Item) -> Unavailable:
    return Unavailable(f"the deadline passed before {item.where.key!r}", reason=DEADLINE)


def _put_answer(link: _Link, item: _Item, code: int) -> PutResult:
    return None if code == mooncake.OK else _failure(link, item, code)


def _got_answer(link: _Link, item: _Item, code: int) -> GetResult:
    if code == item.where.size:
        return bytes(item.view) if item.is_ours else None
    return _failure(link, item, code)


def _failure(link: _Link, item: _Item, code: int) -> StorageError:
    text = f"{link.label}: {item.where.key!r}: "
    if code == mooncake.NOT_FOUND or code == 0:
        # Of an object whose owner died the library may get nothing, without an error.
        return StorageError(f"{text}no such object", reason=MISSING)
    if code > 0:
        return StorageError(f"{text}has {code} bytes, not {item.where.size}", reason=TRUNCATED)
    reason = TRUNCATED if code == mooncake.WRONG_SIZE else ""
    return StorageError(f"{text}{mooncake.meaning(code)}", reason=reason)
