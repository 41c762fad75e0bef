"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

SERVER_CPU = 0
LOADER_CPU = 1


def describe() -> dict[str, object]:
    """Cores, CPU model, memory and versions."""
    return {
        "cores": os.cpu_count(),
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    value = _field(Path(f"/proc/{pid}/status"), "VmRSS")
    return int(value.split()[0]) * 1024


def rss_bytes_of_self() -> int:
    """Resident memory of this process."""
    return rss_bytes(os.getpid())


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, all its threads, in steps of about 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stolen_seconds() -> float:
    """Time that the host has kept from this machine's processors, all of them together.

    A virtual machine with a share of its host's processors stands still for tens of milliseconds
    when it has used it up, and everything in it with it.
    """
    fields = Path("/proc/stat").read_text().split(None, 9)
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def pin(cpu: int) -> None:
    """Keep this process, and those it starts from now on, on one core; on a machine of one core
    everything shares it."""
    os.sched_setaffinity(0, {cpu % (os.cpu_count() or 1)})


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
