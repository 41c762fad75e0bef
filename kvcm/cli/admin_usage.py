"""``kvcm admin usage``: who holds how much, what limits it, what goes next, what was refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import typer

from kvcm.cli.admin_common import HTTP_TARGET, TIMEOUT_S, HttpTargetOption, JsonOption, http_address
from kvcm.cli.output import human_bytes, one_line_errors, print_json, table
from kvcm.core.errors import InvalidArgument, KvcmError, OutcomeUnknown, Unavailable

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
    address = http_address(target)
    with one_line_errors(address):
        report = _get_json(f"{address}/v1/usage")
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
    if not isinstance(ahead, dict):
        return "nothing"
    of = ", ".join(
        f"{name} {human_bytes(size)}" for name, size in sorted(ahead["instances"].items())
    )
    return f"{shown(ahead['planned'])}" + (f": {of}" if of else "")


def _blocks(count: int) -> str:
    return f"{count:,} blocks"


def _get_json(url: str) -> dict[str, Any]:
    """GET a JSON object.

    Raises:
        KvcmError: no connection, no 200, or no object.
    """
    try:
        reply = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgument(f"{url}: {error}") from error
    except httpx.ConnectError as error:
        raise Unavailable(str(error)) from error
    except httpx.RemoteProtocolError as error:
        raise InvalidArgument(f"{url}: no HTTP: {error}; the port of gRPC?") from error
    except httpx.HTTPError as error:
        raise OutcomeUnknown(f"{url}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise KvcmError(f"{url}: HTTP status {reply.status_code}")
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise KvcmError(f"{url}: no JSON object: not a KV cache manager's admin port?")
    return value


def _int(entry: dict[str, Any], name: str) -> int:
    return int(entry.get(name, 0))
