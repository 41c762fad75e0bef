"""``kvcm registry``: the registry's database, its schema and its move."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcm.cli import settings_flags as flags
from kvcm.cli.output import fail, out_console, print_json, table
from kvcm.cli.stopped import held
from kvcm.core.errors import ConfigError
from kvcm.registry import database, migrate
from kvcm.registry.copy import copy_registry
from kvcm.registry.migrate import SchemaState
from kvcm.server import wiring

app = typer.Typer(no_args_is_help=True, help="The registry's database: schema, move.")

_CODES = {
    SchemaState.CURRENT: 0,
    SchemaState.BEHIND: 1,
    SchemaState.EMPTY: 1,
    SchemaState.AHEAD: 2,
}
_WORDS = {
    SchemaState.CURRENT: "current",
    SchemaState.BEHIND: "behind: stop all managers and run `kvcm registry migrate`",
    SchemaState.EMPTY: "empty: `kvcm serve` or `kvcm registry migrate` makes the schema",
    SchemaState.AHEAD: "ahead: made by a newer kvcm; run that version",
}

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command("status")
def status(
    config: flags.Config = None,
    data_dir: flags.DataDir = None,
    registry_url: flags.RegistryUrl = None,
    assignments: flags.Set = None,
    as_json: AsJson = False,
) -> None:
    """Print the schema's revision and the newest one; changes nothing.

    Exit code 0: current. 1: behind, or empty. 2: ahead, or it cannot be read.
    """
    url = _url(config, data_dir, registry_url, assignments)
    try:
        found = migrate.schema_status(url)
    except ConfigError as error:
        fail(str(error), 2)
    if as_json:
        print_json(
            {
                "registry_url": database.shown(url),
                "state": found.state.value,
                "revision": found.revision,
                "newest": found.head,
            }
        )
    else:
        say = out_console().print
        say(f"registry  {database.shown(url)}")
        say(f"revision  {found.revision or 'none'}")
        say(f"newest    {found.head}")
        say(f"state     {_WORDS[found.state]}")
    raise typer.Exit(_CODES[found.state])


@app.command("migrate")
def migrate_command(
    config: flags.Config = None,
    data_dir: flags.DataDir = None,
    registry_url: flags.RegistryUrl = None,
    assignments: flags.Set = None,
    to: Annotated[
        str, typer.Option("--to", help="Revision to move to; an older one drops what it lacks.")
    ] = "head",
    as_json: AsJson = False,
) -> None:
    """Bring the schema to the newest revision, in one transaction. Stop all managers first.

    Exit code 0: done, or nothing to do. 2: refused or failed, nothing was changed.
    """
    url = _url(config, data_dir, registry_url, assignments)
    try:
        before, after = migrate.migrate_database(url, to)
    except ConfigError as error:
        fail(str(error), 2)
    if as_json:
        print_json({"registry_url": database.shown(url), "before": before, "after": after})
    elif before == after:
        out_console().print(f"nothing to do: the schema is at revision {after or 'none'}")
    else:
        out_console().print(f"the schema went from {before or 'none'} to {after or 'none'}")


@app.command("copy")
def copy_command(
    target_url: Annotated[str, typer.Option("--to", help="URL of an empty database.")],
    source_url: Annotated[
        str | None, typer.Option("--from", help="Registry to copy; default: that of the settings.")
    ] = None,
    config: flags.Config = None,
    data_dir: flags.DataDir = None,
    assignments: flags.Set = None,
    as_json: AsJson = False,
) -> None:
    """Copy the registry of stopped managers to an empty database, whole: blocks stay known.

    Then start the manager with the new --registry-url, and never again with the old one: both
    would give the same epochs and uids.

    Exit code 0: copied. 2: refused or failed, the target is as before.
    """
    source = _url(config, data_dir, source_url, assignments)
    target = _url(config, data_dir, target_url, assignments)
    try:
        with held(flags.settings_from(config, assignments, data_dir=data_dir).data_dir):
            counts = copy_registry(source, target)
    except ConfigError as error:
        fail(str(error), 2)
    if as_json:
        print_json({"from": database.shown(source), "to": database.shown(target), "rows": counts})
    else:
        table(
            f"{database.shown(source)} -> {database.shown(target)}",
            ["table", "rows"],
            list(counts.items()),
        )


def _url(
    config: Path | None,
    data_dir: str | None,
    registry_url: str | None,
    assignments: list[str] | None,
) -> str:
    try:
        settings = flags.settings_from(
            config, assignments, data_dir=data_dir, registry_url=registry_url
        )
        return wiring.registry_url(settings)
    except ConfigError as error:
        fail(str(error), 2)
