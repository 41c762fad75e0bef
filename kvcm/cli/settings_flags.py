"""The flags that set the manager's settings: all for ``serve`` and ``config``, some elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcm.core.errors import ConfigError
from kvcm.server.settings import Settings, load

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file; KVCM_CONFIG names one too.")
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.")]
RpcPort = Annotated[str | None, typer.Option("--rpc-port", help="Meta gRPC; 0 = any free port.")]
HttpPort = Annotated[str | None, typer.Option("--http-port", help="Meta HTTP; 0 = any.")]
AdminRpcPort = Annotated[str | None, typer.Option("--admin-rpc-port", help="Admin gRPC.")]
AdminHttpPort = Annotated[str | None, typer.Option("--admin-http-port", help="Admin HTTP.")]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", help="Folder of the embedded stores and the lock.")
]
RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry-url",
        help="sqlite:///PATH or postgresql://USER@HOST/DATABASE; default: in the data folder.",
    ),
]
IndexUrl = Annotated[
    str | None,
    typer.Option(
        "--index-url", help="rocksdb:PATH, valkey://… or memory:; default: in the data folder."
    ),
]
Bootstrap = Annotated[
    str | None,
    typer.Option("--bootstrap", help="File (JSON, TOML) with storages and groups to begin with."),
]
LogLevel = Annotated[
    str | None, typer.Option("--log-level", help="debug, info, warning, error or critical.")
]
LogFormat = Annotated[str | None, typer.Option("--log-format", help="text or json.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, as in kvcm config."),
]


def settings_from(config: Path | None, assignments: list[str] | None, **flags: Any) -> Settings:
    """The effective settings.

    Raises:
        ConfigError: one line that names what is wrong.
    """
    given: dict[str, Any] = {}
    for assignment in assignments or []:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: expected KEY=VALUE")
        given[key.strip()] = value
    given.update((key, value) for key, value in flags.items() if value is not None)
    return load(given, config=config)


@dataclass(frozen=True, slots=True)
class SettingsFlags:
    """All of them, for `kvcm.cli.spread`."""

    config: Config = None
    host: Host = None
    rpc_port: RpcPort = None
    http_port: HttpPort = None
    admin_rpc_port: AdminRpcPort = None
    admin_http_port: AdminHttpPort = None
    data_dir: DataDir = None
    registry_url: RegistryUrl = None
    index_url: IndexUrl = None
    bootstrap: Bootstrap = None
    log_level: LogLevel = None
    log_format: LogFormat = None
    assignments: Set = None

    def settings(self) -> Settings:
        """As `settings_from`."""
        return settings_from(**{field.name: getattr(self, field.name) for field in fields(self)})
