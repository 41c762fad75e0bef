"""``python -m benchmarks``: measure, profile, and renew the tables of the README."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

# Before grpc is imported: its C core writes debugging notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Mooncake's library writes how it connects.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

import typer

from benchmarks import cases, hitrate, load, reclaim, results, space, store, transfer
from benchmarks.profile import What, profile

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part.replace("_", "")) for part in text.split(","))


@app.command()
def run(
    quick: Annotated[bool, typer.Option(help="A slice of everything, below a minute.")] = False,
    case: Annotated[
        str, typer.Option("--cases", help="Comma-separated: lookup, json, write, memory.")
    ] = "",
    extents: Annotated[
        str, typer.Option(help="Blocks per StartWrite, comma-separated; 1 = one block each.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Keys of a request, comma-separated.")] = "",
    keys: Annotated[int, typer.Option(help="Keys in the index; 0 = a million.")] = 0,
    keys_single: Annotated[
        int, typer.Option(help="Keys in the index of the one-block case; 0 = 250,000.")
    ] = 0,
    rounds: Annotated[int, typer.Option(help="Runs whose median is quoted; 0 = 5.")] = 0,
    seconds: Annotated[float, typer.Option(help="Length of a run; 0 = 1.5.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where result files go; default: results/, none if quick.")
    ] = None,
) -> None:
    """Measure a manager on core 0 from processes on core 1 (about 20 minutes)."""
    given: dict[str, Any] = {
        "cases": tuple(case.split(",")) if case else (),
        "extents": _numbers(extents) if extents else (),
        "sizes": _numbers(sizes) if sizes else (),
        "keys": keys,
        "keys_single": keys_single,
        "rounds": rounds,
        "seconds": seconds,
    }
    base = cases.QUICK if quick else cases.Options()
    options = replace(base, **{name: value for name, value in given.items() if value})
    if not load.available():
        typer.echo(load.HINT, err=True)
    rows = cases.run(options, typer.echo)
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    shown = {f.name: getattr(options, f.name) for f in fields(options)}
    for shape in results.CASES:
        if shape.name in rows:
            typer.echo("\n" + shape.title + "\n" + shape.note.format(**shown))
            typer.echo(results.table(shape, rows[shape.name]))
    folder = out or (None if quick else results.RESULTS)
    if folder is None:
        return
    for name, found in rows.items():
        typer.echo(f"wrote {results.write(name, found, command, options, folder)}")
    if folder == results.RESULTS:
        results.update_readme()
        typer.echo(f"renewed the tables of {results.README}")


@app.command("profile")
def profile_command(
    what: Annotated[What, typer.Argument()],
    keys: Annotated[int, typer.Option(help="Keys of the call.")] = 4_400,
    extent: Annotated[int, typer.Option(help="Blocks per StartWrite of what is there.")] = 88,
    filled: Annotated[int, typer.Option(help="Keys in the index.")] = 100_000,
    calls: Annotated[int, typer.Option(help="Calls to measure.")] = 40,
    memory: Annotated[bool, typer.Option(help="The memory store, not RocksDB.")] = False,
    lines: Annotated[int, typer.Option(help="Functions to show.")] = 30,
) -> None:
    """Where the time of one call goes: in process, no network."""
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as name:
        report = profile(
            what,
            Path(name),
            keys=keys,
            extent=extent,
            filled=filled,
            calls=calls,
            index_url="memory:" if memory else "",
            lines=lines,
        )
    typer.echo(report)


@app.command("store")
def store_command(
    index_url: Annotated[
        str, typer.Option(help="As in the settings; default: a Valkey of its own.")
    ] = "",
    keys: Annotated[int, typer.Option(help="Keys in the index.")] = 200_000,
    extents: Annotated[
        str, typer.Option(help="Blocks per StartWrite of what is there, comma-separated.")
    ] = "64",
    save: Annotated[bool, typer.Option(help="Write a result file and renew the tables.")] = False,
) -> None:
    """What an index store costs: cold lookups, start, finish, memory, claims; in process."""
    options = store.Options(index_url, keys, _numbers(extents))
    rows = store.measure(options, typer.echo)
    if save:
        command = " ".join(["python -m benchmarks", *sys.argv[1:]])
        path = results.write("store", rows, command, options, results.RESULTS)
        results.update_readme()
        typer.echo(f"wrote {path}")


@app.command("reclaim")
def reclaim_command(
    writers: Annotated[int, typer.Option(help="Processes that write.")] = 2,
    seconds: Annotated[float, typer.Option(help="Length of the phase under reclaim.")] = 60.0,
    quiet: Annotated[float, typer.Option(help="Length of the phases before it.")] = 15.0,
    save: Annotated[bool, typer.Option(help="Write a result file and renew the tables.")] = False,
) -> None:
    """Whether reclaim keeps up with writers at the disk's speed, and what lookups feel of it."""
    options = reclaim.Options(writers=writers, seconds=seconds, quiet_seconds=quiet)
    rows = reclaim.measure(options, typer.echo)
    if save:
        command = " ".join(["python -m benchmarks", *sys.argv[1:]])
        path = results.write("reclaim", rows, command, options, results.RESULTS)
        results.update_readme()
        typer.echo(f"wrote {path}")


