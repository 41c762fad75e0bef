"""Windows of all instances and groups, and the fates of the sampled keys. Pure: time is passed in.

Nothing here takes more than about 2 ms for ``slice_keys`` keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvcm.core.limits import CEILING_GROUPS_MAX, CEILING_INSTANCES_MAX
from kvcm.core.mixing import Hashes, hashes, seed_of
from kvcm.observability import ceiling_file, ceiling_report, tally
from kvcm.observability.causes import Fate, Sample, SavedKeys
from kvcm.observability.ceiling_report import CeilingReport, ScopeReport
from kvcm.observability.distinct import integers
from kvcm.observability.tally import Cause
from kvcm.observability.windows import SECONDS, Windows

_SLICE_KEYS = 512
_SLICE_SAMPLED = 64


class Slice:
    """Keys of one instance that are counted together: pieces of lookups."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.raw: list[bytes] = []
        self.ends: list[int] = []
        """Of each piece, in keys."""
        self.found_to: list[int] = []
        """Where the hits of each piece end."""
        self.hits = 0
        self.unreadable: list[bool] = []
        self.requests = 0

    def add(self, raw: bytes, hits: int, *, unreadable: bool, is_first: bool) -> None:
        """The next piece.

        Args:
            raw: little-endian int64 keys.
            hits: leading ones that were found.
            unreadable: the first one that was not is on a storage that cannot be read.
            is_first: the piece begins a request.
        """
        start = self.ends[-1] if self.ends else 0
        self.raw.append(raw)
        self.ends.append(start + len(raw) // 8)
        self.found_to.append(start + hits)
        self.hits += hits
        self.unreadable.append(unreadable)
        self.requests += is_first


class Counts:
    """What is known of the requests of the last day.

    Attributes:
        evicted: bytes that each group has evicted, ever.
    """

    def __init__(self, sample: Sample | None = None) -> None:
        self.sample = Sample() if sample is None else sample
        self.evicted: dict[str, int] = {}
        self._groups: dict[str, Windows] = {}
        self._instances: dict[str, Windows] = {}
        self._registered: Mapping[str, tuple[str, str]] = {}
        self._capacities: Mapping[str, int | None] = {}
        self._trimmed_s: dict[str, int] = {}

    def follow(
        self, registered: Mapping[str, tuple[str, str]], capacities: Mapping[str, int | None]
    ) -> None:
        """Drop what is known of instances and groups that are gone.

        Args:
            registered: (instance id, group) by instance uid.
            capacities: bytes that each group may hold; None = no limit.
        """
        self._registered, self._capacities = registered, capacities
        _keep(self._instances, registered)
        _keep(self._trimmed_s, registered)
        _keep(self._groups, capacities)
        _keep(self.evicted, capacities)

    @property
    def slice_keys(self) -> int:
        """So many keys are to be counted at a time: following one's fate takes ten times as long
        as counting it."""
        return min(_SLICE_KEYS, _SLICE_SAMPLED * self.sample.weight)

    def all(self) -> list[Windows]:
        """The windows there are."""
        return [*self._instances.values(), *self._groups.values()]

    def forget_idle(self, now_s: float) -> None:
        """Make room for others; and begin anew after the clock was set back by much."""
        for known in (self._instances, self._groups):
            for key in [k for k, w in known.items() if w.idle or w.is_ahead(now_s)]:
                del known[key]

    # ---- what happened -------------------------------------------------------------------------

    def asked(self, uid: str, asked: Slice, now_s: float) -> None:
        """Count lookups of one instance."""
        values = hashes(b"".join(asked.raw), seed_of(uid))
        keys = integers(values)
        into = list(self._windows(uid, asked.group, now_s))
        for windows in into:
            windows.add(keys)
            windows.counts[tally.REQUESTS] += asked.requests
            windows.counts[tally.BLOCKS] += len(values)
            windows.counts[tally.HITS] += asked.hits
        self._tell_causes(uid, asked, values, into, int(now_s))

    def became(self, uid: str, raw: bytes, fate: Fate, now_s: float, *, evicted: int = 0) -> None:
        """Something else happened to keys.

        Args:
            evicted: bytes that their group had evicted before them.
        """
        chosen = self.sample.chosen(hashes(raw, seed_of(uid)))
        self.sample.become((value for _, value in chosen), fate, int(now_s), evicted)

    def count_evicted(self, group: str, size: int) -> int:
        """A group has evicted so many bytes more; returns how many before."""
        before = self.evicted.get(group, 0)
        if size and group in self._capacities:
            self.evicted[group] = before + size
        return before

    def trimmed(self, uid: str, now_s: float) -> None:
        """All blocks of an instance are gone."""
        if uid in self._registered:
            self._trimmed_s[uid] = int(now_s)

    def _windows(self, uid: str, group: str, now_s: float) -> Iterator[Windows]:
        for known, key, is_known, limit in (
            (self._instances, uid, uid in self._registered, CEILING_INSTANCES_MAX),
            (self._groups, group, group in self._capacities, CEILING_GROUPS_MAX),
        ):
            found = known.get(key)
            if found is None and is_known and len(known) < limit:
                found = known[key] = Windows(now_s)
            if found is not None:
                yield found

    def _tell_causes(
        self, uid: str, asked: Slice, values: Hashes, into: list[Windows], now_s: int
    ) -> None:
        sample = self.sample
        evicted = self.evicted.get(asked.group, 0)
        trimmed_s = self._trimmed_s.get(uid, 0)
        chosen = sample.chosen(values)
        parts = np.searchsorted(asked.ends, [place for place, _ in chosen], side="right").tolist()
        found: dict[Cause, int] = defaultdict(int)
        more: list[int] = []
        for (place, value), part in zip(chosen, parts, strict=True):
            if place < asked.found_to[part]:
                sample.hit(value, now_s)
                continue
            cause, age_s, need = sample.miss(
                value,
                now_s,
                evicted=evicted,
                trimmed_s=trimmed_s,
                unreadable=asked.unreadable[part],
            )
            found[cause] += 1
            if cause is Cause.EVICTED:
                more += (tally.age_at(age_s), tally.need_at(need))
        counts = tally.empty()
        counts[tally.SAMPLED] = sum(found.values())
        for cause, count in found.items():
            counts[tally.cause_at(cause)] = count * sample.weight
        if more:
            np.add.at(counts, more, sample.weight)
        for windows in into:
            windows.counts += counts

    # ---- what it says --------------------------------------------------------------------------

    def scopes(self, now_s: float) -> Iterator[ScopeReport]:
        """By group, itself before its instances; one step of less than 2 ms each."""
        known = [(name, "", windows) for name, windows in self._groups.items()]
        for uid, windows in self._instances.items():
            if uid in self._registered:
                instance_id, group = self._registered[uid]
                known.append((group, instance_id, windows))
        for group, instance_id, windows in sorted(known, key=lambda scope: scope[:2]):
            capacity = self._capacities.get(group)
            shown = (
                ceiling_report.report(windows.window(name, now_s), capacity) for name in SECONDS
            )
            yield ScopeReport(group, instance_id, tuple(shown))

    def report(
        self, scopes: tuple[ScopeReport, ...], now_s: float, uncounted: int
    ) -> CeilingReport:
        """All of it."""
        is_full = len(self._instances) >= CEILING_INSTANCES_MAX
        without = len(self._registered.keys() - self._instances.keys()) if is_full else 0
        return CeilingReport(
            at_s=now_s,
            since_s=min((windows.began_s for windows in self.all()), default=0.0),
            scopes=scopes,
            sample_weight=self.sample.weight,
            uncounted=uncounted,
            instances_without=without,
        )

    # ---- a file --------------------------------------------------------------------------------

    def records(self) -> Iterator[ceiling_file.Content]:
        """For a file, in steps of less than 2 ms; nothing may change meanwhile."""
        for is_group, known in ((True, self._groups), (False, self._instances)):
            for name, windows in known.items():
                yield ceiling_file.Scope(is_group, name, windows.save())
        yield from map(ceiling_file.Keys, self.sample.save())
        evicted, trimmed_s = dict(self.evicted), dict(self._trimmed_s)
        yield ceiling_file.Rest(self.sample.halvings, evicted, trimmed_s)

    def take_over(self, records: list[ceiling_file.Content]) -> None:
        """What a file had, of those that are registered. All of it or nothing.

        Raises:
            InvalidArgument, ValueError: damaged.
        """
        groups: dict[str, Windows] = {}
        instances: dict[str, Windows] = {}
        keys: list[SavedKeys] = []
        rest = ceiling_file.Rest(0, {}, {})
        for record in records:
            if isinstance(record, ceiling_file.Keys):
                keys.append(record.keys)
            elif isinstance(record, ceiling_file.Rest):
                rest = record
            elif record.is_group and record.name in self._capacities:
                groups[record.name] = Windows.load(record.windows)
            elif not record.is_group and record.name in self._registered:
                instances[record.name] = Windows.load(record.windows)
        self.sample.load(rest.halvings, keys)
        self.evicted, self._trimmed_s = rest.evicted, rest.trimmed_s
        _keep(self.evicted, self._capacities)
        _keep(self._trimmed_s, self._registered)
        self._groups, self._instances = groups, instances


def _keep(known: dict[str, Any], wanted: Mapping[str, object]) -> None:
    for key in [key for key in known if key not in wanted]:
        del known[key]
