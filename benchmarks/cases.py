"""The cases: what is measured against a real manager on its own core."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import MessageToDict

from benchmarks import aioload, echo, fill, load, machine, workload
from benchmarks.fill import WrongAnswer
from benchmarks.load import GRPC_PREFIX_BYTES, Loaded, Target, TooShort
from benchmarks.workload import Chains, Keys
from kvcm._pb import meta_pb2 as pb
from kvcm.cli.local_manager import LocalManager, running_manager

_REFERENCE_EXTENT = 88
"""Misses and writes do not depend on the extents that are there; they are measured once, here."""
_RUN_S_MAX = 30.0

Rows = dict[str, list[dict[str, Any]]]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to measure and how long."""

    cases: tuple[str, ...] = ("lookup", "json", "write", "memory")
    extents: tuple[int, ...] = (88, 32, 4, 1)
    sizes: tuple[int, ...] = workload.SIZES
    json_sizes: tuple[int, ...] = (64, 4_400)
    keys: int = 1_000_000
    keys_single: int = 250_000
    """Keys of the case of one block per StartWrite: two calls each to write."""
    rounds: int = 5
    seconds: float = 1.5
    loaders: int = 8
    """Bodies of a round, each with a load process of its own."""
    streams: int = 4
    writes: int = 21
    in_flight: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_flight", self.loaders * self.streams)


QUICK = Options(
    extents=(88,),
    sizes=(64, 4_400),
    json_sizes=(64, 4_400),
    keys=100_000,
    rounds=1,
    seconds=0.8,
    writes=5,
)


def run(options: Options, say: Say) -> Rows:
    """Measure everything asked for; rows by case."""
    rows: Rows = defaultdict(list)
    for extent in options.extents:
        # A short name: the storage's root stands in every location.
        with tempfile.TemporaryDirectory(prefix="b") as name:
            Measurement(Path(name), options, extent, rows, say).run()
    return rows


