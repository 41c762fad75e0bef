"""``kvcm registry``: the schema of the registry's database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcm.cli import settings_flags as flags
from kvcm.cli.output import fail, out_console, print_json
from kvcm.core.errors import ConfigError
from kvcm.registry import database, migrate
from kvcm.registry.migrate import SchemaState
from kvcm.server import wiring

app = typer.Typer(no_args_is_help=True, help="The schema of the registry's database.")

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
