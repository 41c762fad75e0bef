"""The ``kvcm`` command. A subcommand is imported when it is asked for, not before.

So ``kvcm replay`` pays nothing for the manager, and a base install lists the commands that need
the server extra and says so when they are run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

import kvcm


class Lazy(NamedTuple):
    """A subcommand: the module that has it (``app`` or ``register``), and its one-line help."""

    module: str
    help: str


COMMANDS = {
    "serve": Lazy("kvcm.cli.serve", "Run a manager."),
    "config": Lazy("kvcm.cli.config", "Print the effective settings."),
    "demo": Lazy("kvcm.cli.demo", "Start a manager and replay a sample workload against it."),
    "admin": Lazy("kvcm.cli.admin", "Storages, groups, instances, usage, from the shell."),
    "top": Lazy("kvcm.cli.top", "Watch a manager: hit rates, space, storages, live."),
    "registry": Lazy("kvcm.cli.registry", "The registry's database: schema, move."),
    "index": Lazy("kvcm.cli.index", "Move the block index of a stopped manager."),
    "replay": Lazy("kvcm.cli.replay", "Drive a manager with a request trace."),
    "workload": Lazy("kvcm.cli.workload", "Write a synthetic request trace."),
}


class LazyGroup(TyperGroup):
    """Puts the real subcommand in the place of its stand-in when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As the base, after importing the command that ``args`` names."""
        name = args[0]
        if name in self.commands and name in COMMANDS:
            self.commands[name] = _load(name, COMMANDS[name])
        return super().resolve_command(ctx, args)


def _load(name: str, lazy: Lazy) -> Any:
    try:
        module = importlib.import_module(lazy.module)
    except ModuleNotFoundError as error:
        _missing(name, error.name or str(error))
    holder = typer.Typer()
    if hasattr(module, "register"):
        module.register(holder)
    else:
        holder.add_typer(module.app, name=name)
    return typer.main.get_group(holder).commands[name]


def _missing(name: str, module: str) -> NoReturn:
    typer.echo(
        f"error: kvcm {name} needs the module {module!r}, which is not installed; "
        "pip install 'kvcm[server]' brings it",
        err=True,
    )
    raise typer.Exit(2)


def _stand_in(name: str) -> Callable[[], None]:
    def stand_in() -> None:
        raise AssertionError(f"{name} is replaced before it runs")

    return stand_in


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcm {kvcm.__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The application with a stand-in for every subcommand there is."""
    app = typer.Typer(
        cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )

    @app.callback()
    def kvcm_command(
        version: Annotated[
            bool,
            typer.Option(
                "--version", help="Print the version.", callback=_show_version, is_eager=True
            ),
        ] = False,
    ) -> None:
        """The central metadata manager of KV cache for large-model inference."""

    for name, lazy in COMMANDS.items():
        if importlib.util.find_spec(lazy.module) is not None:
            app.command(name, help=lazy.help)(_stand_in(name))
    return app


def app_main() -> None:
    """Entry point of the ``kvcm`` command."""
    build_app()(prog_name="kvcm")


if __name__ == "__main__":
    app_main()
