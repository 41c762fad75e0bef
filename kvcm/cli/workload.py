"""``kvcm workload``: write a synthetic request trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvcm.core.errors import KvcmError
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS, ceiling
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows

console = Console(stderr=True)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("workload")(workload)


def workload(
    kind: Annotated[WorkloadKind, typer.Option(help="What the users do.")] = WorkloadKind.CHAT,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Rows to write.")] = 1000,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = TRACE_BLOCK_TOKENS,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File to write (.gz compresses); - is stdout.")
    ] = "-",
) -> None:
    """Write a request trace in the Mooncake format: one JSON object a line.

    Its users share system prompts, come back turn after turn, and (agents) branch off.
    """
    try:
        rows = generate(kind, requests, seed, block_size=block_size)
        if output == "-":
            write_rows(sys.stdout.buffer, rows, block_size=block_size)
            sys.stdout.buffer.flush()
        else:
            with open(output, "wb") as file:
                compress = Path(output).suffix == ".gz"
                write_rows(file, rows, block_size=block_size, compress=compress)
    except OSError as error:
        console.print(f"error: {output}: {error.strerror or error}", style="red", markup=False)
        raise typer.Exit(1) from None
    except KvcmError as error:
        console.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    best = ceiling(row.hash_ids for row in rows)
    console.print(
        f"{best.requests:,} requests, {best.blocks:,} blocks of {block_size} tokens, "
        f"{best.distinct:,} of them distinct: an unlimited cache reaches a hit rate of "
        f"{best.block_rate:.5f}",
        highlight=False,
        soft_wrap=True,
    )
