"""``kvcm admin ceiling``: the hit rate beside the best possible one, and what would help."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from kvcm.cli.admin_common import JsonOption
from kvcm.cli.admin_http import HTTP_TARGET, HttpTargetOption, call
from kvcm.cli.output import one_line_errors, print_json, table

_COLUMNS = ("group", "instance", "window", "blocks", "hit rate", "ceiling", "missed", "advice")
_SHARE_MIN = 0.0005


class _Windows(StrEnum):
    QUARTER = "15m"
    HOUR = "1h"
    DAY = "24h"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ceiling")(ceiling)


def ceiling(
    target: HttpTargetOption = HTTP_TARGET,
    window: Annotated[
        _Windows, typer.Option(help="What to look back on; advice is best over a day.")
    ] = _Windows.DAY,
    as_json: JsonOption = False,
) -> None:
    """Hit rates beside the best possible ones: would more space, another policy or nothing help?

    Example: kvcm admin ceiling --window all
    """
    with one_line_errors():
        report = call("GET", target, "/v1/ceiling")
    if as_json:
        print_json(report)
        return
    wanted = None if window is _Windows.ALL else window.value
    table(
        "ceiling",
        _COLUMNS,
        (
            _row(scope, shown)
            for scope in report.get("scopes", [])
            for shown in scope["windows"]
            if wanted in (None, shown["window"])
        ),
        empty="no prefix lookup within a day",
    )
    if left := report.get("instances_without_windows"):
        typer.echo(f"{left:,} more instances count in their groups only")
    if dropped := report.get("uncounted_events"):
        typer.echo(f"{dropped:,} events were left out because too many waited")


def _row(scope: dict[str, Any], window: dict[str, Any]) -> tuple[object, ...]:
    return (
        scope["group"],
        scope["instance"] or "(all)",
        window["window"],
        window["blocks"],
        f"{window['hit_rate']:.1%}",
        f"{window['ceiling']:.1%}",
        _missed(window),
        window["advice"]["text"],
    )


def _missed(window: dict[str, Any]) -> str:
    """Shares of the blocks by cause, the largest first."""
    blocks = window["blocks"] or 1
    shares = sorted(((count / blocks, name) for name, count in window["misses"].items()))
    shown = [f"{n.replace('_', ' ')} {s:.1%}" for s, n in reversed(shares) if s >= _SHARE_MIN]
    about = "" if window["is_exact"] or not shown else "about "
    return about + ", ".join(shown)
