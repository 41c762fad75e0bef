"""``kvcm config``: the effective settings."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvcm.cli import settings_flags as flags
from kvcm.core.errors import ConfigError
from kvcm.server.settings import to_dict, to_toml


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("config")(config)


def config(
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
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of TOML.")] = False,
) -> None:
    """Print the effective settings, passwords hidden: what serve would run with."""
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
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(to_dict(settings), indent=2, ensure_ascii=False))
    else:
        typer.echo(to_toml(settings), nl=False)
