"""A `Frame` of ``kvcm top`` as text that fits the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvcm.cli.admin_http import time_of
from kvcm.cli.output import human_bytes
from kvcm.cli.top_frame import Frame, Space, StorageRow, TrafficRow

_GAP = 2
_NAME_WIDTH_MIN = 8
_NEAR_MARK = 0.9
_ROWS_MIN = 1
_HEAD_LINES = 2
"""Lines of a table beside its rows: names of the columns, and a free one."""
_STATE_STYLES = {"available": "green", "suspect": "yellow", "unknown": "dim", "disabled": "dim"}

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Lost:
    """The manager does not answer: since when, and why."""

    since_s: float
    error: str


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """``rank``: 0 is always shown; the highest goes first when the terminal is narrow."""

    title: str
    rank: int
    show: Callable[[R], Text | str]
    left: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What is on the terminal; ``frame`` is the last one there was, None before the first."""

    target: str
    frame: Frame | None
    lost: Lost | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As high as there are rows, or as the terminal where ``options`` have a height."""
        width = options.max_width
        head = [*_head(self)]
        for line in head:
            line.truncate(width, overflow="ellipsis")
            yield line
        frame = self.frame
        if frame is None:
            return
        counts = [len(frame.groups), len(frame.instances), len(frame.storages)]
        if options.height is not None:
            counts = shares(options.height - len(head) - 3 * _HEAD_LINES, counts)
        yield from _table(_traffic(frame.window, "group"), frame.groups, counts[0], width)
        yield from _table(_traffic(frame.window, "instance"), frame.instances, counts[1], width)
        yield from _table(_STORAGE, frame.storages, counts[2], width)


def shares(lines: int, wanted: Sequence[int]) -> list[int]:
    """Divide lines among tables that want so many: each gets the same until it has enough, and
    one at least."""
    given = [min(_ROWS_MIN, want) for want in wanted]
    left = lines - sum(given)
    while left > 0 and (open_ := [i for i, want in enumerate(wanted) if given[i] < want]):
        for i in open_[:left]:
            given[i] += 1
        left -= len(open_)
    return given


def fit(widths: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Columns to show, by number, of (rank, width) each: those of the highest rank are left out
    until the rest fit."""
    shown = list(range(len(widths)))
    while sum(widths[i][1] for i in shown) + _GAP * (len(shown) - 1) > width:
        worst = max(shown, key=lambda i: widths[i][0])
        if widths[worst][0] == 0:
            break
        shown.remove(worst)
    return shown


def _head(view: View) -> Iterable[Text]:
    frame = view.frame
    if view.lost is not None:
        since = time_of(view.lost.since_s)
        yield Text(f"{view.target}  not reachable since {since}", style="bold red")
        yield _clean(view.lost.error, "red")
        if frame is not None:
            yield Text(f"below: as of {time_of(frame.at_s)}", style="yellow")
        return
    if frame is None:
        yield Text(f"{view.target}  connecting")
        return
    yield Text(f"{view.target}  {time_of(frame.at_s)}")
    if not frame.leader:
        line = _clean(f"no leader, this is {frame.node}", "bold red")
    elif frame.is_leader:
        line = _clean(f"leader {frame.leader}", "green")
    else:
        line = _clean(f"leader {frame.leader}, this is {frame.node}", "yellow")
    yield line.append(f"  epoch {frame.epoch}  up {_duration(frame.up_s)}", style="default")
    lag = "" if frame.loop_lag_max_s is None else f"  loop lag {frame.loop_lag_max_s * 1e3:.0f} ms"
    over = "" if frame.over_s is None else f"  rates over {frame.over_s:.1f} s"
    yield Text(f"{frame.write_sessions:,} open writes{lag}{over}", style="dim")
    for note in frame.notes:
        yield _clean(note, "yellow")


def _table(
    columns: Sequence[Column[R]], rows: Sequence[R], most: int, width: int
) -> Iterable[Text]:
    """Lines of a table of the first ``most`` rows; its first title tells when there are more."""
    yield Text()
    shown = rows[:most]
    titles = [column.title for column in columns]
    if len(shown) < len(rows):
        titles[0] += f", {len(shown):,} of {len(rows):,}"
    cells = [[Text(title, style="bold cyan") for title in titles]]
    cells += [[_cell(column.show(row)) for column in columns] for row in shown]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    chosen = fit([(c.rank, w) for c, w in zip(columns, widths, strict=True)], width)
    over = sum(widths[i] for i in chosen) + _GAP * (len(chosen) - 1) - width
    if over > 0:
        widths[0] = max(_NAME_WIDTH_MIN, widths[0] - over)
    for line in cells:
        text = _line(columns, line, widths, chosen)
        text.truncate(width, overflow="ellipsis")
        yield text


