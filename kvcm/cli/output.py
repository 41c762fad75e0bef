"""What the commands share: one-line errors, tables for people, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kvcm.core.errors import KvcmError, Unavailable


def err_console() -> Console:
    """Standard error, for progress and complaints."""
    return Console(stderr=True, highlight=False, markup=False)


def out_console() -> Console:
    """Standard output, for results. What is no terminal gets lines as long as they are."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    return console


def fail(message: str, code: int = 1) -> NoReturn:
    """End with one line on standard error."""
    err_console().print(f"error: {one_line(message)}", style="red", soft_wrap=True)
    raise typer.Exit(code)


def one_line(text: str) -> str:
    """``text`` with line ends as spaces."""
    return " ".join(text.split("\n"))


@contextmanager
def one_line_errors(target: str = "") -> Iterator[None]:
    """Errors we raise on purpose, and Ctrl-C, become one line and an exit code.

    Args:
        target: the address that is asked, to name where nobody answers.
    """
    try:
        yield
    except Unavailable as error:
        fail(f"no manager at {target}: {error}" if target else str(error))
    except KvcmError as error:
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        fail("interrupted", 130)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str = "none"
) -> None:
    """Print a table; numbers to the right. ``empty`` stands for no rows."""
    listed = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(listed) and all(row[i][1] for row in listed) for i in range(len(columns))]
    console = out_console()
    if not listed:
        console.print(f"{title}: {empty}")
        return
    grid = Table(title=title, title_justify="left")
    for name, right in zip(columns, numeric, strict=True):
        grid.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in listed:
        grid.add_row(*(text for text, _ in row))
    console.print(grid)


def _cell(value: object) -> tuple[str, bool]:
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, int):
        return f"{value:,}", True
    if isinstance(value, float):
        return f"{value:,.3f}", True
    return str(value), False


def human_bytes(count: int) -> str:
    """``count`` bytes with a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


_UNITS = {1000: ("kB", "MB", "GB", "TB", "PB"), 1024: ("KiB", "MiB", "GiB", "TiB", "PiB")}


def exact_bytes(count: int) -> str:
    """A size somebody set, to the byte and in the unit it was likely given in: 30 GB."""
    for base, units in _UNITS.items():
        fitting = [unit for n, unit in enumerate(units, 1) if count and count % base**n == 0]
        if fitting:
            return f"{count // base ** len(fitting):,} {fitting[-1]}"
    return f"{count:,} B"


def human_ms(milliseconds: float) -> str:
    """A latency, with digits enough to compare."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:,.2f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.2f} ms"
