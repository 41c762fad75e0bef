"""``kvcm replay``: drive a manager with a request trace, bytes included."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

# Before grpc is imported, here and in the engines: its C core writes notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Mooncake's library notes there, step by step, how it connects.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kvcm.cli.admin_common import DEFAULT_TARGET as ADMIN_TARGET
from kvcm.cli.admin_common import TIMEOUT_S, parse_bytes
from kvcm.cli.output import err_console, fail, one_line_errors, out_console, print_json
from kvcm.cli.replay_report import print_report
from kvcm.cli.replay_storages import REPLAY_GROUP, parse_storage, prepare
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument
from kvcm.optimizer.acks import AckHeader, AckWriter, read_acks
from kvcm.optimizer.counters import Counters, as_report
from kvcm.optimizer.fleet import Fleet, Outcome, ReplayPlan
from kvcm.optimizer.session import check_acks, fingerprint, spec_names
from kvcm.optimizer.session import register as register_plan
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS, Trace, ceiling, read_trace

DEFAULT_TARGET = "grpc://127.0.0.1:6381"
_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("replay")(replay)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A finished replay: its machine form, and whether nothing went wrong."""

    report: dict[str, Any]
    exit_code: int


def replay(
    trace: Annotated[
        Path | None, typer.Argument(help="Trace file of the Mooncake format, plain or gzip.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            "-t",
            help=f"grpc://host:port or http://host:port of the meta service; may be repeated. "
            f"[default: {DEFAULT_TARGET}]",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Engine processes.")] = 1,
    speed: Annotated[
        str, typer.Option(help="recorded, a factor such as x10, or max: flat out.")
    ] = "max",
    block_bytes: Annotated[int, typer.Option(min=1, help="Bytes of each spec of a block.")] = 4096,
    specs: Annotated[int, typer.Option(min=1, max=64, help="Specs (tp0, tp1, …) of a block.")] = 1,
    instance: Annotated[
        str | None,
        typer.Option(help="Instance id. [default: replay-<name of the trace>]", show_default=False),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help=f"Instance group. [default: default; {REPLAY_GROUP} with --storage]",
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            "--storage",
            "-s",
            help="Storage to replay on, added if it is not there: file:///path, "
            "hf3fs:///mountpoint, mooncake://host:port, or NAME=... of these; may be repeated. A "
            "group that is not there is made with them as candidates.",
        ),
    ] = None,
    capacity: Annotated[str, typer.Option(help="Bytes of a group made by --storage.")] = "30GB",
    admin_target: Annotated[
        str, typer.Option(help="Address of the admin service, for --storage.")
    ] = ADMIN_TARGET,
    skip: Annotated[int, typer.Option(min=0, help="Rows to leave out at the start.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to replay at most.")] = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens a block of the trace.")
    ] = TRACE_BLOCK_TOKENS,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Count and skip bad rows instead of stopping.")
    ] = False,
    verify: Annotated[bool, typer.Option(help="Read every hit and compare its bytes.")] = True,
    outage: Annotated[
        float, typer.Option(min=0, help="Seconds a call is tried again while no manager answers.")
    ] = 30.0,
    call_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one call.")] = 10.0,
    transfer_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds a storage may take for up to 64 MiB of blocks."),
    ] = 30.0,
    write_timeout: Annotated[
        int, typer.Option(min=0, help="Seconds a write session may last; 0: the manager decides.")
    ] = 0,
    salt: Annotated[
        str, typer.Option(help="Makes the bytes differ from those of replays with another salt.")
    ] = "",
    acks: Annotated[
        Path | None, typer.Option(help="Record the acknowledged keys here (the file is replaced).")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check-acks", help="No replay: check that every key of this file is still right."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Replay a request trace against a manager, as inference engines would.

    Every engine looks up the prompt's blocks, reads the hits and compares their bytes, asks to
    write the rest, writes, and finishes with what succeeded. Ends with 1 when a byte was wrong or
    a request failed.
    """
    targets = target or [DEFAULT_TARGET]
    with one_line_errors():
        if check is not None:
            if trace is not None:
                raise InvalidArgument("--check-acks takes no trace")
            _check(targets, check, call_timeout, as_json)
            return
        if trace is None:
            raise InvalidArgument("a trace file is needed (kvcm workload makes one)")
        name = instance if instance is not None else f"replay-{trace.name.partition('.')[0]}"
        plan = ReplayPlan(
            trace=str(trace),
            targets=targets,
            instance=name,
            fingerprint=fingerprint(name, block_bytes, salt),
            spec_names=spec_names(specs),
            block_bytes=block_bytes,
            block_tokens=block_size,
            lenient=lenient,
            skip=skip,
            limit=limit,
            speed=parse_speed(speed),
            verify=verify,
            outage_s=outage,
            write_timeout_s=write_timeout,
            call_timeout_s=call_timeout,
            transfer_timeout_s=transfer_timeout,
            acks=None if acks is None else str(acks),
        )
        if group is None:
            group = REPLAY_GROUP if storage else "default"
        prepared = None
        if storage:
            prepared = partial(_prepare, storage, group, capacity, admin_target)
        done = run_replay(plan, group, workers, prepared)
        if as_json:
            print_json(done.report)
        else:
            title = f"{trace.name} on {', '.join(targets)}, instance {name}"
            print_report(out_console(), done.report, title=title)
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def _prepare(storages: Sequence[str], group: str, capacity: str, admin_target: str) -> None:
    wanted = [parse_storage(text) for text in storages]
    size = parse_bytes(capacity)
    with AdminClient(admin_target, timeout=TIMEOUT_S) as client:
        for note in prepare(client, wanted, group, size):
            err_console().print(note, soft_wrap=True)


def parse_speed(text: str) -> float | None:
    """A factor on the recorded times; None = flat out.

    Raises:
        InvalidArgument: none of ``max``, ``recorded``, ``x10``, ``10``.
    """
    if text == "max":
        return None
    if text == "recorded":
        return 1.0
    try:
        factor = float(text.removeprefix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise InvalidArgument(f"speed: {text!r} is none of max, recorded, or a factor such as x10")
    return factor


def run_replay(
    plan: ReplayPlan, group: str, workers: int, prepared: Callable[[], None] | None = None
) -> Replayed:
    """Register the instance, run the engines, show progress on standard error.

    Args:
        prepared: makes what the replay needs, once the trace turns out to be good.

    Raises:
        KvcmError: the trace is bad or empty, or no manager takes the instance.
    """
    read = read_trace(
        plan.trace,
        block_size=plan.block_tokens,
        lenient=plan.lenient,
        skip=plan.skip,
        limit=plan.limit,
    )
    if not read.rows:
        raise InvalidArgument(f"trace {plan.trace}: no requests to replay")
    if prepared is not None:
        prepared()
    plan = msgspec.structs.replace(plan, storage_configs=register_plan(plan, group))
    if plan.acks is not None:
        header = AckHeader(
            plan.instance,
            plan.fingerprint,
            plan.spec_names,
            plan.block_bytes,
            plan.storage_configs,
        )
        AckWriter.begin(plan.acks, header)
    outcome = _run_with_progress(plan, workers, len(read.rows))
    return _replayed(plan, workers, read, outcome)


def _run_with_progress(plan: ReplayPlan, workers: int, requests: int) -> Outcome:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = err_console()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=requests, rate="")

        def show(counters: Counters) -> None:
            rate = f"hit rate {counters.hit_rate:.3f}"
            if counters.blocks_wrong:
                rate += f", {counters.blocks_wrong} WRONG"
            progress.update(task, completed=counters.requests, rate=rate)

        return Fleet(plan, workers).run(show)


def _replayed(plan: ReplayPlan, workers: int, read: Trace, outcome: Outcome) -> Replayed:
    total = outcome.counters
    report = as_report(
        total,
        ceiling(row.hash_ids for row in read.rows),
        outcome.wall_s,
        {
            "trace": plan.trace,
            "targets": plan.targets,
            "instance": plan.instance,
            "workers": workers,
            "specs": len(plan.spec_names),
            "block_bytes": plan.block_bytes,
            "verify": plan.verify,
            "skipped_rows": read.skipped,
            "reordered_rows": read.reordered,
            "first_problem": read.first_problem,
            "stopped": outcome.stopped,
            "engine_errors": outcome.errors,
        },
    )
    failed = bool(total.blocks_wrong or total.requests_failed or outcome.errors)
    code = 1 if failed else _INTERRUPTED if outcome.stopped else 0
    return Replayed(report, code)


def _check(targets: list[str], path: Path, call_timeout_s: float, as_json: bool) -> None:
    header, keys = read_acks(str(path))
    result = check_acks(targets, header, keys, call_timeout_s)
    if as_json:
        print_json(
            {name: getattr(result, name) for name in result.__struct_fields__}
            | {"instance": header.instance}
        )
    else:
        console = out_console()
        console.print(
            f"{result.keys:,} acknowledged blocks of {header.instance}: {result.right:,} right, "
            f"{result.gone:,} gone, {result.lost:,} lost, {result.wrong:,} wrong"
        )
        for fault in result.faults:
            console.print(f"  {fault}", soft_wrap=True)
    if result.right != result.keys:
        fail(f"{result.keys - result.right:,} acknowledged blocks are not right")
