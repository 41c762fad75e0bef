"""A process of writers and readers for the chaos test: real bytes, every read checked.

Run as ``python chaos_engine.py PLAN`` with the JSON of a `Plan`; it goes on until its standard
input is closed, then prints the JSON of a `Tally`.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.client.retry import RetryPolicy
from kvcm.core.errors import (
    CapacityReached,
    InstanceNotExist,
    NotReady,
    SessionNotExist,
)
from kvcm.core.types import QueryType

SIZE = 96
SPEC = "tp0"
KEEP = "keep"
"""Nothing is ever removed from it: what was acknowledged must be found again."""
CHURN = "churn"
"""Small, evicted from, trimmed and cleared; only bytes are checked."""
CHAIN = 24
CHAINS = 40
GENERATION_S = 3.0
"""So often writers go on to new blocks: there is always something to write."""
CALL_S = 6.0
_TOLERATED = (NotReady, SessionNotExist, CapacityReached, InstanceNotExist)


@dataclass(frozen=True)
class Plan:
    """What a process does.

    ``acks`` is the file for the acknowledged blocks of KEEP, one a line: when its finish was sent
    and answered (monotonic seconds, which all processes of a machine share), and its key.
    """

    target: str
    seed: int
    tasks: int
    acks: str
    began: float


@dataclass
class Tally:
    """What a process saw; ``wrong`` and ``faults`` must stay empty."""

    calls: int = 0
    written: int = 0
    read: int = 0
    slowest_s: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def key_of(generation: int, chain: int, position: int) -> int:
    """A block's key; chains share nothing."""
    return (generation << 32) + (chain << 16) + position + 1


def content(instance: str, key: int, nonce: bytes) -> bytes:
    """The bytes of one block as one session writes them; anyone can check them."""
    head = nonce + key.to_bytes(8, "little")
    return head + hashlib.shake_128(head + instance.encode()).digest(SIZE - len(head))


def is_right(instance: str, key: int, data: bytes) -> bool:
    """Whether some session wrote these bytes for this block."""
    return data == content(instance, key, data[:8])


def check(
    client: Client, instance: str, keys: list[int], query: QueryType
) -> tuple[list[bool], list[str]]:
    """Look up and read; which keys are answered with bytes, and what bytes were wrong.

    A file that is gone is no hit: whoever reads later than the grace finds none.
    """
    found = client.get_cache_location(instance, keys, query=query).locations
    uris = [location.specs.get(SPEC, "") for location in found]
    answers = iter(FileSdk().get_many([(uri, None) for uri in uris if uri]))
    readable, wrong = [False] * len(keys), []
    for at, (key, uri) in enumerate(zip(keys, uris, strict=False)):
        if not uri:
            continue
        data = next(answers)
        if isinstance(data, bytes):
            readable[at] = is_right(instance, key, data)
            if not readable[at]:
                wrong.append(f"{instance} block {key} at {uri}: {data[:24].hex()}")
    return readable, wrong


class Engine:
    """Some tasks on one client."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._refusals: Counter[str] = Counter()
        self._acks = Path(plan.acks).open("a", buffering=1)  # noqa: SIM115 - closed by run
        self.tally = Tally()

    def run(self) -> None:
        """Until standard input ends."""
        plan = self._plan
        policy = RetryPolicy(rounds_max=2)
        with Client(plan.target, timeout=CALL_S, retry=policy) as client, self._acks:
            threads = [
                threading.Thread(target=self._task, args=(client, random.Random(plan.seed + n)))
                for n in range(plan.tasks)
            ]
            for thread in threads:
                thread.start()
            sys.stdin.read()
            self._stop.set()
            for thread in threads:
                thread.join()
        self.tally.refusals = dict(self._refusals)

    def _task(self, client: Client, chance: random.Random) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._step(client, chance)
            except _TOLERATED as error:
                with self._lock:
                    self._refusals[type(error).__name__] += 1
                # As an engine would: it computes the blocks meanwhile.
                self._stop.wait(0.05)
            # Whatever else comes is a finding, and the test shows it.
            except Exception as error:
                with self._lock:
                    self.tally.faults.append(repr(error)[:500])
                self._stop.wait(0.05)
            with self._lock:
                self.tally.calls += 1
                self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - started)

    def _step(self, client: Client, chance: random.Random) -> None:
        instance = KEEP if chance.random() < 0.6 else CHURN
        lot = chance.random()
        latest = int((time.monotonic() - self._plan.began) / GENERATION_S)
        generation = latest if lot < 0.4 else chance.randint(0, latest)
        chain, length = chance.randrange(CHAINS), chance.randint(1, CHAIN)
        keys = [
            key_of(generation if instance == KEEP else 0, chain, position)
            for position in range(length)
        ]
        if lot < 0.5:
            self._write(client, instance, keys, chance)
        elif instance == KEEP or lot < 0.9:
            query = QueryType.PREFIX_MATCH if chance.random() < 0.7 else QueryType.BATCH_GET
            readable, wrong = check(client, instance, keys, query)
            with self._lock:
                self.tally.read += sum(readable)
                self.tally.wrong += wrong
        elif lot < 0.99:
            client.remove_cache(instance, keys)
        else:
            client.trim_cache(instance)

    def _write(self, client: Client, instance: str, keys: list[int], chance: random.Random) -> None:
        grant = client.start_write_cache(instance, keys)
        if chance.random() < 0.03:
            return  # Forgotten: its time-out ends it.
        nonce = chance.randbytes(8)
        mine = [keys[index] for index in grant.granted]
        items = [
            (location.specs[SPEC], content(instance, key, nonce))
            for key, location in zip(mine, grant.locations, strict=True)
        ]
        written = [error is None and chance.random() < 0.97 for error in FileSdk().put_many(items)]
        sent = time.monotonic()
        client.finish_write_cache(instance, grant.session_id, written if mine else None)
        answered = time.monotonic()
        with self._lock:
            self.tally.written += sum(written)
            if instance == KEEP:
                acknowledged = [key for key, good in zip(mine, written, strict=True) if good]
                self._acks.write("".join(f"{sent} {answered} {key}\n" for key in acknowledged))


def main() -> None:
    """Run the plan given."""
    engine = Engine(Plan(**json.loads(sys.argv[1])))
    engine.run()
    sys.stdout.write(json.dumps(asdict(engine.tally)))


if __name__ == "__main__":
    main()
