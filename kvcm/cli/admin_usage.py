"""``kvcm admin usage``: who holds how much, what limits it, what goes next, what was refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from kvcm.cli.admin_common import JsonOption
from kvcm.cli.admin_http import HTTP_TARGET, HttpTargetOption, call
from kvcm.cli.output import human_bytes, one_line_errors, print_json, table

_COLUMNS = (
    "name",
    "limit",
    "mark",
    "used",
    "being written",
    "serving",
    "dead",
    "trash",
    "blocks",
    "next eviction",
    "refused or cut",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("usage")(usage)


def usage(
    target: HttpTargetOption = HTTP_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Space by group, storage type, instance and storage: used, allowed, next to go, refused.

    Example: kvcm admin usage --target http://127.0.0.1:6492
    """
    with one_line_errors():
        report = call("GET", target, "/v1/usage")
    if as_json:
        print_json(report)
        return
    for title in ("groups", "group_types", "instances", "storages"):
        rows = [_row(name, entry) for name, entry in _named(report.get(title))]
        table(title.replace("_", " "), _COLUMNS, rows)


def _named(entries: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(entries, dict):
        yield from sorted(entries.items())
    for entry in entries if isinstance(entries, list) else ():
        yield f"{entry.get('group')} on {entry.get('storage_type')}", entry


def _row(name: str, entry: dict[str, Any]) -> tuple[object, ...]:
    limit = entry.get("limit") or {}
    in_blocks = limit.get("unit") == "blocks"
    shown = _blocks if in_blocks else human_bytes
    blocks = _int(entry, "serving_blocks") + _int(entry, "open_blocks")
    return (
        name,
        _limit(limit, shown),
        _mark(limit, shown),
        human_bytes(_int(entry, "counted_bytes")),
        human_bytes(_int(entry, "open_bytes")),
        human_bytes(_int(entry, "serving_bytes")),
        human_bytes(_int(entry, "dead_bytes")),
        human_bytes(_int(entry, "trash_bytes")),
        blocks,
        _next(entry.get("next_eviction"), shown),
        ", ".join(f"{k} {v}" for k, v in sorted((entry.get("refusals") or {}).items())),
    )


def _limit(limit: dict[str, Any], shown: Any) -> str:
    capacity, effective = limit.get("capacity"), limit.get("effective")
    if effective is not None and effective != capacity:
        promised = "none" if capacity is None else shown(capacity)
        return f"{promised} (now {shown(effective)})"
    return "none" if capacity is None else str(shown(capacity))


def _mark(limit: dict[str, Any], shown: Any) -> str:
    if limit.get("high") is None:
        return "none"
    return f"{shown(limit['high'])} to {shown(limit['low'])}"


def _next(ahead: Any, shown: Any) -> str:
    if not isinstance(ahead, dict) or not ahead["instances"]:
        return "nothing"
    of = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in sorted(ahead["instances"].items())
    )
    return f"{shown(ahead['planned'])}" + (f": {of}" if of else "")


def _blocks(count: int) -> str:
    return f"{count:,} blocks"


def _int(entry: dict[str, Any], name: str) -> int:
    return int(entry.get(name, 0))
