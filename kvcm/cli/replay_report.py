"""A replay's result for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvcm.cli.output import human_bytes, human_ms


def print_report(console: Console, report: Mapping[str, Any], *, title: str) -> None:
    """The table of `kvcm.optimizer.counters.as_report`, with what is remarkable below it."""
    blocks, rate, best = report["blocks"], report["hit_rate"], report["ceiling"]
    grid = Table(title=title, title_justify="left", show_header=False)
    grid.add_column("what")
    grid.add_column("how much", justify="right")
    grid.add_column("more", overflow="fold")

    def row(name: str, value: object, more: str = "") -> None:
        grid.add_row(name, f"{value:,}" if isinstance(value, int) else str(value), more)

    row("requests", report["requests"], f"{report['requests_per_s']:,.0f} a second")
    row("wall time", f"{report['wall_s']:,.2f} s")
    row("blocks looked up", blocks["asked"], f"{best['distinct_blocks']:,} distinct")
    row("  hit", blocks["hit"], "read and verified" if report["verify"] else "not read")
    row("  written", blocks["written"])
    for name, what in _RARE.items():
        if blocks[name]:
            row(f"  {name}", blocks[name], what)
    row("hit rate, by blocks", f"{rate['blocks']:.5f}", f"ceiling {best['blocks']:.5f}")
    row("hit rate, mean of requests", f"{rate['requests']:.5f}", f"ceiling {best['requests']:.5f}")
    row("bytes written", human_bytes(report["bytes_written"]))
    row("bytes read back", human_bytes(report["bytes_read"]))
    grid.add_section()
    for name, what in _LATENCIES.items():
        times = report["latency_ms"][name]
        if times["count"]:
            more = f"p99 {human_ms(times['p99'])}, max {human_ms(times['max'])}"
            row(what, f"p50 {human_ms(times['p50'])}", more)
    console.print(grid)
    if report["storages"]:
        console.print(_storages(report["storages"]))
    _print_verdict(console, report)


def _storages(storages: Sequence[Mapping[str, Any]]) -> Table:
    grid = Table(title="storages; MB/s of one engine while it moves bytes", title_justify="left")
    for name in ("storage", "type"):
        grid.add_column(name)
    for what in ("written", "read"):
        for name in (f"blocks {what}", "bytes", "MB/s", "failed"):
            grid.add_column(name, justify="right")
    for entry in storages:
        cells = [entry["storage"], entry["type"]]
        for what in ("written", "read"):
            moved = entry[what]
            cells += [
                f"{moved['blocks']:,}",
                human_bytes(moved["bytes"]),
                f"{moved['mb_per_s']:,.0f}",
                f"{moved['failed']:,}",
            ]
        grid.add_row(*cells)
    return grid


_RARE = {
    "present": "another engine wrote or was writing them",
    "refused": "by a limit of the manager",
    "failed": "writing or finishing failed",
    "lost": "answered, but the bytes were gone: a miss",
    "wrong": "NOT the bytes that were written",
    "reported": "lost or wrong, and the manager took them out",
}
_LATENCIES = {
    "lookup": "lookup",
    "start": "start a write",
    "finish": "finish a write",
    "read": "read a request's hits",
    "write": "write a request's rest",
}


def _print_verdict(console: Console, report: Mapping[str, Any]) -> None:
    blocks = report["blocks"]
    if blocks["wrong"]:
        console.print(f"{blocks['wrong']:,} blocks with WRONG BYTES", style="bold red")
    elif report["verify"]:
        console.print(f"0 wrong bytes in {human_bytes(report['bytes_read'])} read", style="green")
    for reason, count in report["refused_by_reason"].items():
        console.print(f"refused, {reason}: {count:,} blocks", style="yellow")
    for kind, table in (("tried again", "retries"), ("given up", "errors")):
        for name, count in report[table].items():
            console.print(f"{kind}, {name}: {count:,} calls", style="yellow")
    if report["late_max_s"] > 1:
        console.print(
            f"the engines fell up to {report['late_max_s']:,.1f} s behind the recorded times",
            style="yellow",
        )
    if report["hit_rate"]["blocks"] > report["ceiling"]["blocks"] + 1e-6:
        console.print(
            "More hits than an empty cache could give: blocks of an earlier replay were found."
        )
    if report["skipped_rows"] or report["reordered_rows"]:
        console.print(
            f"trace: {report['skipped_rows']:,} bad rows skipped, "
            f"{report['reordered_rows']:,} out of order ({report['first_problem']})",
            style="yellow",
        )
    for fault in report["faults"]:
        console.print(f"  {fault}", style="yellow", soft_wrap=True)
    for stop in report["engine_errors"]:
        console.print(f"an engine ended early: {stop}", style="red", soft_wrap=True)
    if report["stopped"]:
        console.print("stopped before the end: the numbers are partial", style="yellow")
