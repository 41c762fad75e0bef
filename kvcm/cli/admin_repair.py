"""``kvcm admin fsck``: hold records, counters and files of a running manager against each other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcm.cli.admin_common import JsonOption
from kvcm.cli.admin_http import HTTP_TARGET, HttpTargetOption, json_of, request
from kvcm.cli.output import err_console, fail, human_bytes, print_json, table
from kvcm.core.errors import KvcmError

PROBLEMS = 1
NOT_RUN = 2
_POLL_S = 0.2


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fsck")(fsck)


def fsck(
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is found.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Mend although it takes more than 5 % of a storage.")
    ] = False,
    instance: Annotated[str, typer.Option(help="Only this instance (id or uid).")] = "",
    storage: Annotated[str, typer.Option(help="Only files on this storage.")] = "",
    target: HttpTargetOption = HTTP_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Look for damage in index and storages, while the manager serves; report, or mend it.

    Exit code 0: all is well; 1: damage was found; 2: it could not look everywhere.

    Example: kvcm admin fsck --fix
    """
    asked = {"fix": fix, "force": force, "instance": instance, "storage": storage}
    try:
        report = _run(target, asked, quiet=as_json)
    except KvcmError as error:
        fail(str(error), NOT_RUN)
    except KeyboardInterrupt:
        _stop(target)
        fail("interrupted: the run was stopped", 130)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report["errors"]:
        raise typer.Exit(NOT_RUN)
    if not report["clean"]:
        raise typer.Exit(PROBLEMS)


def _run(target: str, asked: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Start a run and wait for its end."""
    _ask("POST", target, asked)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err_console(),
        transient=True,
        disable=quiet or not err_console().is_terminal,
    )
    pause = threading.Event()
    with progress:
        task = progress.add_task("waiting", total=None)
        while True:
            answer = _ask("GET", target)
            report: dict[str, Any] = answer["report"]
            progress.update(
                task,
                description=report["phase"],
                completed=report["done"],
                total=report["total"] or None,
            )
            if not answer["running"]:
                return report
            pause.wait(_POLL_S)


def _ask(method: str, target: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    reply = request(method, target, "/v1/fsck", body=body)
    value = json_of(reply)
    if reply.status_code in (200, 202) and isinstance(value, dict) and "report" in value:
        return value
    raise KvcmError(f"{reply.url}: {_message(value) or f'HTTP status {reply.status_code}'}")


def _message(value: Any) -> str:
    try:
        return str(value["header"]["status"]["message"])
    except (KeyError, TypeError):
        return ""


def _stop(target: str) -> None:
    try:
        _ask("DELETE", target)
    except KvcmError as error:
        err_console().print(f"the run goes on: {error}")


def _show(report: Mapping[str, Any]) -> None:
    mended = bool(report["fix"])
    table(
        "repair" if mended else "dry run",
        ("kind", "found", "mended", "bytes", "for example"),
        (
            (kind, n["found"], n["fixed"], human_bytes(n["bytes"]), (n["examples"] or [""])[0])
            for kind, n in sorted(report["kinds"].items())
        ),
        empty=f"nothing is wrong ({report['done']:,} records and files, {report['seconds']:.1f} s)",
    )
    console = err_console()
    for name, storage in sorted(report["storages"].items()):
        for why in storage["stopped"]:
            text = f"storage {name}: {why}: nothing of that was mended; --force does it"
            console.print(text, soft_wrap=True)
        if storage["foreign"]:
            text = f"storage {name}: files of another history, left: {storage['foreign']}"
            console.print(text, soft_wrap=True)
        if storage["too_young"]:
            text = f"storage {name}: files too young to be judged: {storage['too_young']}"
            console.print(text, soft_wrap=True)
    for error in report["errors"]:
        console.print(f"not looked at or not mended: {error}", soft_wrap=True)
    if not mended and report["kinds"]:
        text = "nothing was changed; --fix mends it, above 5 % of a storage only with --force"
        console.print(text, soft_wrap=True)