@app.command("hitrate")
def hitrate_command(
    traces: Annotated[list[Path], typer.Argument(help="Trace files.")],
    shares: Annotated[
        str, typer.Option(help="Capacities, shares of a trace's distinct blocks.")
    ] = "0.05,0.1,0.25,0.5",
    policies: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(hitrate.POLICIES)}.")
    ] = ",".join(hitrate.POLICIES),
    processes: Annotated[int, typer.Option(help="Replays at a time.")] = 2,
    requests: Annotated[int, typer.Option(help="At the head of each trace; 0 = all.")] = 0,
    save: Annotated[bool, typer.Option(help="Write a result file and renew the tables.")] = False,
) -> None:
    """Hit rates of the eviction policies on traces, through the service, beside exact LRU."""
    files = tuple(map(str, traces))
    wanted = tuple(map(float, shares.split(",")))
    options = hitrate.Options(files, wanted, tuple(policies.split(",")), processes, requests)
    rows = hitrate.measure(options, typer.echo)
    shape = next(case for case in results.CASES if case.name == "hitrate")
    typer.echo("\n" + results.table(shape, rows))
    if save:
        names = tuple(path.name for path in traces)
        command = " ".join(["python -m benchmarks hitrate", *names])
        shown = replace(options, traces=names)
        path = results.write("hitrate", rows, command, shown, results.RESULTS)
        results.update_readme()
        typer.echo(f"wrote {path}")


@app.command("space")
def space_command(
    folder: Annotated[
        str, typer.Option(help="Where filled stores are kept and used again; default: nowhere.")
    ] = "",
    fill_only: Annotated[bool, typer.Option(help="Fill the stores of --folder, no more.")] = False,
    shapes: Annotated[
        str, typer.Option(help="Blocks per StartWrite:keys:extents in a chain, comma-separated.")
    ] = "",
    save: Annotated[bool, typer.Option(help="Write a result file and renew the tables.")] = False,
) -> None:
    """Ten million keys in one group: start, memory, and what planning an eviction costs."""
    given = [tuple(map(int, part.split(":"))) for part in shapes.split(",") if part]
    options = space.Options(tuple(space.Shape(*of) for of in given) or space.SHAPES, folder)
    if fill_only:
        space.fill(options, typer.echo)
        return
    rows = space.measure(options, typer.echo)
    if save:
        shown = replace(options, folder="")
        path = results.write("space", rows, "python -m benchmarks space", shown, results.RESULTS)
        results.update_readme()
        typer.echo(f"wrote {path}")


@app.command("transfer")
def transfer_command(
    storages: Annotated[str, typer.Option(help="Comma-separated: file, mooncake.")] = "",
    shapes: Annotated[
        str, typer.Option(help="Blocks:bytes of a block, comma-separated, as 64:1048576.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds whose median is quoted.")] = 7,
    folder: Annotated[
        str, typer.Option(help="Folder of the file storage; default: a temporary one.")
    ] = "",
    save: Annotated[bool, typer.Option(help="Write a result file and renew the tables.")] = False,
) -> None:
    """Throughput of the transfer SDKs, beside plain copies of the same bytes."""
    given = [tuple(map(int, part.split(":"))) for part in shapes.split(",") if part]
    base = transfer.Options(rounds=rounds, folder=folder)
    options = replace(
        base,
        storages=tuple(storages.split(",")) if storages else base.storages,
        shapes=tuple((blocks, size) for blocks, size in given) or base.shapes,
    )
    rows = transfer.measure(options, typer.echo)
    if save:
        shown = replace(options, folder="")
        path = results.write(
            "transfer", rows, "python -m benchmarks transfer", shown, results.RESULTS
        )
        results.update_readme()
        typer.echo(f"wrote {path}")


@app.command()
def report() -> None:
    """Put the newest result files into the tables of the README."""
    results.update_readme()
    typer.echo(results.tables())


def main() -> None:
    """Without a subcommand everything is measured."""
    commands = {c.name or "run" for c in app.registered_commands} | {"report", "--help", "-h"}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.argv.insert(1, "run")
    app()


if __name__ == "__main__":
    main()
