"""What the transfer SDKs move a second, beside plain copies of the same bytes.

Files: `cp` between the storage and a folder in memory, and bare `write` and `read` calls for whole
files. Mooncake: the library's own batch calls, on a connection of their own, in batches of the size
that the SDK uses.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from kvcm.client.router import Transfers
from kvcm.core.limits import MOONCAKE_BATCH_BYTES_MAX, MOONCAKE_BATCH_KEYS_MAX
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.servers_mooncake import mooncake_store, why_not

Row = dict[str, Any]
KIB, MIB = 1 << 10, 1 << 20
_SLOTS = 8
"""Blocks of a file, as in the default storage."""
_IN_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Options:
    """What is measured: (blocks, bytes of one) pairs; ``folder`` "" is a temporary one."""

    storages: tuple[str, ...] = ("file", "mooncake")
    shapes: tuple[tuple[int, int], ...] = ((64, MIB), (4_400, 64 * KIB))
    rounds: int = 7
    folder: str = ""


class Bytes:
    """The blocks to put, all different, and the memory that they are got into."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks = blocks
        self.size = size
        self.total = blocks * size
        words = np.random.default_rng(1).integers(0, 1 << 62, self.total // 8)
        self.source = memoryview(bytearray(words.tobytes()))
        self.target = memoryview(bytearray(self.total))

    def parts(self, whole: memoryview) -> list[memoryview]:
        """One view a block."""
        return [whole[at : at + self.size] for at in range(0, self.total, self.size)]

    def check(self) -> None:
        """What was got is what was put; forget it.

        Raises:
            RuntimeError: it is not.
        """
        if self.target != self.source:
            raise RuntimeError("other bytes came back than were put")
        np.frombuffer(self.target, np.uint8).fill(0)


class Way(Protocol):
    """One way to move all blocks of a round."""

    def put(self, data: Bytes, turn: int) -> None:
        """Write them, under names of this round."""

    def get(self, data: Bytes, turn: int) -> None:
        """Read them into ``data.target``."""


class Sdk:
    """Through `Transfers`, as an engine does it."""

    def __init__(self, transfers: Transfers, uri: Callable[[int, int, int], str]) -> None:
        """``uri`` of (round, block, size)."""
        self._transfers = transfers
        self._uri = uri

    def _items(self, data: Bytes, turn: int, whole: memoryview) -> list[tuple[str, memoryview]]:
        return [(self._uri(turn, i, data.size), part) for i, part in enumerate(data.parts(whole))]

    def put(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        _all_well(self._transfers.put_many(self._items(data, turn, data.source)))

    def get(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        _all_well(self._transfers.get_many(self._items(data, turn, data.target)))


class Cp:
    """`cp` of a folder: from memory to the storage, and back."""

    def __init__(self, storage: Path, memory: Path) -> None:
        self._storage = storage
        self._memory = memory

    def prepare(self, data: Bytes) -> None:
        """Put the files that are copied into memory; not part of the measurement."""
        (self._memory / "source").mkdir()
        step = data.size * _SLOTS
        for n, at in enumerate(range(0, data.total, step)):
            (self._memory / "source" / f"{n}").write_bytes(data.source[at : at + step])

    def put(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        target = self._storage / f"cp-{turn}"
        subprocess.run(["cp", "-r", self._memory / "source", target], check=True)

    def get(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        target = self._memory / "target"
        subprocess.run(["cp", "-r", self._storage / f"cp-{turn}", target], check=True)

    def check(self, data: Bytes) -> None:
        """Takes over what was copied into memory, for `Bytes.check`."""
        step, target = data.size * _SLOTS, self._memory / "target"
        for n, at in enumerate(range(0, data.total, step)):
            data.target[at : at + step] = (target / f"{n}").read_bytes()
        shutil.rmtree(target)


class Bare:
    """One system call for the bytes of each file."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def put(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        folder = self._storage / f"bare-{turn}"
        folder.mkdir()
        step = data.size * _SLOTS
        for n, at in enumerate(range(0, data.total, step)):
            with open(folder / f"{n}", "wb", buffering=0) as file:
                file.write(data.source[at : at + step])

    def get(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        step = data.size * _SLOTS
        for n, at in enumerate(range(0, data.total, step)):
            with open(self._storage / f"bare-{turn}" / f"{n}", "rb", buffering=0) as file:
                file.readinto(data.target[at : at + step])


class Library:
    """Mooncake's own batch calls."""

    def __init__(self, store: Any, pinned: Any) -> None:
        self._store = store
        self._pinned = pinned

    def put(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        for batch in _batches(data, turn, data.source):
            if any(self._store.batch_put_from(*batch, self._pinned)):
                raise RuntimeError("Mooncake refused a put")

    def get(self, data: Bytes, turn: int) -> None:
        """See `Way`."""
        for batch in _batches(data, turn, data.target):
            if any(code != data.size for code in self._store.batch_get_into(*batch)):
                raise RuntimeError("Mooncake refused a get")


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Measure and tell; one row per storage, shape and direction."""
    rows: list[Row] = []
    for storage in options.storages:
        if storage == "mooncake" and (reason := why_not()):
            say(f"mooncake left out: {reason}")
            continue
        for blocks, size in options.shapes:
            data = Bytes(blocks, size)
            found = _files(options, data) if storage == "file" else _mooncake(options, data)
            for row in found:
                bare = f", bare {row['bare_mb_per_s']:,.0f} MB/s" if "bare_mb_per_s" in row else ""
                say(
                    f"{storage} {row['shape']} {row['direction']}: "
                    f"{row['sdk_mb_per_s']:,.0f} MB/s, {row['tool']} "
                    f"{row['plain_mb_per_s']:,.0f} MB/s, {row['ratio']:.2f} times its time{bare}"
                )
            rows += found
    return rows


def _files(options: Options, data: Bytes) -> list[Row]:
    with ExitStack() as stack:
        make = tempfile.TemporaryDirectory
        storage = Path(stack.enter_context(make(prefix="kvcm-bench-", dir=options.folder or None)))
        memory = stack.enter_context(make(prefix="kvcm-bench-", dir=_IN_MEMORY))
        transfers = stack.enter_context(Transfers())
        cp = Cp(storage, Path(memory))
        cp.prepare(data)

        def uri(turn: int, block: int, size: int) -> str:
            file, slot = divmod(block, _SLOTS)
            return f"file://bench{storage}/sdk-{turn}/{file}?blkid={slot}&size={size}"

        def check(name: str) -> None:
            if name == "cp":
                cp.check(data)
            data.check()

        def clean(turn: int) -> None:
            for folder in storage.iterdir():
                shutil.rmtree(folder)

        ways: dict[str, Way] = {"sdk": Sdk(transfers, uri), "cp": cp, "bare": Bare(storage)}
        times = _interleaved(ways, data, options.rounds, check, clean)
    return _rows("file", data, times, "cp")


def _mooncake(options: Options, data: Bytes) -> list[Row]:
    with ExitStack() as stack:
        # All ways' blocks of a round, and room for what the master has not freed yet.
        segment = max(4 * data.total, 256 * MIB)
        master, _ = stack.enter_context(mooncake_store(segment_bytes=segment))
        fields = {"master_service_entry": master.entry}
        transfers = stack.enter_context(Transfers(mooncake={"bench": fields}))
        store, pinned = stack.enter_context(_library(master.entry))

        def uri(turn: int, block: int, size: int) -> str:
            return f"mooncake://bench/?key=sdk-{turn}-{block}&size={size}"

        eventually_sync(
            lambda: transfers.put_many([("mooncake://bench/?key=first&size=1", b"x")]) == [None],
            timeout=30,
        )

        def clean(turn: int) -> None:
            for way in ("sdk", "plain"):
                keys = [f"{way}-{turn}-{i}" for i in range(data.blocks)]
                if any(store.batch_remove(keys, True)):
                    raise RuntimeError("Mooncake did not remove a block")

        ways: dict[str, Way] = {"sdk": Sdk(transfers, uri), "library": Library(store, pinned)}
        times = _interleaved(ways, data, options.rounds, lambda name: data.check(), clean)
    return _rows("mooncake", data, times, "library")


@contextmanager
def _library(entry: str) -> Iterator[tuple[Any, Any]]:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store, pinned = MooncakeDistributedStore(), ReplicateConfig()
    pinned.with_hard_pin = True
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", entry):
        raise RuntimeError("Mooncake's library cannot connect")
    try:
        yield store, pinned
    finally:
        store.close()


Times = dict[tuple[str, str], list[float]]


def _interleaved(
    ways: dict[str, Way],
    data: Bytes,
    rounds: int,
    check: Callable[[str], None],
    clean: Callable[[int], None],
) -> Times:
    """Seconds by way and direction. One round goes before them, unmeasured."""
    times: Times = {}
    for turn in range(-1, rounds):
        # Whoever is first meets other caches than whoever is last.
        order = list(ways)[:: 1 if turn % 2 else -1]
        for direction in ("put", "get"):
            for name in order:
                begun = perf_counter()
                getattr(ways[name], direction)(data, turn)
                took = perf_counter() - begun
                if turn >= 0:
                    times.setdefault((name, direction), []).append(took)
                if direction == "get":
                    check(name)
        clean(turn)
    return times


def _rows(storage: str, data: Bytes, times: Times, tool: str) -> list[Row]:
    rows: list[Row] = []
    for direction in ("put", "get"):
        took = {name: statistics.median(t) for (name, d), t in times.items() if d == direction}
        row: Row = {
            "storage": storage,
            "shape": f"{data.blocks:,} × {_size(data.size)}",
            "direction": direction,
            "tool": tool,
            "sdk_mb_per_s": data.total / took["sdk"] / 1e6,
            "plain_mb_per_s": data.total / took[tool] / 1e6,
            "ratio": took["sdk"] / took[tool],
            "rounds_ms": {
                name: [round(s * 1e3, 2) for s in t]
                for (name, d), t in times.items()
                if d == direction
            },
        }
        if "bare" in took:
            row["bare_mb_per_s"] = data.total / took["bare"] / 1e6
        rows.append(row)
    return rows


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def _batches(
    data: Bytes, turn: int, whole: memoryview
) -> Iterator[tuple[list[str], list[int], list[int]]]:
    start: int = np.frombuffer(whole, np.uint8).__array_interface__["data"][0]
    step = min(MOONCAKE_BATCH_KEYS_MAX, MOONCAKE_BATCH_BYTES_MAX // data.size)
    for first in range(0, data.blocks, step):
        part = range(first, min(first + step, data.blocks))
        yield (
            [f"plain-{turn}-{i}" for i in part],
            [start + i * data.size for i in part],
            [data.size] * len(part),
        )


def _all_well(answers: Sequence[Any]) -> None:
    for answer in answers:
        if answer is not None:
            raise RuntimeError(f"a block was not moved: {answer}")
