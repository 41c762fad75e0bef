"""Wait for a claim to become true, instead of sleeping for a guessed time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, overload

T = TypeVar("T")
TIMEOUT_S = 10.0
INTERVAL_S = 0.01


@overload
async def eventually(
    probe: Callable[[], Coroutine[Any, Any, T]],
    *,
    timeout: float = TIMEOUT_S,
    interval: float = INTERVAL_S,
    message: str = "",
) -> T: ...


@overload
async def eventually(
    probe: Callable[[], T],
    *,
    timeout: float = TIMEOUT_S,
    interval: float = INTERVAL_S,
    message: str = "",
) -> T: ...


async def eventually(
    probe: Callable[[], Any],
    *,
    timeout: float = TIMEOUT_S,
    interval: float = INTERVAL_S,
    message: str = "",
) -> Any:
    """Call ``probe`` (plain or async) until its answer is true; return that answer.

    An AssertionError of the probe counts as "not yet"; any other error is raised at once.

    Args:
        timeout: seconds of real time before giving up; the probe runs at least once.
        interval: seconds between two calls.

    Raises:
        AssertionError: it did not become true in time; shows ``message`` and the last answer.
    """
    deadline = time.monotonic() + timeout
    while True:
        last: object
        try:
            answer = probe()
            value = await answer if inspect.isawaitable(answer) else answer
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise _gave_up(message, timeout, last)
        await asyncio.sleep(interval)


def eventually_sync(
    probe: Callable[[], T],
    *,
    timeout: float = TIMEOUT_S,
    interval: float = INTERVAL_S,
    message: str = "",
) -> T:
    """`eventually` for code without an event loop; blocks the calling thread."""
    deadline = time.monotonic() + timeout
    while True:
        last: object
        try:
            value = probe()
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() >= deadline:
            raise _gave_up(message, timeout, last)
        time.sleep(interval)


def _gave_up(message: str, timeout: float, last: object) -> AssertionError:
    what = message or "the claim did not become true"
    error = AssertionError(f"{what} (waited {timeout} s; last: {last!r})")
    if isinstance(last, AssertionError):
        error.__cause__ = last
    return error


def last(seconds: float) -> None:
    """Let a fault or a load last for ``seconds`` of real time, where its length is the test's."""
    time.sleep(seconds)