class Measurement:
    """One manager filled in extents of one size."""

    def __init__(self, folder: Path, options: Options, extent: int, rows: Rows, say: Say) -> None:
        self._folder = folder
        self._options = options
        self._extent = extent
        self._rows = rows
        self._say = say
        total = options.keys if extent > 1 else options.keys_single
        self._chains = Chains(total, extent, options.sizes)

    def run(self) -> None:
        """Fill, measure, and start again for what a restarted manager needs."""
        cases, chains = self._options.cases, self._chains.all()
        total = self._chains.total
        writes = sum(-(-len(chain.keys) // self._extent) for chain in chains)
        with self._manager() as manager:
            empty = machine.rss_bytes(manager.process.pid)
            self._say(f"writing {total:,} keys, {self._extent} a StartWrite, {writes:,} writes")
            started = perf_counter()
            fill.fill(manager.target, chains)
            took = perf_counter() - started
            fill.look_at_all(manager.target, chains)
            grown = machine.rss_bytes(manager.process.pid) - empty
            grpc_rates = self._lookups(manager) if "lookup" in cases else {}
            if "json" in cases:
                self._json(manager, grpc_rates)
            if "write" in cases and self._extent == _REFERENCE_EXTENT:
                self._writes(manager)
        if "memory" not in cases:
            return
        with self._manager() as manager:
            restarted = self._loaded_rss(manager)
            fill.look_at_all(manager.target, chains)
            warm = machine.rss_bytes(manager.process.pid)
        self._add(
            "memory",
            keys=total,
            grown_per_key=grown / total,
            warm_per_key=(warm - empty) / total,
            cache_per_key=(warm - restarted) / total,
            empty_mib=empty / (1 << 20),
            writes_per_s=writes / took,
        )

    def _add(self, case: str, **row: Any) -> None:
        row = {"extent": self._extent, **row}
        self._rows[case].append(row)
        shown = ", ".join(
            f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
        )
        self._say(f"{case}: {shown}")

    @contextmanager
    def _manager(self) -> Iterator[LocalManager]:
        """A manager on its own core; this process and its loaders stay on the other."""
        contents = self._folder / "bootstrap.json"
        contents.write_text(json.dumps(workload.bootstrap_document(str(self._folder / "s"))))
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        machine.pin(machine.SERVER_CPU)
        with running_manager(data, bootstrap=contents, log=self._folder / "log") as manager:
            machine.pin(machine.LOADER_CPU)
            yield manager

    def _loaded_rss(self, manager: LocalManager) -> int:
        """Memory once the table of extents is loaded, nothing looked up yet."""
        fill.fill(manager.target, ())
        return machine.rss_bytes(manager.process.pid)

    # ---- lookups -----------------------------------------------------------------------------

    def _lookups(self, manager: LocalManager) -> dict[int, float]:
        rates: dict[int, float] = {}
        for size in self._options.sizes:
            rates[size] = self._lookup(manager, size, "all hits", size, self._chains.pick)
            if self._extent == _REFERENCE_EXTENT:
                self._floor(size, int(self._rows["lookup"][-1]["reply_bytes"]))
        if self._extent == _REFERENCE_EXTENT:
            for size in self._options.sizes:
                self._lookup(manager, size, "miss at the first", 0, self._unknown)
        return rates

    def _floor(self, size: int, reply_bytes: int) -> None:
        """Requests and replies of the same sizes without anything of ours in between."""

        def prepare(count: int) -> tuple[list[bytes], int]:
            picked = self._chains.pick(size, count)
            return [workload.lookup_message(k).SerializeToString() for k in picked], reply_bytes

        with echo.running_echo(reply_bytes - GRPC_PREFIX_BYTES) as (pid, address):
            measured = self._rounds(pid, Target(address, json=False), prepare)
        rate = float(measured["requests_per_s"])
        answer = "(bare grpc.aio)"
        self._add("lookup", keys=size, answer=answer, mkeys_per_s=rate * size / 1e6, **measured)

    def _unknown(self, size: int, count: int) -> list[Keys]:
        return [self._chains.new_keys(size) for _ in range(count)]

    def _lookup(
        self,
        manager: LocalManager,
        size: int,
        answer: str,
        expected: int,
        pick: Callable[[int, int], list[Keys]],
    ) -> float:
        target = Target(f"{manager.host}:{manager.rpc_port}", json=False)

        def prepare(count: int) -> tuple[list[bytes], int]:
            picked = pick(size, count)
            bodies = [workload.lookup_message(keys).SerializeToString() for keys in picked]
            return bodies, fill.reply_bytes(target.address, picked[0], expected)

        measured = self._rounds(manager.process.pid, target, prepare)
        rate = float(measured["requests_per_s"])
        self._add("lookup", keys=size, answer=answer, mkeys_per_s=rate * size / 1e6, **measured)
        return rate

    def _rounds(
        self,
        pid: int,
        target: Target,
        prepare: Callable[[int], tuple[list[bytes], int]],
    ) -> dict[str, Any]:
        """Medians over rounds, each with bodies of its own; ``pid`` is the server's."""
        options = self._options
        alone: list[Loaded] = []
        together: list[Loaded] = []
        cpu: list[float] = []
        for _ in range(options.rounds):
            bodies, reply = prepare(options.loaders)
            alone.append(_load(target, bodies[:1], options.seconds, 1, reply))
            # Long enough for ten turns of everything in flight, should calls be slow.
            turn = alone[-1].percentile(50) / 1e3 * options.in_flight
            seconds = max(options.seconds, 10 * turn)
            before = machine.cpu_seconds(pid)
            together.append(_load(target, bodies, seconds, options.streams, reply))
            used = machine.cpu_seconds(pid) - before
            cpu.append(used / together[-1].requests)
        rates = [one.rate for one in together]
        return {
            "reply_bytes": reply,
            "p50_ms": statistics.median(one.percentile(50) for one in alone),
            "p99_ms": statistics.median(one.percentile(99) for one in alone),
            "requests_per_s": statistics.median(rates),
            "rates": rates,
            "cpu_us": statistics.median(cpu) * 1e6,
            "busy_p99_ms": statistics.median(one.percentile(99) for one in together),
            "loader": alone[0].loader,
        }

    def _json(self, manager: LocalManager, grpc_rates: dict[int, float]) -> None:
        target = Target(f"{manager.host}:{manager.http_port}", json=True)
        for size in self._options.json_sizes:
            if size not in self._options.sizes:
                continue

            def prepare(count: int, size: int = size) -> tuple[list[bytes], int]:
                picked = self._chains.pick(size, count)
                bodies = [_json_body(keys) for keys in picked]
                return bodies, _json_reply_bytes(target, bodies[0], size)

            measured = self._rounds(manager.process.pid, target, prepare)
            rate = float(measured["requests_per_s"])
            ratio = grpc_rates[size] / rate if size in grpc_rates else None
            self._add(
                "json", keys=size, mkeys_per_s=rate * size / 1e6, **measured, grpc_ratio=ratio
            )

    # ---- writes ------------------------------------------------------------------------------

    def _writes(self, manager: LocalManager) -> None:
        options = [("grpc.max_receive_message_length", -1)]
        address = f"{manager.host}:{manager.rpc_port}"
        with grpc.insecure_channel(address, options) as channel:
            for size in self._options.sizes:
                self._write(channel, size)

    def _write(self, channel: grpc.Channel, size: int) -> None:
        service = "/kv_cache_manager.proto.meta.MetaService"
        start = channel.unary_unary(f"{service}/StartWriteCache", None, None)
        finish = channel.unary_unary(f"{service}/FinishWriteCache", None, None)
        starts, finishes, agains = [], [], []
        for _ in range(self._options.writes):
            keys = self._chains.new_keys(size)
            message = workload.start_message(keys).SerializeToString()
            took, data = _timed(start, message)
            granted = pb.StartWriteCacheResponse.FromString(data)
            if len(granted.locations) != size:
                raise WrongAnswer(
                    f"{len(granted.locations)} of {size} keys granted: {granted.header}"
                )
            starts.append(took)
            done = workload.finish_message(granted.write_session_id, size).SerializeToString()
            took, data = _timed(finish, done)
            _must_be_ok(pb.CommonResponse.FromString(data))
            finishes.append(took)
            took, data = _timed(start, message)
            if pb.StartWriteCacheResponse.FromString(data).locations:
                raise WrongAnswer("keys that are cached were granted again")
            agains.append(took)
        self._add(
            "write",
            keys=size,
            start_ms=statistics.median(starts),
            start_p99_ms=max(starts),
            finish_ms=statistics.median(finishes),
            finish_p99_ms=max(finishes),
            again_ms=statistics.median(agains),
        )


def _load(
    target: Target, bodies: Sequence[bytes], seconds: float, in_flight: int, reply: int
) -> Loaded:
    runner = load.run_h2load if load.available() else aioload.run_aioload
    try:
        return runner(target, bodies, seconds=seconds, in_flight=in_flight, reply_bytes=reply)
    except TooShort:
        if seconds > _RUN_S_MAX:
            raise
        return _load(target, bodies, 3 * seconds, in_flight, reply)


def _timed(call: Callable[[bytes], bytes], message: bytes) -> tuple[float, bytes]:
    started = perf_counter()
    data = call(message)
    return (perf_counter() - started) * 1e3, data


def _must_be_ok(reply: Any) -> None:
    if reply.header.status.code != pb.OK:
        raise WrongAnswer(str(reply.header))


def _json_body(keys: Keys) -> bytes:
    """As Python engines send it: numbers, not strings."""
    message = workload.lookup_message(keys)
    body = MessageToDict(message, preserving_proto_field_name=True)
    return json.dumps(body | {"block_keys": keys.tolist()}).encode()


def _json_reply_bytes(target: Target, body: bytes, expected: int) -> int:
    reply = httpx.post(target.url, content=body, headers={"content-type": "application/json"})
    found = len(reply.json()["locations"])
    if found != expected:
        raise WrongAnswer(f"{found} locations, not {expected}")
    return len(reply.content)
