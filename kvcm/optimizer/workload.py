"""A seeded generator of request traces: multi-turn chat, agent loops, shared system prompts.

Same arguments, same bytes, on any machine and Python: the numbers come from SplitMix64 and integer
arithmetic, neither of which has versions.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from kvcm.core.errors import InvalidArgument
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS, TraceRow

_MASK = (1 << 64) - 1


class WorkloadKind(StrEnum):
    """What the generated users do."""

    CHAT = "chat"
    AGENT = "agent"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one kind of session behaves. Pairs are (least, most), drawn evenly."""

    system_prompts: int
    system_tokens: tuple[int, int]
    turns: tuple[int, int]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    gap_ms: tuple[int, int]
    fork_percent: int
    """Chance per turn that a sub-session branches off what has been said so far."""
    context_tokens_max: int


_CHAT = _Shape(4, (600, 2_500), (1, 9), (40, 700), (80, 900), (4_000, 60_000), 0, 32_768)
_AGENT = _Shape(2, (6_000, 12_000), (4, 24), (150, 2_500), (40, 500), (500, 6_000), 6, 131_072)
_ARRIVAL_MS = (50, 1_950)
_FORK_TURNS = (1, 4)


class _SplitMix:
    """SplitMix64 (Steele, Lea, Flood 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def between(self, bounds: tuple[int, int]) -> int:
        """An integer within ``bounds``, both included."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        low, high = bounds
        return low + ((z ^ (z >> 31)) * (high - low + 1) >> 64)


@dataclass(slots=True)
class _Text:
    """An append-only text that shares the first ``shared`` tokens with ``parent``."""

    name: int
    parent: _Text | None
    shared: int
    length: int

    def owner_at(self, end: int) -> _Text:
        """The text in which the prefix that ends at ``end`` was written first."""
        text = self
        while text.parent is not None and end <= text.shared:
            text = text.parent
        return text


@dataclass(slots=True)
class _Session:
    shape: _Shape
    text: _Text
    turns_left: int


class _Generator:
    def __init__(self, kind: WorkloadKind, seed: int, block_size: int) -> None:
        self._dice = _SplitMix(seed)
        self._block_size = block_size
        self._texts = 0
        self._events = 0
        self._ids: dict[tuple[int, int], int] = {}
        self._shapes = {
            WorkloadKind.CHAT: (_CHAT,),
            WorkloadKind.AGENT: (_AGENT,),
            # A chat user arrives three times as often as an agent, whose loops are longer.
            WorkloadKind.MIXED: (_CHAT, _CHAT, _CHAT, _AGENT),
        }[kind]
        self._systems = {
            shape: [
                self._new_text(None, 0, self._dice.between(shape.system_tokens))
                for _ in range(shape.system_prompts)
            ]
            for shape in dict.fromkeys(self._shapes)
        }
        self._queue: list[tuple[int, int, _Session | None]] = [(0, 0, None)]

    def rows(self) -> Iterator[TraceRow]:
        """Requests without end, in the order of their time."""
        while True:
            now, _, session = heapq.heappop(self._queue)
            if session is None:
                self._push(now + self._dice.between(_ARRIVAL_MS), None)
                session = self._arrive()
            yield self._turn(now, session)

    def _arrive(self) -> _Session:
        shape = self._shapes[self._dice.between((0, len(self._shapes) - 1))]
        system = self._systems[shape][self._dice.between((0, shape.system_prompts - 1))]
        text = self._new_text(system, system.length, system.length)
        return _Session(shape, text, self._dice.between(shape.turns))

    def _turn(self, now: int, session: _Session) -> TraceRow:
        shape, text = session.shape, session.text
        text.length += self._dice.between(shape.input_tokens)
        prompt = text.length
        ids = self._block_ids(text)
        output = self._dice.between(shape.output_tokens)
        text.length += output
        session.turns_left -= 1
        room = text.length + shape.input_tokens[1] <= shape.context_tokens_max
        if session.turns_left > 0 and room:
            self._push(now + self._dice.between(shape.gap_ms), session)
            if self._dice.between((1, 100)) <= shape.fork_percent:
                branch = self._new_text(text, text.length, text.length)
                fork = _Session(shape, branch, self._dice.between(_FORK_TURNS))
                self._push(now + self._dice.between(shape.gap_ms), fork)
        return TraceRow(0, float(now), prompt, output, ids)

    def _block_ids(self, text: _Text) -> tuple[int, ...]:
        """An id per block of the prompt, dense in the order of first use; the last may be partial.

        A prefix is named by the text that wrote its end and by where it ends.
        """
        size = self._block_size
        ids = []
        for start in range(0, text.length, size):
            end = min(start + size, text.length)
            name = (text.owner_at(end).name, end)
            ids.append(self._ids.setdefault(name, len(self._ids)))
        return tuple(ids)

    def _new_text(self, parent: _Text | None, shared: int, length: int) -> _Text:
        self._texts += 1
        return _Text(self._texts, parent, shared, length)

    def _push(self, when: int, session: _Session | None) -> None:
        self._events += 1
        heapq.heappush(self._queue, (when, self._events, session))


def generate(
    kind: WorkloadKind, requests: int, seed: int, *, block_size: int = TRACE_BLOCK_TOKENS
) -> list[TraceRow]:
    """``requests`` rows in the order of their time, numbered from 1.

    Raises:
        InvalidArgument: a negative count or a block size that is not positive.
    """
    if requests < 0:
        raise InvalidArgument(f"requests must not be negative, got {requests}")
    if block_size <= 0:
        raise InvalidArgument(f"block_size must be above 0, got {block_size}")
    stream = _Generator(kind, seed, block_size).rows()
    return [
        TraceRow(number, row.timestamp_ms, row.input_length, row.output_length, row.hash_ids)
        for number, row in zip(range(1, requests + 1), stream, strict=False)
    ]


def encode_rows(rows: list[TraceRow], *, block_size: int = TRACE_BLOCK_TOKENS) -> bytes:
    """Rows as a trace file. ``block_size`` is written into rows where it is not the usual 512."""
    lines = []
    for row in rows:
        record: dict[str, object] = {
            "timestamp": int(row.timestamp_ms),
            "input_length": row.input_length,
            "output_length": row.output_length,
            "hash_ids": list(row.hash_ids),
        }
        if block_size != TRACE_BLOCK_TOKENS:
            record["block_size"] = block_size
        lines.append(json.dumps(record) + "\n")
    return "".join(lines).encode()


def write_rows(
    target: BinaryIO, rows: list[TraceRow], *, block_size: int, compress: bool = False
) -> None:
    """Write a trace file; a compressed one carries neither a time nor a name."""
    data = encode_rows(rows, block_size=block_size)
    target.write(gzip.compress(data, mtime=0) if compress else data)
