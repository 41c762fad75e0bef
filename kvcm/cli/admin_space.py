"""``kvcm admin`` trash, removals: what is being freed."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcm.cli.admin_common import JsonOption, done
from kvcm.cli.admin_http import HTTP_TARGET, HttpTargetOption, call, time_of
from kvcm.cli.output import human_bytes, one_line_errors, print_json, table

trash = typer.Typer(help="Files that wait to be deleted.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(trash, name="trash")
    app.command("removals")(removals)


@trash.callback(invoke_without_command=True)
def show_trash(
    context: typer.Context, target: HttpTargetOption = HTTP_TARGET, as_json: JsonOption = False
) -> None:
    """Files that wait to be deleted, by storage, and those that cannot be.

    Example: kvcm admin trash --json
    """
    if context.invoked_subcommand is not None:
        return
    with one_line_errors():
        report = call("GET", target, "/v1/trash")
    if as_json:
        print_json(report)
        return
    storages = report.get("storages", [])
    table(
        "trash",
        ("storage", "files", "bytes", "failing", "dead letters", "tries", "since", "last error"),
        (
            (
                entry["storage"],
                entry["objects"] + entry["second_delete_objects"],
                human_bytes(entry["bytes"]),
                entry["failing"],
                entry["dead_letters"],
                entry["tries"],
                time_of(entry["since"]),
                entry["error"],
            )
            for entry in storages
        ),
    )
    letters = [(entry["storage"], x) for entry in storages for x in entry["letters"]]
    if letters:
        table(
            "dead letters",
            ("storage", "instance", "files", "bytes", "tries", "since", "last error"),
            (
                (
                    storage,
                    letter["instance"],
                    letter["objects"],
                    human_bytes(letter["bytes"]),
                    letter["tries"],
                    time_of(letter["since"]),
                    letter["error"],
                )
                for storage, letter in letters
            ),
        )


@trash.command("retry")
def retry_trash(
    storage: Annotated[str | None, typer.Option(help="Only files of this storage.")] = None,
    target: HttpTargetOption = HTTP_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Try now to delete what could not be deleted.

    Example: kvcm admin trash retry --storage nfs_01
    """
    with one_line_errors():
        params = {} if storage is None else {"storage": storage}
        count = int(call("POST", target, "/v1/trash/retry", **params).get("retried", 0))
    done(f"{count:,} deletes are tried again", as_json)


def removals(target: HttpTargetOption = HTTP_TARGET, as_json: JsonOption = False) -> None:
    """Trims and removed instances whose space is not all free yet.

    Example: kvcm admin removals
    """
    with one_line_errors():
        report = call("GET", target, "/v1/removals")
    if as_json:
        print_json(report)
        return
    table(
        "removals",
        ("what", "instance", "uid", "since", "extents", "blocks", "bytes", "in trash"),
        (
            (
                entry["what"],
                entry["instance"],
                entry["uid"],
                time_of(entry["since"]),
                *(
                    (entry["extents"], entry["blocks"], human_bytes(entry["bytes"]))
                    if entry["is_counted"]
                    else ("counting", "", "")
                ),
                human_bytes(entry["trash_bytes"]),
            )
            for entry in report.get("removals", [])
        ),
    )