def _line(
    columns: Sequence[Column[R]],
    cells: Sequence[Text],
    widths: Sequence[int],
    chosen: Sequence[int],
) -> Text:
    parts = []
    for i in chosen:
        cell = cells[i].copy()
        cell.truncate(widths[i], overflow="ellipsis")
        missing = widths[i] - cell.cell_len
        parts.append(cell)
        (cell.pad_right if columns[i].left else cell.pad_left)(missing)
    return Text(" " * _GAP).join(parts)


def _traffic(window: str, name: str) -> list[Column[TrafficRow]]:
    """Columns of groups or of instances."""
    is_group = name == "group"
    first: list[Column[TrafficRow]] = (
        [Column("group", 0, lambda row: row.group, left=True)]
        if is_group
        else [
            Column("instance", 0, lambda row: row.instance, left=True),
            Column("group", 6, lambda row: row.group, left=True),
        ]
    )
    rest: list[Column[TrafficRow]] = [
        Column("hit now", 1, lambda row: _share(row.rates.hit_rate)),
        Column(f"hit {window}", 2, lambda row: _share(row.hit_rate)),
        Column("ceiling", 2, lambda row: _share(row.ceiling)),
        Column("used", 1, lambda row: human_bytes(row.space.bytes)),
        Column("of mark", 1, lambda row: _of_mark(row.space)),
        Column("mark", 5, lambda row: _amount(row.space, row.space.high)),
        Column("limit", 8, lambda row: _amount(row.space, row.space.capacity)),
        Column("blocks", 8, lambda row: f"{row.space.blocks:,}"),
        Column("lookups/s", 3, lambda row: _rate(row.rates.lookups_per_s)),
        Column("blocks/s", 4, lambda row: _rate(row.rates.blocks_per_s)),
        Column("saved tok/s", 6, lambda row: _rate(row.rates.saved_tokens_per_s)),
        Column("written/s", 5, lambda row: _bytes(row.rates.written_bytes_per_s)),
        Column("evicted/s", 5, lambda row: _bytes(row.rates.evicted_bytes_per_s)),
    ]
    if is_group:
        rest += [Column("limited/s", 7, _limited), Column("instances", 7, _instances)]
    return first + rest


_STORAGE: list[Column[StorageRow]] = [
    Column("storage", 0, lambda row: row.name, left=True),
    Column("state", 0, lambda row: _state(row), left=True),
    Column("used", 1, lambda row: human_bytes(row.space.bytes)),
    Column("of mark", 2, lambda row: _of_mark(row.space)),
    Column("limit", 4, lambda row: _amount(row.space, row.space.capacity)),
    Column("free", 3, lambda row: "-" if row.free_bytes is None else human_bytes(row.free_bytes)),
    Column("to delete", 5, lambda row: human_bytes(row.space.trash_bytes)),
    Column("why", 6, lambda row: row.reason, left=True),
]


def _state(row: StorageRow) -> Text:
    return Text(row.state, style=_STATE_STYLES.get(row.state, "bold red"))


def _of_mark(space: Space) -> Text:
    share = space.of_mark
    if share is None:
        return Text("-")
    style = "red" if share >= 1 else "yellow" if share >= _NEAR_MARK else ""
    return Text(f"{share:.1%}", style=style)


def _limited(row: TrafficRow) -> Text:
    rate = row.rates.limited_writes_per_s
    return Text(_rate(rate), style="yellow" if rate else "")


def _instances(row: TrafficRow) -> str:
    return f"{row.instances:,}"


def _amount(space: Space, amount: int | None) -> str:
    if amount is None:
        return "none"
    return f"{amount:,} blocks" if space.unit == "blocks" else human_bytes(amount)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:,.1f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else human_bytes(round(value))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _cell(value: Text | str) -> Text:
    return value if isinstance(value, Text) else _clean(value)


def _clean(text: str, style: str = "") -> Text:
    """What a manager says must not move the terminal's cursor."""
    return Text("".join(c if c.isprintable() else " " for c in text), style=style)
