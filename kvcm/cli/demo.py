"""``kvcm demo``: a manager, a sample workload, real bytes, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

# Before grpc is imported: its C core writes debugging notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import typer

from kvcm.cli.admin_common import plain
from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.cli.output import err_console, out_console
from kvcm.cli.replay import Replayed, run_replay
from kvcm.cli.replay_report import print_report
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.optimizer.fleet import ReplayPlan
from kvcm.optimizer.session import fingerprint, spec_names
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS, ceiling
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows

_BLOCK_BYTES = 4096
_STORAGE = "nfs_01"
_GROUP = "default"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("demo")(demo)


def demo(
    data_dir: Annotated[
        Path, typer.Option(help="Where everything is kept; used again by the next run.")
    ] = Path("kvcm-data/demo"),
    requests: Annotated[int, typer.Option("--requests", "-n", min=1)] = 600,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Engine processes.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 1,
) -> None:
    """Start a manager, replay a sample chat workload against it, print what came of it.

    The engine processes look up cached blocks, read and check them, and write what is missing.
    Nothing outside the data folder is touched, and nothing keeps running.
    """
    try:
        with _terminable():
            result = _run(data_dir.absolute(), requests, workers, seed)
    except KvcmError as error:
        _complain(str(error))
        raise typer.Exit(1) from None
    except OSError as error:
        _complain(f"{error.filename or data_dir}: {error.strerror or error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        _complain("interrupted; the manager is stopped")
        raise typer.Exit(130) from None
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _run(data_dir: Path, requests: int, workers: int, seed: int) -> Replayed:
    console = out_console()
    folders = {name: data_dir / name for name in ("manager", "blocks")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    workload = data_dir / f"workload-{seed}.jsonl"
    _write_workload(workload, requests, seed)
    bootstrap = data_dir / "bootstrap.json"
    bootstrap.write_text(json.dumps(_bootstrap(folders["blocks"]), indent=2) + "\n")

    console.print("Starting a manager (SQLite registry, RocksDB index, blocks as files) ...")
    log = data_dir / "manager.log"
    with running_manager(folders["manager"], bootstrap=bootstrap, log=log) as manager:
        _check_place(manager, folders["blocks"])
        console.print(
            f"It listens on {manager.target}. {workers} engine processes now serve "
            f"{requests:,} chat requests:\nlook up the prompt's cached blocks, read and check "
            "them, write the missing ones.\n"
        )
        result = run_replay(_plan(manager, workload, seed), _GROUP, workers)
    print_report(console, result.report, title="What came of it")
    _explain(result, data_dir, workload)
    return result


def _write_workload(path: Path, requests: int, seed: int) -> None:
    rows = generate(WorkloadKind.CHAT, requests, seed)
    with path.open("wb") as file:
        write_rows(file, rows, block_size=TRACE_BLOCK_TOKENS)
    best = ceiling(row.hash_ids for row in rows)
    out_console().print(
        f"Sample workload: {best.requests:,} requests of multi-turn conversations, "
        f"{best.blocks:,} blocks of {TRACE_BLOCK_TOKENS} tokens,\n"
        f"{best.distinct:,} of them distinct: the best any cache can reach is a hit rate of "
        f"{best.block_rate:.3f}."
    )


def _bootstrap(root: Path) -> dict[str, object]:
    """The startup defaults, with the storage in the data folder."""
    try:
        from kvcm.registry.defaults import default_group
    except ModuleNotFoundError as error:
        raise KvcmError(
            f"the demo runs a manager, which needs {error.name}: pip install 'kvcm[server]'"
        ) from None
    storage = {
        "global_unique_name": _STORAGE,
        "nfs": {"root_path": f"{root}/", "key_count_per_file": 8},
    }
    return {"storages": [storage], "instance_groups": [plain(default_group())]}


def _check_place(manager: LocalManager, root: Path) -> None:
    """A data folder that was moved still names its old place: writing there would surprise."""
    with AdminClient(manager.admin_target, timeout=10.0) as client:
        for config in client.list_storage():
            stored = str(config.spec.get("root_path", ""))
            if config.global_unique_name == _STORAGE and Path(stored) != root:
                raise InvalidArgument(
                    f"this data folder keeps its blocks in {stored}, not in {root}: it was moved "
                    "or is not the demo's; give another --data-dir"
                )


def _plan(manager: LocalManager, workload: Path, seed: int) -> ReplayPlan:
    instance = f"demo-{seed}"
    return ReplayPlan(
        trace=str(workload),
        targets=[manager.target],
        instance=instance,
        fingerprint=fingerprint(instance, _BLOCK_BYTES, ""),
        spec_names=spec_names(1),
        block_bytes=_BLOCK_BYTES,
        block_tokens=TRACE_BLOCK_TOKENS,
    )


def _explain(result: Replayed, data_dir: Path, workload: Path) -> None:
    console = out_console()
    if result.report["stopped"]:
        _complain("interrupted; the manager is stopped")
        return
    if result.exit_code:
        _complain(f"the replay did not go well (see above; manager log: {data_dir}/manager.log)")
        return
    command = _shown(Path(sys.argv[0])) if Path(sys.argv[0]).name == "kvcm" else "kvcm"
    shown = _shown(data_dir)
    console.print(
        f"""
A hit is a block that was computed before and need not be computed again. Engines that work at
the same time miss what another one is still writing, so they stay a little below the ceiling.

The manager is stopped; everything it keeps is in {shown}:
  manager/   registry and index       blocks/   the blocks' bytes       {workload.name}

Try next
  the same again, now with a warm cache      {_again()}
  keep a manager running on these data       {command} serve --data-dir {shown}/manager
  and, in another terminal:
    what it holds                            {command} admin usage
    more requests                            {command} workload --kind agent -o agents.jsonl
                                             {command} replay agents.jsonl --workers 4""",
        soft_wrap=True,
    )


def _again() -> str:
    return "make run" if Path("Makefile").exists() else "kvcm demo"


def _shown(path: Path) -> str:
    """Relative where that is shorter to read."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _complain(message: str) -> None:
    err_console().print(f"error: {message}", style="red", soft_wrap=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind as Ctrl-C does, so that no process stays behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
