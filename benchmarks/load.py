"""Load from a second process: prepared bodies, many times, as fast as asked.

h2load is what the results are quoted from. It takes one body a process, so several run at once,
each with its own; their logs say when each request began and how long it took.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

HINT = (
    "h2load is not installed (Debian: apt-get install nghttp2-client); measuring with a small "
    "asyncio loader instead, which is slower than the manager: read its numbers as lower bounds"
)
GRPC_PATH = "/kv_cache_manager.proto.meta.MetaService/GetCacheLocation"
GRPC_HEADERS = ("content-type: application/grpc", "te: trailers")
GRPC_PREFIX_BYTES = 5
"""A flag and the length, before each message."""
JSON_PATH = "/api/getCacheLocation"
JSON_HEADERS = ("content-type: application/json",)
_TRAFFIC = re.compile(r"traffic: .* \((\d+)\) data$", re.MULTILINE)
_REQUESTS = re.compile(r"requests: .*?(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored")
_EDGE = 0.1
"""The part at both ends of a run that is not counted: processes start and stop apart."""


class LoadFailed(Exception):
    """Requests failed, or the answers had the wrong size."""


class TooShort(LoadFailed):
    """A loader got no answer in time."""


@dataclass(frozen=True)
class Loaded:
    """What one run measured: requests/s, how many there were in all, and seconds of each one."""

    rate: float
    requests: int
    latencies: npt.NDArray[np.float64]
    loader: str

    def percentile(self, q: float) -> float:
        """Latency in milliseconds."""
        return float(np.percentile(self.latencies, q)) * 1e3


@dataclass(frozen=True)
class Target:
    """Where and how to send."""

    address: str
    json: bool

    @property
    def url(self) -> str:
        return f"http://{self.address}{JSON_PATH if self.json else GRPC_PATH}"

    def body(self, message: bytes) -> bytes:
        """What is sent: gRPC puts a flag and the length before a message."""
        return message if self.json else b"\0" + len(message).to_bytes(4, "big") + message

    def arguments(self) -> list[str]:
        """Protocol and headers for h2load, with flow-control windows that never hold a reply up."""
        headers = [f"-H{h}" for h in (JSON_HEADERS if self.json else GRPC_HEADERS)]
        return [*headers, *(["--h1"] if self.json else ["-w30", "-W30"])]


def available() -> bool:
    """Whether h2load is here."""
    return shutil.which("h2load") is not None


def run_h2load(
    target: Target,
    messages: Sequence[bytes],
    *,
    seconds: float,
    in_flight: int,
    reply_bytes: int,
) -> Loaded:
    """One h2load a message, all at once, ``in_flight`` requests each.

    Args:
        reply_bytes: what each answer has, but for a few.

    Raises:
        LoadFailed: anything but the expected answers came back.
        TooShort: a loader got no answer at all.
    """
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as name:
        folder = Path(name)
        started: list[subprocess.Popen[str]] = []
        streams = ["-c", str(in_flight), "-m1"] if target.json else ["-c1", "-m", str(in_flight)]
        for i, message in enumerate(messages):
            (folder / f"{i}.body").write_bytes(target.body(message))
            command = [
                "h2load",
                "-t1",
                "-D",
                f"{round(seconds * 1000)}ms",
                *streams,
                *target.arguments(),
            ]
            command += ["-d", str(folder / f"{i}.body"), "--log-file", str(folder / f"{i}.log")]
            started.append(
                subprocess.Popen(
                    [*command, target.url],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate()[0] for process in started]
        for output in outputs:
            _check(output, reply_bytes, in_flight)
        logs = [np.loadtxt(folder / f"{i}.log", ndmin=2) for i in range(len(messages))]
    return _joined(logs)


def _check(output: str, reply_bytes: int, in_flight: int) -> None:
    requests, traffic = _REQUESTS.search(output), _TRAFFIC.search(output)
    if requests is None or traffic is None:
        raise LoadFailed(f"h2load said:\n{output}")
    done, succeeded, failed, errored = map(int, requests.groups())
    if not (done or failed or errored):
        raise TooShort(f"no answer came in time; h2load said:\n{output}")
    mean = int(traffic[1]) / max(done, 1)
    # Replies that were under way at the end count as data but not as done.
    most = 1.05 + in_flight / max(done, 1)
    if not succeeded or failed or errored or not 0.98 < mean / reply_bytes < most:
        raise LoadFailed(f"{mean:.0f} bytes a reply, not {reply_bytes}; h2load said:\n{output}")


def _joined(logs: Sequence[npt.NDArray[np.float64]]) -> Loaded:
    """Rows are start (µs), status, duration (µs); counted is the time in which all were running."""
    begin = max(log[0, 0] for log in logs)
    end = min((log[:, 0] + log[:, 2]).max() for log in logs)
    edge = (end - begin) * _EDGE
    begin, end = begin + edge, end - edge
    rows = np.concatenate(logs)
    ends = rows[:, 0] + rows[:, 2]
    inside = (ends > begin) & (ends <= end)
    if end <= begin or not inside.any():
        raise TooShort("the loaders were never running at the same time; run longer")
    rate = float(inside.sum() / (end - begin)) * 1e6
    return Loaded(rate, len(rows), rows[inside, 2] / 1e6, "h2load")
