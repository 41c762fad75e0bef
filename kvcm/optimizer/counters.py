"""What a replay counts, mergeable across processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvcm.optimizer.latency import LatencyHistogram
from kvcm.optimizer.trace import Ceiling

FAULTS_SHOWN = 5
"""Wrong or lost blocks that are described; all are counted."""


class StorageCounters(msgspec.Struct):
    """What engines moved to and from one storage. Seconds are those of calls that did, summed over
    the engines."""

    blocks_written: int = 0
    blocks_read: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    writes_failed: int = 0
    """Blocks of which a part was not written."""
    reads_failed: int = 0
    """Blocks of which a part could not be read, or was wrong."""
    write_s: float = 0.0
    read_s: float = 0.0

    def merge(self, other: StorageCounters) -> None:
        """Add what ``other`` counted."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counters(msgspec.Struct):
    """Counts of one or several engines. Blocks are counted once per request that names them."""

    requests: int = 0
    requests_failed: int = 0
    """A call was answered with an error that another try does not cure."""
    requests_with_blocks: int = 0
    hit_shares: float = 0.0
    """Sum over the requests of usable hits / blocks."""
    blocks_asked: int = 0
    blocks_hit: int = 0
    """Answered by a lookup, and (when verified) really read and right."""
    blocks_lost: int = 0
    """Answered by a lookup, but the bytes were not there: a miss."""
    blocks_wrong: int = 0
    """Answered by a lookup, read, and not the right bytes."""
    blocks_reported: int = 0
    """Lost or wrong, told to the manager and accepted."""
    blocks_present: int = 0
    """No hit, but need not be written: another engine wrote or is writing them."""
    blocks_written: int = 0
    blocks_failed: int = 0
    """Granted, but writing or finishing failed."""
    blocks_refused: dict[str, int] = msgspec.field(default_factory=dict)
    """Refused by a limit, by its reason."""
    bytes_read: int = 0
    bytes_written: int = 0
    storages: dict[str, StorageCounters] = msgspec.field(default_factory=dict)
    """By ``scheme://storage``, as URIs begin."""
    retries: dict[str, int] = msgspec.field(default_factory=dict)
    """Calls tried again, by the error's name."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    """Calls given up, by the error's name."""
    late_max_s: float = 0.0
    """How far behind the recorded times a request began."""
    lookup: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    start: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    finish: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    read: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    write: LatencyHistogram = msgspec.field(default_factory=LatencyHistogram)
    faults: list[str] = msgspec.field(default_factory=list)
    """The first few wrong, lost or failed blocks, for people."""

    def merge(self, other: Counters) -> None:
        """Add what ``other`` counted."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, LatencyHistogram):
                mine.merge(theirs)
            elif name == "storages":
                for key, counters in theirs.items():
                    self.storage(key).merge(counters)
            elif isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            elif isinstance(mine, list):
                mine.extend(theirs[: FAULTS_SHOWN - len(mine)])
            elif name == "late_max_s":
                self.late_max_s = max(mine, theirs)
            else:
                setattr(self, name, mine + theirs)

    def storage(self, place: str) -> StorageCounters:
        """The counters of one storage, ``scheme://storage``."""
        return self.storages.setdefault(place, StorageCounters())

    def note(self, fault: str) -> None:
        """Keep a description, if there is room."""
        if len(self.faults) < FAULTS_SHOWN:
            self.faults.append(fault)

    @property
    def refused(self) -> int:
        """Blocks refused, for whatever reason."""
        return sum(self.blocks_refused.values())

    @property
    def hit_rate(self) -> float:
        """Block-weighted: hits of all requests / blocks of all requests."""
        return self.blocks_hit / self.blocks_asked if self.blocks_asked else 0.0

    @property
    def hit_rate_requests(self) -> float:
        """Request-weighted: mean over the requests with blocks of hits / blocks."""
        return self.hit_shares / self.requests_with_blocks if self.requests_with_blocks else 0.0


def count(table: dict[str, int], name: str, by: int = 1) -> None:
    """Add to a table of counts."""
    table[name] = table.get(name, 0) + by


def _storage_report(place: str, counters: StorageCounters) -> dict[str, Any]:
    scheme, _, name = place.partition("://")
    return {
        "storage": name,
        "type": scheme,
        "written": {
            "blocks": counters.blocks_written,
            "bytes": counters.bytes_written,
            "failed": counters.writes_failed,
            "mb_per_s": _mb_per_s(counters.bytes_written, counters.write_s),
        },
        "read": {
            "blocks": counters.blocks_read,
            "bytes": counters.bytes_read,
            "failed": counters.reads_failed,
            "mb_per_s": _mb_per_s(counters.bytes_read, counters.read_s),
        },
    }


def _mb_per_s(count: int, seconds: float) -> float:
    return round(count / seconds / 1e6, 2) if seconds > 0 else 0.0


def as_report(
    total: Counters, best: Ceiling, wall_s: float, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The machine form of a replay's result. Latencies are in milliseconds.

    ``hit_rate.blocks`` and ``ceiling.blocks`` are block-weighted (hits / blocks over everything),
    ``….requests`` request-weighted (the mean of each request's share). ``mb_per_s`` is what one
    engine reached while it moved bytes to or from that storage.
    """
    return {
        **extra,
        "wall_s": round(wall_s, 4),
        "requests": total.requests,
        "requests_failed": total.requests_failed,
        "requests_per_s": round(total.requests / wall_s, 2) if wall_s > 0 else 0.0,
        "blocks": {
            "asked": total.blocks_asked,
            "hit": total.blocks_hit,
            "lost": total.blocks_lost,
            "wrong": total.blocks_wrong,
            "reported": total.blocks_reported,
            "present": total.blocks_present,
            "written": total.blocks_written,
            "refused": total.refused,
            "failed": total.blocks_failed,
        },
        "refused_by_reason": dict(sorted(total.blocks_refused.items())),
        "hit_rate": {
            "blocks": round(total.hit_rate, 6),
            "requests": round(total.hit_rate_requests, 6),
        },
        "ceiling": {
            "blocks": round(best.block_rate, 6),
            "requests": round(best.request_rate, 6),
            "distinct_blocks": best.distinct,
        },
        "bytes_read": total.bytes_read,
        "bytes_written": total.bytes_written,
        "storages": [_storage_report(*item) for item in sorted(total.storages.items())],
        "latency_ms": {
            name: getattr(total, name).summary_ms()
            for name in ("lookup", "start", "finish", "read", "write")
        },
        "retries": dict(sorted(total.retries.items())),
        "errors": dict(sorted(total.errors.items())),
        "late_max_s": round(total.late_max_s, 3),
        "faults": total.faults,
    }
