"""What a repair run is asked for, and what it found and mended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

EXAMPLES_MAX = 20
"""Examples a kind that a report shows."""
ERRORS_MAX = 100


class Kind(StrEnum):
    """Kinds of damage."""

    OWNERLESS_FILE = "ownerless_file"
    """A file that no record names; also those of instances that are gone."""
    GONE_INSTANCE = "gone_instance"
    """A folder of an instance that the registry issued and has forgotten."""
    PROBE_LEFTOVER = "probe_leftover"
    MISSING_FILE = "missing_file"
    """A file that holds published blocks is gone, or ends before them."""
    COUNTER_DRIFT = "counter_drift"
    """Shards whose counters are not what their records amount to."""
    DEAD_BYTES = "dead_bytes"
    """Extents that record other dead bytes than their files have."""
    STALE_ROW = "stale_row"
    """Rows that name an extent that does not exist, or another block."""
    MISSING_ROW = "missing_row"
    """Published blocks that no row names."""
    UNREADABLE_EXTENT = "unreadable_extent"
    UNREADABLE_TRASH = "unreadable_trash"
    UNREADABLE_ROW = "unreadable_row"
    ORPHAN_RECORD = "orphan_record"
    """Parts of an extent without its state."""
    LOST_TRASH = "lost_trash"
    """Trash whose extent has no record: nobody knows the names of its files."""


UNREADABLE = (Kind.UNREADABLE_EXTENT, Kind.UNREADABLE_TRASH, Kind.UNREADABLE_ROW)


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """What a run does.

    ``fix`` mends, otherwise it only reports; ``force`` goes on above the safeguard's share;
    ``unreadable`` also removes records that do not parse. ``instance`` (an id or a uid) and
    ``storage`` narrow it.
    """

    fix: bool = False
    force: bool = False
    unreadable: bool = True
    instance: str = ""
    storage: str = ""


@dataclass(slots=True)
class KindCount:
    """One kind: how many, how many bytes where that says anything, and the first few."""

    found: int = 0
    fixed: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StorageCount:
    """What lies on one storage, and what of it the safeguard weighs.

    ``stopped`` says why nothing was mended; empty when nothing held it up.
    """

    objects: int = 0
    bytes: int = 0
    ownerless_objects: int = 0
    ownerless_bytes: int = 0
    too_young: int = 0
    """Ownerless, but a writer may still be at work on it: left alone, no damage."""
    foreign: int = 0
    """Of a later time or of another history than this registry's: never touched."""
    needed: int = 0
    missing: int = 0
    stopped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RepairReport:
    """One run. ``errors`` name what could not be looked at or mended."""

    options: RepairOptions
    kinds: dict[Kind, KindCount] = field(default_factory=dict)
    storages: dict[str, StorageCount] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    instances: int = 0
    phase: str = "waiting"
    done: int = 0
    total: int = 0
    seconds: float = 0.0

    def found(self, kind: Kind, example: str, count: int = 1, size: int = 0) -> None:
        """Count damage."""
        entry = self.kinds.setdefault(kind, KindCount())
        entry.found += count
        entry.bytes += size
        if len(entry.examples) < EXAMPLES_MAX:
            entry.examples.append(example)

    def fixed(self, kind: Kind, count: int = 1) -> None:
        """Count what was mended."""
        self.kinds.setdefault(kind, KindCount()).fixed += count

    def error(self, what: str) -> None:
        """Note what could not be done."""
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(what)

    def storage(self, name: str) -> StorageCount:
        """The counts of a storage."""
        return self.storages.setdefault(name, StorageCount())

    @property
    def clean(self) -> bool:
        """Everything was looked at, and nothing is wrong."""
        return not self.errors and not any(count.found for count in self.kinds.values())

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "clean": self.clean,
            "fix": self.options.fix,
            "force": self.options.force,
            "instance": self.options.instance,
            "storage": self.options.storage,
            "instances": self.instances,
            "phase": self.phase,
            "done": self.done,
            "total": max(self.done, self.total),
            "seconds": round(self.seconds, 3),
            "kinds": {
                str(kind): {
                    "found": count.found,
                    "fixed": count.fixed,
                    "bytes": count.bytes,
                    "examples": list(count.examples),
                }
                for kind, count in self.kinds.items()
            },
            "storages": {
                name: {
                    "objects": count.objects,
                    "bytes": count.bytes,
                    "ownerless_objects": count.ownerless_objects,
                    "ownerless_bytes": count.ownerless_bytes,
                    "too_young": count.too_young,
                    "foreign": count.foreign,
                    "needed": count.needed,
                    "missing": count.missing,
                    "stopped": list(count.stopped),
                }
                for name, count in self.storages.items()
            },
            "errors": list(self.errors),
        }


@dataclass(slots=True)
class RepairTotals:
    """All runs of this process, for metrics. Times are wall-clock seconds, 0 before the first."""

    found: dict[Kind, int] = field(default_factory=dict)
    fixed: dict[Kind, int] = field(default_factory=dict)
    runs: int = 0
    stopped: int = 0
    errors: int = 0
    last_end: float = 0.0
    last_seconds: float = 0.0

    def add(self, report: RepairReport, now: float) -> None:
        """Count a run that ended."""
        for kind, count in report.kinds.items():
            self.found[kind] = self.found.get(kind, 0) + count.found
            self.fixed[kind] = self.fixed.get(kind, 0) + count.fixed
        self.runs += 1
        self.stopped += any(count.stopped for count in report.storages.values())
        self.errors += len(report.errors)
        self.last_end = now
        self.last_seconds = report.seconds
