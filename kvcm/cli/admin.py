"""``kvcm admin``: storages, groups, instances, usage, cache, snapshots, accounts of a manager."""

from __future__ import annotations

import typer

from kvcm.cli import (
    admin_cache,
    admin_ceiling,
    admin_groups,
    admin_instances,
    admin_manager,
    admin_repair,
    admin_space,
    admin_storages,
    admin_usage,
)

HELP = """Look at a manager and change what it is configured with.

Exit codes: 0 done; 1 refused or failed, and one line on standard error says why; 2 a wrong
command line; 130 interrupted.
"""


def register(app: typer.Typer) -> None:
    """Add the command group to the application."""
    admin = typer.Typer(no_args_is_help=True, help=HELP)
    for part in (
        admin_storages,
        admin_groups,
        admin_instances,
        admin_cache,
        admin_space,
        admin_manager,
        admin_repair,
        admin_usage,
        admin_ceiling,
    ):
        part.register(admin)
    app.add_typer(admin, name="admin")
