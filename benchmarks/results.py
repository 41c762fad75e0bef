"""Result files, one per case and day, and the tables that the README shows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks import machine

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
README = FOLDER / "README.md"
_BEGIN, _END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


@dataclass(frozen=True)
class Column:
    """A column of a case's table: key of a row, heading, format."""

    key: str
    title: str
    form: str = "{}"


@dataclass(frozen=True)
class Case:
    """A case and how its rows are shown."""

    name: str
    title: str
    columns: tuple[Column, ...]
    note: str = ""


_EXTENT = Column("extent", "blocks per StartWrite")
_KEYS = Column("keys", "keys", "{:,}")
_REPLY = Column("reply_bytes", "reply bytes", "{:,}")
_LATENCY = (
    Column("p50_ms", "p50 ms", "{:.2f}"),
    Column("p99_ms", "p99 ms", "{:.2f}"),
    Column("requests_per_s", "requests/s", "{:,.0f}"),
    Column("mkeys_per_s", "M keys/s", "{:.2f}"),
    Column("cpu_us", "CPU µs/request", "{:,.0f}"),
)

CASES = (
    Case(
        "lookup",
        "GetCacheLocation over gRPC",
        (Column("answer", "answer"), _EXTENT, _KEYS, _REPLY, *_LATENCY),
        "p50 and p99: one request in flight. requests/s and keys/s: {in_flight} in flight. CPU: "
        "what the manager used, which other programs on the machine change less. (bare grpc.aio): "
        "a server that answers with so many bytes and does nothing else (`benchmarks/echo.py`), "
        "the floor of any manager on this transport.",
    ),
    Case(
        "json",
        "GetCacheLocation as JSON over HTTP",
        (_EXTENT, _KEYS, _REPLY, *_LATENCY, Column("grpc_ratio", "gRPC is faster by", "{:.1f} ×")),
        "As above; the ratio is that of requests/s.",
    ),
    Case(
        "write",
        "StartWriteCache and FinishWriteCache over gRPC, RocksDB",
        (
            Column("keys", "new keys", "{:,}"),
            Column("start_ms", "start ms", "{:.2f}"),
            Column("start_p99_ms", "worst", "{:.2f}"),
            Column("finish_ms", "finish ms", "{:.2f}"),
            Column("finish_p99_ms", "worst", "{:.2f}"),
            Column("again_ms", "start, all cached, ms", "{:.2f}"),
        ),
        "One call after the other, medians; the index holds the keys of the lookups.",
    ),
    Case(
        "memory",
        "Memory",
        (
            _EXTENT,
            _KEYS,
            Column("grown_per_key", "bytes/key, written and looked up", "{:,.0f}"),
            Column("warm_per_key", "bytes/key, looked up after a restart", "{:,.0f}"),
            Column("cache_per_key", "of these the answers", "{:,.0f}"),
            Column("empty_mib", "empty manager, MiB", "{:,.0f}"),
            Column("writes_per_s", "writes/s while filling", "{:,.0f}"),
        ),
        "RSS less that of an empty manager, after every key was looked up. The first figure holds "
        "RocksDB's memtables and block cache too (at most 64 MiB each).",
    ),
    Case(
        "store",
        "The index in Valkey: calls of 4,400 keys, in process",
        (
            _EXTENT,
            _KEYS,
            Column("load_keys_per_s", "keys/s while loading", "{:,.0f}"),
            Column("bytes_per_key", "bytes/key in Valkey", "{:.0f}"),
            Column("hmget_ms", "bare HMGET ms", "{:.1f}"),
            Column("hmget_least_ms", "least", "{:.1f}"),
            Column("cold_ms", "cold lookup ms", "{:.1f}"),
            Column("cold_least_ms", "least", "{:.1f}"),
            Column("cold_cpu_ms", "CPU", "{:.1f}"),
            Column("hset_ms", "bare HSET ms", "{:.1f}"),
            Column("hset_least_ms", "least", "{:.1f}"),
            Column("start_4400_ms", "start ms", "{:.1f}"),
            Column("start_4400_least_ms", "least", "{:.1f}"),
            Column("start_4400_cpu_ms", "CPU", "{:.1f}"),
            Column("finish_64_ms", "finish of 64, ms", "{:.1f}"),
            Column("finish_4400_ms", "of 4,400", "{:.1f}"),
            Column("finish_10000_ms", "of 10,000", "{:.1f}"),
            Column("claims_1_ms", "10,000 claims ms", "{:.0f}"),
        ),
        "Medians and least times; Valkey without persistence on the other core; 16 shards. Cold: a "
        "new manager, each chain once. CPU: of the manager's process. Bare: a plain client's "
        "pipeline for the same rows over 64 hashes, without scripts, fences or checks, alternating "
        "with the calls.",
    ),
    Case(
        "hitrate",
        "Hit rates on request traces, through the service",
        (
            Column("trace", "trace"),
            Column("share", "capacity, % of the distinct blocks", "{:.0f}"),
            Column("blocks", "blocks", "{:,}"),
            Column("exact", "exact LRU by blocks, offline, %", "{:.2f}"),
            Column("lru", "LRU %", "{:.2f}"),
            Column("lfu", "LFU %", "{:.2f}"),
            Column("tinylfu_lru", "TinyLFU + LRU %", "{:.2f}"),
            Column("ceiling", "unlimited %", "{:.2f}"),
            Column("unreachable", "unreachable blocks", "{:,}"),
        ),
        "Hits: blocks in matched prefixes, of all blocks asked for. The capacity is a hard limit "
        "that also is the high and the low mark: nothing is evicted before room is lacking, and no "
        "more than that. Unreachable: blocks that serve at the end and that no request of the "
        "trace finds, the worst policy's.",
    ),
    Case(
        "space",
        "Ten million keys in one group: start, and planning an eviction",
        (
            _EXTENT,
            Column("chain", "extents in a chain", "{:,}"),
            _KEYS,
            Column("extents", "extents", "{:,}"),
            Column("ready_s", "start to ready s", "{:.1f}"),
            Column("import_s", "of it interpreter and imports", "{:.1f}"),
            Column("first_lookup_ms", "first lookup of a chain ms", "{:.0f}"),
            Column("evictable_s", "start to “eviction possible” s", "{:.1f}"),
            Column("load_cpu_s", "CPU of loading s", "{:.1f}"),
            Column("load_step_ms", "longest step ms", "{:.0f}"),
            Column("rss_mib", "RSS then, MiB", "{:,.0f}"),
            Column("empty_mib", "empty manager", "{:,.0f}"),
            Column("rss_per_extent", "bytes/extent", "{:,.0f}"),
            Column("rss_per_key", "bytes/key", "{:,.0f}"),
            Column("plan_stale_calls", "calls to the first victims, all stamps changed", "{:,}"),
            Column("plan_stale_step_ms", "longest ms", "{:.2f}"),
            Column("plan_stale_ms", "together ms", "{:.1f}"),
            Column("plan_ms", "8 victims, from then on, ms", "{:.3f}"),
            Column("plan_worst_ms", "worst", "{:.2f}"),
        ),
        "RocksDB, filled past StartWrite; a new process on the filled store, its calls made in "
        "process. Eviction is possible once all extents are in the leader's table. “All stamps "
        "changed”: every extent was used once more, in random order, and no background loop "
        "ran in between; a call does a bounded number of steps. Bytes: RSS less that of an empty "
        "manager, RocksDB's block cache (at most 64 MiB) included.",
    ),
    Case(
        "transfer",
        "Transfer SDKs, beside plain copies of the same bytes",
        (
            Column("storage", "storage"),
            Column("shape", "blocks"),
            Column("direction", "direction"),
            Column("sdk_mb_per_s", "SDK MB/s", "{:,.0f}"),
            Column("tool", "plain copy"),
            Column("plain_mb_per_s", "MB/s", "{:,.0f}"),
            Column("ratio", "SDK's time / its", "{:.2f}"),
            Column("bare_mb_per_s", "bare write, read MB/s", "{:,.0f}"),
        ),
        "Medians of {rounds} rounds; all ways in turn in each. The SDK is called through "
        "`Transfers` with buffers of the caller's. Files: 8 blocks in each, written to the page "
        "cache; `cp -r` between the storage and a folder in memory; bare: one call for a file's "
        "bytes. Mooncake: master and lender on this machine, TCP; the library's `batch_put_from` "
        "and `batch_get_into` on a connection of their own, in batches of the same size.",
    ),
    Case(
        "reclaim",
        "Reclaim: writers at the disk's speed into a full group, beside lookups",
        (
            Column("phase", "phase"),
            Column("starts", "StartWrites", "{:,}"),
            Column("success_percent", "succeeded %", "{:.2f}"),
            Column("whole", "granted whole", "{:,}"),
            Column("written_mb_per_s", "written MB/s", "{:,.0f}"),
            Column("start_p99_ms", "start p99 ms", "{:.1f}"),
            Column("lookups", "lookups", "{:,}"),
            Column("p50_ms", "p50 ms", "{:.2f}"),
            Column("p99_ms", "p99 ms", "{:.2f}"),
            Column("highest_percent", "highest usage, % of the limit", "{:.1f}"),
            Column("cpu_percent", "manager's CPU %", "{:.0f}"),
            Column("stolen_percent", "CPU kept by the host, %", "{:.1f}"),
        ),
        "{writers} writers of {blocks} blocks of {block_bytes} bytes, {lookups_per_s} lookups/s of "
        "{blocks} keys; watermark {watermark}, {seconds:.0f} s under reclaim; RocksDB. The manager "
        "has one core, everything else shares the other: the difference between the first two rows "
        "is the disk's and the machine's, up to the third row the writes', to the last reclaim's.",
    ),
)


