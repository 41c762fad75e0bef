"""``kvcm index``: move the block index of a stopped manager to another store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvcm.cli import settings_flags as flags
from kvcm.cli.output import err_console, fail, one_line_errors, out_console, print_json, table
from kvcm.cli.stopped import held
from kvcm.core.clock import SystemClock
from kvcm.core.errors import ConfigError
from kvcm.metaindex import copy
from kvcm.metaindex.copy import CopyReport, Space
from kvcm.metaindex.store import KVStore
from kvcm.registry import migrate
from kvcm.registry.database import shown
from kvcm.registry.migrate import SchemaState
from kvcm.registry.view import RegistryView
from kvcm.server import wiring
from kvcm.server.settings import Settings, without_secrets

app = typer.Typer(no_args_is_help=True, help="Move the block index of a stopped manager.")


@app.callback()
def index() -> None:
    """Move the block index of a stopped manager."""


@app.command("copy")
def copy_command(
    target_url: Annotated[str, typer.Option("--to", help="Index URL to copy to.")],
    source_url: Annotated[
        str | None, typer.Option("--from", help="Index URL to copy; default: that of the settings.")
    ] = None,
    config: flags.Config = None,
    data_dir: flags.DataDir = None,
    registry_url: flags.RegistryUrl = None,
    assignments: flags.Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a copy that was cut off.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Empty these instances in the target first.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Copy the index of a stopped manager to another store, and verify the copy.

    The registry stays where it is and says which instances there are. Then start the manager with
    the new --index-url, and delete the old index: it is out of date from that moment on.

    Exit code 0: copied and verified. 1: failed, run it again with --resume. 2: refused, nothing was
    copied.
    """
    try:
        given: dict[str, Any] = {"data_dir": data_dir, "registry_url": registry_url}
        source = flags.settings_from(config, assignments, **given, index_url=source_url)
        target = flags.settings_from(config, assignments, **given, index_url=target_url)
        _check(source, target, resume=resume, force=force)
    except ConfigError as error:
        fail(str(error), 2)
    with one_line_errors():
        try:
            with held(source.data_dir), _progress(quiet=quiet or as_json) as bar:
                report, unknown = asyncio.run(_copy(source, target, bar, resume, force))
        except ConfigError as error:
            fail(str(error), 2)
    _print(report, unknown, source, target, as_json=as_json)
    if report.problems:
        raise typer.Exit(1)


def _check(source: Settings, target: Settings, *, resume: bool, force: bool) -> None:
    if resume and force:
        raise ConfigError("--resume goes on with a copy and --force begins it anew; give one")
    if source.index_url == target.index_url:
        raise ConfigError(f"--from and --to are both {without_secrets(source.index_url)}")
    for flag, settings in (("--from", source), ("--to", target)):
        if settings.index_url.startswith("memory:"):
            raise ConfigError(f"{flag} memory: has no contents outside of a running manager")
    scheme, _, path = source.index_url.partition(":")
    if scheme == "rocksdb" and not Path(path).is_dir():
        raise ConfigError(f"--from {source.index_url}: there is no index")


async def _copy(
    source: Settings, target: Settings, bar: Bar, resume: bool, force: bool
) -> tuple[CopyReport, list[str]]:
    url = wiring.registry_url(source)
    if migrate.schema_status(url).state is SchemaState.EMPTY:
        raise ConfigError(f"the registry at {shown(url)} is empty: it knows no instances")
    clock = SystemClock()
    registry = wiring.build_registry(source, clock)
    await registry.open()
    try:
        async with (
            _opened(wiring.build_store(source, clock)) as old,
            _opened(wiring.build_store(target, clock)) as new,
        ):
            spaces = _spaces(registry.view)
            there = await new.spaces()
            if there and not resume and not force:
                raise ConfigError(
                    f"--to {without_secrets(target.index_url)} is not empty ({len(there)} "
                    "instances); --resume goes on with a copy that was cut off, --force begins "
                    "it anew"
                )
            known = {space.name for space in spaces}
            unknown = sorted(
                name.decode(errors="replace") for name in await old.spaces() if name not in known
            )
            if force:
                await copy.clear_index(new, spaces)
            epoch = await registry.next_epoch()
            return await copy.copy_index(old, new, spaces, epoch, bar), unknown
    finally:
        await registry.close()


@asynccontextmanager
async def _opened(store: KVStore) -> AsyncIterator[KVStore]:
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def _spaces(view: RegistryView) -> list[Space]:
    instances = [*view.instances.values(), *view.closing]
    return [Space(i.uid.encode(), i.shard_count) for i in instances]


class Bar:
    """Shows a copy's progress, from the first step on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("copying", total=None, records=0)

    def __call__(self, now: copy.Progress) -> None:
        self._progress.start()
        self._progress.update(
            self._task, completed=now.shards_done, total=now.shards, records=now.records
        )


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Bar]:
    console = err_console()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("shards, {task.fields[records]:,} records"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )
    try:
        yield Bar(progress)
    finally:
        progress.stop()


def _print(
    report: CopyReport, unknown: list[str], source: Settings, target: Settings, *, as_json: bool
) -> None:
    urls = {
        "from": without_secrets(source.index_url),
        "to": without_secrets(target.index_url),
    }
    if as_json:
        print_json({**urls, **asdict(report), "unknown_instances": unknown})
        return
    table(
        f"{urls['from']} -> {urls['to']}",
        ["what", "count"],
        [
            ("instances", report.spaces),
            ("shards", report.shards),
            *report.records.items(),
            ("counters", report.counters),
            ("written", report.written),
            ("removed", report.removed),
        ],
    )
    say = out_console().print
    for name in unknown:
        say(f"left out: records of {name}, an instance that the registry does not know")
    for what in report.damaged:
        say(f"left out, damaged: {what}")
    for what in report.problems:
        say(f"problem: {what}")
    say("the copy differs" if report.problems else "verified: records and counters agree")
