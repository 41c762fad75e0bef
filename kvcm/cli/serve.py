"""``kvcm serve``: run a manager until a signal stops it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

# Before grpc is imported: its C core writes debugging notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import typer

from kvcm.cli import settings_flags as flags
from kvcm.core.errors import ConfigError, KvcmError
from kvcm.server import run


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve")(serve)


def serve(
    config: flags.Config = None,
    host: flags.Host = None,
    rpc_port: flags.RpcPort = None,
    http_port: flags.HttpPort = None,
    admin_rpc_port: flags.AdminRpcPort = None,
    admin_http_port: flags.AdminHttpPort = None,
    data_dir: flags.DataDir = None,
    registry_url: flags.RegistryUrl = None,
    index_url: flags.IndexUrl = None,
    bootstrap: flags.Bootstrap = None,
    log_level: flags.LogLevel = None,
    log_format: flags.LogFormat = None,
    assignments: flags.Set = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Write ports and pid there (JSON) once it serves."),
    ] = None,
) -> None:
    """Run a manager. SIGTERM or SIGINT drains and stops it; a second one stops it at once.

    Settings come from these flags, then KVCM_… variables, then the --config file, then defaults.
    """
    try:
        settings = flags.settings_from(
            config,
            assignments,
            host=host,
            rpc_port=rpc_port,
            http_port=http_port,
            admin_rpc_port=admin_rpc_port,
            admin_http_port=admin_http_port,
            data_dir=data_dir,
            registry_url=registry_url,
            index_url=index_url,
            bootstrap=bootstrap,
            log_level=log_level,
            log_format=log_format,
        )
        run.check(settings)
    except ConfigError as error:
        _fail(error, 2)
    try:
        run.run(settings, ready_file=ready_file, say=typer.echo)
    except KvcmError as error:
        _fail(error, 1)


def _fail(error: KvcmError, code: int) -> NoReturn:
    line = " ".join(str(error).split("\n"))
    typer.echo(f"error: {line}", err=True)
    raise typer.Exit(code) from None
