"""``kvcm top``: groups, instances and storages of a running manager, live."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, NoReturn, Protocol

import typer
from rich.live import Live

from kvcm.cli.admin_common import JsonOption
from kvcm.cli.admin_http import HTTP_TARGET, HttpTargetOption
from kvcm.cli.output import one_line_errors, out_console, print_json
from kvcm.cli.top_frame import WINDOWS, Frame, Sample, Wanted, frame
from kvcm.cli.top_source import Source
from kvcm.cli.top_view import Lost, View
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import InvalidArgument, KvcmError

_REDRAWS_PER_S = 1.0
"""Beside those when something changed: a terminal may have another size now."""


class Looks(Protocol):
    """What `Source` is to the loop."""

    url: str

    async def look(self) -> Sample: ...


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("top")(top)


def top(
    target: HttpTargetOption = HTTP_TARGET,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=3600.0, help="Seconds between looks.")
    ] = 2.0,
    window: Annotated[
        str, typer.Option(help="What hit rate and ceiling look back on: 15m, 1h or 24h.")
    ] = WINDOWS[0],
    group: Annotated[
        list[str] | None, typer.Option("--group", "-g", help="This group only; may be repeated.")
    ] = None,
    instance: Annotated[
        list[str] | None, typer.Option("--instance", help="This instance only; may be repeated.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Two looks, one interval apart; print once and end.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Groups, instances and storages, live: hit rates by their ceilings, space by its watermark.

    Rates are per second between the last two looks. Ctrl-C ends it. --json prints once.

    Example: kvcm top --target http://127.0.0.1:6492 --group default
    """
    wanted = Wanted(tuple(group or ()), tuple(instance or ()), window)
    with one_line_errors(target):
        if window not in WINDOWS:
            raise InvalidArgument(f"--window {window!r} is none of {', '.join(WINDOWS)}")
        if not once and not as_json:
            if not out_console().is_terminal:
                raise InvalidArgument("no terminal to draw on; give --once or --json")
            asyncio.run(_live(target, interval, wanted))
            return
        url, found = asyncio.run(_once(target, interval, wanted))
        if as_json:
            print_json({"target": url, **asdict(found)})
        else:
            out_console().print(View(url, found))


async def _once(target: str, interval_s: float, wanted: Wanted) -> tuple[str, Frame]:
    clock = SystemClock()
    source = Source(target, clock)
    try:
        before = await source.look()
        await clock.sleep(interval_s)
        return source.url, frame(before, await source.look(), wanted)
    finally:
        await source.close()


async def _live(target: str, interval_s: float, wanted: Wanted) -> None:
    """Until Ctrl-C or a signal to end; the terminal is left as it was."""
    clock = SystemClock()
    source = Source(target, clock)
    loop = asyncio.get_running_loop()
    view = View(source.url, None)
    with Live(view, console=out_console(), screen=True, refresh_per_second=_REDRAWS_PER_S) as live:
        watching = asyncio.ensure_future(
            watch(source, clock, interval_s, wanted, lambda shown: live.update(shown, refresh=True))
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, watching.cancel)
        try:
            await watching
        except asyncio.CancelledError:
            pass
        finally:
            await source.close()


async def watch(
    source: Looks, clock: Clock, interval_s: float, wanted: Wanted, show: Callable[[View], None]
) -> NoReturn:
    """Look and show for ever. A manager that does not answer is shown as lost, with the last frame
    there was, until it answers again."""
    before: Sample | None = None
    view = View(source.url, None)
    while True:
        began_s = clock.now()
        try:
            now = await source.look()
        except KvcmError as error:
            since_s = view.lost.since_s if view.lost else began_s
            view = View(source.url, view.frame, Lost(since_s, str(error) or type(error).__name__))
        else:
            view = View(source.url, frame(before, now, wanted))
            before = now
        show(view)
        await clock.sleep(interval_s)
