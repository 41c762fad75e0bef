"""``kvcm serve``: run a manager until a signal stops it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

# Before grpc is imported: its C core writes debugging notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import typer

from kvcm.cli.output import fail
from kvcm.cli.settings_flags import SettingsFlags
from kvcm.cli.spread import spread
from kvcm.core.errors import ConfigError, KvcmError
from kvcm.server import run


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve")(serve)


@spread(SettingsFlags)
def serve(
    flags: SettingsFlags,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Write ports and pid there (JSON) once it serves."),
    ] = None,
) -> None:
    """Run a manager. SIGTERM or SIGINT drains and stops it; a second one stops it at once.

    Settings come from these flags, then KVCM_… variables, then the --config file, then defaults.
    """
    try:
        settings = flags.settings()
        run.check(settings)
    except ConfigError as error:
        fail(str(error), 2)
    try:
        run.run(settings, ready_file=ready_file, say=typer.echo)
    except KvcmError as error:
        fail(str(error))
