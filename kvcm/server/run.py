"""A manager as a process: event loop, signals, what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from kvcm.core.clock import SystemClock
from kvcm.core.errors import ConfigError
from kvcm.server import bootstrap, logs, wiring
from kvcm.server.lifecycle import Manager
from kvcm.server.settings import Settings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
_MIB = 1 << 20


def check(settings: Settings) -> None:
    """Refuse settings that cannot work, before anything is made or opened.

    Raises:
        ConfigError: the registry's URL, or what the bootstrap file says; one line.
    """
    wiring.build_registry(settings, SystemClock())
    if settings.bootstrap is not None:
        bootstrap.read(settings.bootstrap)


def run(settings: Settings, *, ready_file: Path | None, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        ready_file: where ports and pid are written once the manager serves; removed at the end.
        say: prints one line for people.

    Raises:
        ConfigError: it cannot start; one line.
    """
    logs.configure(settings.log_level, settings.log_format)
    _tune_malloc()
    try:
        with tuned_gc(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, ready_file, say))
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


@contextlib.contextmanager
def tuned_gc() -> Iterator[None]:
    """Collect less often: a batch of thousands of keys makes thousands of short-lived tuples, and
    each full collection walks the whole index (measured: a third of a 4,400-key StartWrite). The
    middle generation goes early: what lives on is walked there once in any case, and all at once
    would hold the event loop (measured: a second, while a million extents were loaded)."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 5, 10_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        # Frozen, what the process ends with would never be freed; extension modules complain of it.
        gc.unfreeze()


def _tune_malloc() -> None:
    """Keep what large replies free instead of handing it back to the kernel: otherwise each reply
    of a megabyte faults all of its pages in again (measured: half the cost of a 10,000-key lookup,
    benchmarks/README.md). Only glibc has the call and the need."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    mallopt(_M_TRIM_THRESHOLD, 128 * _MIB)


async def _serve(settings: Settings, ready_file: Path | None, say: Callable[[str], None]) -> None:
    stopping = _stop_on_signals(say)
    manager = Manager(settings)
    stopped = asyncio.ensure_future(stopping.wait())
    if not await _done_before(stopped, manager.start()):
        return
    try:
        for what, address in manager.addresses():
            say(f"{what:<10} {address}")
        if not manager.ready:
            say("kvcm waits for its index store")
        if await _done_before(stopped, manager.wait_ready()):
            if ready_file is not None:
                _write_ready_file(ready_file, manager)
            say("kvcm is ready")
            await stopped
    finally:
        stopped.cancel()
        await manager.stop()
    say("kvcm has stopped")


async def _done_before(stopped: asyncio.Future[Any], work: Coroutine[Any, Any, None]) -> bool:
    """Whether ``work`` came to its end, which may raise; cancelled when ``stopped`` is first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False
    await task
    return True


def _stop_on_signals(say: Callable[[str], None]) -> asyncio.Event:
    stopping = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        say(f"{number.name}: draining; once more stops at once")
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    return stopping


def _write_ready_file(path: Path, manager: Manager) -> None:
    """Appears whole or not at all, for scripts that wait for it."""
    document = {
        "pid": os.getpid(),
        "host": manager.settings.host,
        **{f"{name}_port": port for name, port in asdict(manager.ports).items()},
        "data_dir": str(manager.settings.data_dir),
    }
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(document) + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write ready file {path}: {error.strerror}") from None
