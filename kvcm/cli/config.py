"""``kvcm config``: the effective settings."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcm.cli.output import fail, print_json
from kvcm.cli.settings_flags import SettingsFlags
from kvcm.cli.spread import spread
from kvcm.core.errors import ConfigError
from kvcm.server.settings import to_dict, to_toml


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("config")(config)


@spread(SettingsFlags)
def config(
    flags: SettingsFlags,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of TOML.")] = False,
) -> None:
    """Print the effective settings, passwords hidden: what serve would run with."""
    try:
        settings = flags.settings()
    except ConfigError as error:
        fail(str(error), 2)
    if as_json:
        print_json(to_dict(settings))
    else:
        typer.echo(to_toml(settings), nl=False)