_TIME = "%Y-%m-%d %H:%M UTC"
_ONE_MEASUREMENT = timedelta(hours=12)


def write(case: str, rows: list[dict[str, Any]], command: str, options: Any, folder: Path) -> Path:
    """Write one result file and return its path.

    Rows that a result of the last hours has for other extents stay, so that a long measurement can
    be done in parts.
    """
    now = datetime.now(UTC)
    path = folder / f"{now:%Y-%m-%d}-{case}.json"
    before = newest(case, folder)
    if before is not None and now - _time_of(before) < _ONE_MEASUREMENT:
        measured = {row.get("extent") for row in rows}
        kept = [row for row in before["rows"] if row.get("extent") not in measured]
        if kept:
            command = f"{before['command']}; {command}"
            rows = sorted(kept + rows, key=lambda row: -row["extent"])
    document = {
        "case": case,
        "date": now.strftime(_TIME),
        "command": command,
        "options": asdict(options),
        "machine": machine.describe(),
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _time_of(document: dict[str, Any]) -> datetime:
    return datetime.strptime(document["date"], _TIME).replace(tzinfo=UTC)


def newest(case: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The latest result of a case."""
    files = sorted(folder.glob(f"????-??-??-{case}.json"))
    found: dict[str, Any] | None = json.loads(files[-1].read_text()) if files else None
    return found


def table(case: Case, rows: Iterable[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| " + " | ".join(c.title for c in case.columns) + " |",
        "|" + "---|" * len(case.columns),
    ]
    for row in rows:
        cells = [
            c.form.format(row[c.key]) if row.get(c.key) is not None else "" for c in case.columns
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def section(case: Case, document: dict[str, Any]) -> str:
    """A case with its circumstances and its table."""
    at = document["machine"]
    loaders = sorted({row["loader"] for row in document["rows"] if "loader" in row})
    lines = [
        f"### {case.title}",
        "",
        f"{document['date']}, `{document['command']}`; {at['cores']} cores ({at['cpu']}), "
        f"Python {at['python']}, load average at the end {at['load_average']}"
        + (f"; loader {', '.join(loaders)}." if loaders else "."),
        case.note.format(**document["options"]),
        "",
        "",
    ]
    return "\n".join(lines) + table(case, document["rows"])


def tables(folder: Path = RESULTS) -> str:
    """All sections, and first of all the aims beside what was measured."""
    found = {case.name: newest(case.name, folder) for case in CASES}
    parts = [_aims(found)]
    parts += [section(case, doc) for case in CASES if (doc := found[case.name]) is not None]
    return "\n".join(parts)


def update_readme() -> None:
    """Put the newest tables into the README."""
    text = README.read_text()
    head, rest = text.split(_BEGIN)
    tail = rest.split(_END)[1]
    README.write_text(f"{head}{_BEGIN}\n{tables()}\n{_END}{tail}")


def _aims(found: dict[str, dict[str, Any] | None]) -> str:
    def value(case: str, key: str, **where: Any) -> float | None:
        document = found[case]
        for row in document["rows"] if document else ():
            if all(row.get(k) == v for k, v in where.items()):
                measured: float | None = row.get(key)
                return measured
        return None

    p50s = [value("lookup", "p50_ms", keys=64, extent=e, answer="all hits") for e in (4, 32, 88)]
    p50 = max((v for v in p50s if v is not None), default=None)
    lines = [
        ("lookups of 4,400 keys in extents of 88", "≥ 5 M keys/s", "{:.2f} M keys/s",
         value("lookup", "mkeys_per_s", keys=4_400, extent=88, answer="all hits")),
        ("p50 of a 64-key lookup, slowest extent size", "≤ 1 ms", "{:.2f} ms", p50),
        ("JSON against gRPC at 4,400 keys", "≤ 3 ×", "{:.1f} ×",
         value("json", "grpc_ratio", keys=4_400, extent=88)),
        ("start of 4,400 keys", "≤ 40 ms", "{:.1f} ms", value("write", "start_ms", keys=4_400)),
        ("finish of 4,400 keys", "≤ 40 ms", "{:.1f} ms", value("write", "finish_ms", keys=4_400)),
        ("RSS per cached key, extents of 88", "≤ 250 bytes", "{:.0f} bytes",
         value("memory", "grown_per_key", extent=88)),
        ("… one block per StartWrite", "(own figure)", "{:.0f} bytes",
         value("memory", "grown_per_key", extent=1)),
    ]  # fmt: skip
    rows = [
        f"| {what} | {aim} | {form.format(v) if v is not None else '–'} |"
        for what, aim, form, v in lines
    ]
    return "\n".join(["### Aims", "", "| what | aim | measured |", "|---|---|---|", *rows, ""])
