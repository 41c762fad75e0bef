"""``kvcm admin`` snapshot, account, health, metrics, logger: the manager itself."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvcm.cli.admin_common import (
    DEFAULT_TARGET,
    JsonOption,
    TargetOption,
    YesOption,
    admin,
    confirm,
    done,
    read_text,
)
from kvcm.cli.output import one_line_errors, print_json, table
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.types import AccountRole

snapshot = typer.Typer(no_args_is_help=True, help="The whole configuration as one JSON file.")
account = typer.Typer(no_args_is_help=True, help="Accounts.")


class Role(StrEnum):
    """Account roles by name."""

    USER = "user"
    ADMIN = "admin"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(snapshot, name="snapshot")
    app.add_typer(account, name="account")
    app.command("health")(health)
    app.command("metrics")(metrics)
    app.command("logger")(logger)


@snapshot.command("export")
def export_snapshot(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
) -> None:
    """Write the registry as JSON. It holds password hashes: the file is made for you alone.

    Example: kvcm admin snapshot export -o registry.json
    """
    with admin(target) as client:
        text = client.gen_config_snapshot()
    if output is None:
        sys.stdout.write(text + "\n")
        return
    with one_line_errors():
        _write_private(output, text)
    done(f"wrote {output}", False)


@snapshot.command("import")
def import_snapshot(
    file: Annotated[Path, typer.Argument(help="What `snapshot export` wrote; - is stdin.")],
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Replace the whole registry. Refused when an instance that holds blocks would go.

    Example: kvcm admin snapshot import registry.json
    """
    with admin(target) as client:
        text = read_text(file)
        confirm("Replace all storages, groups, instances and accounts?", yes)
        client.load_config_snapshot(text)
    done(f"loaded {file}", as_json)


@account.command("list")
def list_accounts(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """All accounts.

    Example: kvcm admin account list
    """
    with admin(target) as client:
        found = client.list_account()
    rows = [(item.user_name, item.role.name.lower()) for item in found]
    if as_json:
        print_json([{"user_name": name, "role": role} for name, role in rows])
        return
    table("accounts", ("user", "role"), rows)


@account.command("add")
def add_account(
    user_name: Annotated[str, typer.Argument(help="The account's name.")],
    role: Annotated[Role, typer.Option(help="What it may do.")] = Role.USER,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password from standard input.")
    ] = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Add an account. The password is asked for, never an argument others could see.

    Example: kvcm admin account add alice --role admin
    """
    with admin(target) as client:
        if password_stdin:
            password = sys.stdin.readline().rstrip("\r\n")
        elif sys.stdin.isatty():
            password = typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
        else:
            raise InvalidArgument("without a terminal give --password-stdin")
        client.add_account(user_name, password, AccountRole[role.name])
    done(f"added account {user_name}", as_json)


@account.command("delete")
def delete_account(
    user_name: Annotated[str, typer.Argument(help="The account's name.")],
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Delete an account.

    Example: kvcm admin account delete alice
    """
    with admin(target) as client:
        confirm(f"Delete account {user_name}?", yes)
        client.delete_account(user_name)
    done(f"deleted account {user_name}", as_json)


def health(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """Whether the manager is well and who leads; exit code 1 when it is not well.

    Example: kvcm admin health --json
    """
    with admin(target) as client:
        found = client.check_health()
        cluster = client.get_manager_cluster_info()
    if as_json:
        print_json(dataclasses.asdict(found) | dataclasses.asdict(cluster))
    else:
        table(
            f"manager at {target}",
            ("healthy", "leader", "node", "led by"),
            [(found.is_health, found.is_leader, cluster.self_node_id, cluster.leader_node_id)],
        )
    if not found.is_health:
        raise typer.Exit(1)


def metrics(
    name: Annotated[str, typer.Argument(help="Only metrics whose name has this in it.")] = "",
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """The manager's metrics at this moment.

    Example: kvcm admin metrics hit
    """
    with admin(target) as client:
        found = client.get_metrics()
    chosen = [metric for metric in found.metrics if name in metric.name]
    if as_json:
        print_json(
            {
                "timestamp_ms": found.timestamp_ms,
                "metrics": [
                    {"name": m.name, "value": m.value, "tags": dict(m.tags)} for m in chosen
                ],
            }
        )
        return
    table(
        "metrics",
        ("name", "tags", "value"),
        (
            (
                m.name,
                ", ".join(f"{k}={v}" for k, v in m.tags.items()),
                "" if m.value is None else m.value,
            )
            for m in chosen
        ),
    )


def logger(
    level: Annotated[str, typer.Argument(help="debug, info, warning, error or critical.")],
    module: Annotated[str, typer.Argument(help="Module, as kvcm.cache; default: all.")] = "",
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Set a log level of the running manager.

    Example: kvcm admin logger debug kvcm.cache
    """
    with admin(target) as client:
        client.update_logger(module, level)
    done(f"{module or 'all modules'} log from {level} on", as_json)


def _write_private(path: Path, text: str) -> None:
    try:
        json.loads(text)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except ValueError as error:
        raise KvcmError(f"the manager's snapshot is not JSON: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or error}") from error
