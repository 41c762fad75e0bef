"""What is asked for, written and lost, counted by instance for those with most traffic.

Series are bounded: so many instances have counts of their own, all others share those of their
group (``other``), and so many groups have, all others share one. Who has counts of its own gets new
ones when it comes and takes them along when it goes; so a count that is shown never goes back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcm.core.types import Instance, QueryType
from kvcm.metaindex.events import (
    BlocksRemoved,
    Cleared,
    Event,
    LookedUp,
    Reason,
    WriteFinished,
    WriteRefused,
    WriteStarted,
)

log = logging.getLogger(__name__)

OTHER = "other"
"""Stands for whatever has no counts of its own; an instance or group of that name never has."""
FOLLOW_PERIOD_S = 10.0
_HALF_LIFE_S = 300.0
_TIMES_MORE = 2.0
"""So much more traffic than one that has counts of its own makes it give them up."""
_REASONS = {reason: reason.name.lower() for reason in Reason}
_ENDINGS = {
    Reason.FINISHED: "finished",
    Reason.EXPIRED: "expired",
    Reason.ABANDONED: "abandoned",
}


@dataclass(slots=True)
class Asked:
    """Lookups of one kind. ``ratios``: the sum of each lookup's share of blocks that were hits;
    those that asked for nothing (all masked) are ``empty`` and have none."""

    full: int = 0
    partial: int = 0
    miss: int = 0
    empty: int = 0
    blocks: int = 0
    hits: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    ratios: float = 0.0


@dataclass(slots=True)
class Counts:
    """Of an instance, or of all in a group that have none of their own."""

    group: str
    instance_id: str
    asked: dict[QueryType, Asked] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    """Write sessions by what was granted (blocks, nothing)."""
    granted_blocks: int = 0
    granted_bytes: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Write sessions that were granted blocks, by how they ended; likewise below."""
    ended_blocks: Counter[str] = field(default_factory=Counter)
    ended_bytes: Counter[str] = field(default_factory=Counter)
    removed_blocks: Counter[str] = field(default_factory=Counter)
    removed_bytes: Counter[str] = field(default_factory=Counter)
    refused_blocks: Counter[str] = field(default_factory=Counter)

    def looked_up(self, event: LookedUp) -> None:
        """Hot, and so in one piece."""
        asked = self.asked.get(event.query)
        if asked is None:
            asked = self.asked[event.query] = Asked()
        blocks, hits = event.blocks, event.hits
        if not blocks:
            asked.empty += 1
            return
        if hits >= blocks:
            asked.full += 1
            asked.ratios += 1.0
        elif hits:
            asked.partial += 1
            asked.ratios += hits / blocks
        else:
            asked.miss += 1
        size = event.instance.block_size
        asked.blocks += blocks
        asked.tokens += blocks * size
        asked.hits += hits
        asked.hit_tokens += hits * size

    def started(self, event: WriteStarted) -> None:
        self.starts["blocks" if event.granted else "nothing"] += 1
        self.granted_blocks += len(event.granted) // 8
        self.granted_bytes += event.size

    def refused(self, event: WriteRefused) -> None:
        self.refused_blocks[event.reason] += len(event.keys) // 8

    def finished(self, event: WriteFinished) -> None:
        how = _ENDINGS.get(event.how, "cancelled")
        self.ends[how] += 1
        if event.how is Reason.FINISHED:
            self.ended_blocks["finished"] += event.published.bit_count()
            self.ended_bytes["finished"] += event.published_size
            self.ended_blocks["failed"] += (event.held & ~event.success).bit_count()
            self.ended_bytes["failed"] += event.failed_size
        else:
            self.ended_blocks[how] += event.held.bit_count()
            self.ended_bytes[how] += event.size

    def removed(self, event: BlocksRemoved) -> None:
        reason = _REASONS[event.reason]
        self.removed_blocks[reason] += event.blocks
        self.removed_bytes[reason] += event.size


@dataclass(slots=True)
class _Member:
    """An instance. ``calls`` are its lookups and writes; ``load`` is what they add up to, of late;
    ``active_at`` is when there was one last, seen at most `FOLLOW_PERIOD_S` later."""

    instance: Instance
    counts: Counts
    active_at: float
    calls: int = 0
    calls_seen: int = 0
    load: float = 0.0
    is_closed: bool = False
    is_own: bool = False
    """Its counts are."""


_COUNT: Mapping[type, Callable[[Counts, Any], None]] = {
    LookedUp: Counts.looked_up,
    WriteStarted: Counts.started,
    WriteRefused: Counts.refused,
    WriteFinished: Counts.finished,
    BlocksRemoved: Counts.removed,
}
_TRAFFIC = frozenset({LookedUp, WriteStarted, WriteRefused})


class Traffic:
    """A watcher that counts, and the background loop that follows who comes and goes.

    Args:
        registered: the groups, the instances, and those that are being removed, as they are now.
        instances_max: how many instances have counts of their own; likewise ``groups_max``.
        silent_after_s: an instance without lookups and writes for so long is silent.
    """

    name = "traffic"
    period_s = FOLLOW_PERIOD_S

    def __init__(
        self,
        registered: Callable[[], tuple[Iterable[str], Iterable[Instance], Iterable[Instance]]],
        now: Callable[[], float],
        *,
        instances_max: int,
        groups_max: int,
        silent_after_s: float,
    ) -> None:
        self._registered = registered
        self._now = now
        self._instances_max = instances_max
        self._groups_max = groups_max
        self._silent_after_s = silent_after_s
        self._members: dict[str, _Member] = {}
        self._own: dict[str, _Member] = {}
        """By uid, those with counts of their own."""
        self._others: dict[str, Counts] = {OTHER: Counts(OTHER, OTHER)}
        """By group label."""
        self._followed_at = now()
        self._warned: set[str] = set()

    def __call__(self, event: Event) -> None:
        """Count an event."""
        member = self._members.get(event.instance.uid)
        if member is None:
            # Its group may be new, too.
            self.refresh()
            member = self._members.get(event.instance.uid) or self._join(event.instance)
        kind = type(event)
        if kind is LookedUp and member.is_own:
            # Nearly all of it.
            member.calls += 1
            member.counts.looked_up(event)  # type: ignore[arg-type]  # its type was just looked at
            return
        if kind in _TRAFFIC:
            member.calls += 1
            if not member.is_own and len(self._own) < self._instances_max:
                self._promote(member)
        if not isinstance(event, Cleared):
            _COUNT[kind](member.counts, event)
        elif event.reason is Reason.INSTANCE:
            self._close(member)

    async def run_once(self, now: float) -> None:
        """Follow the registry, and give counts of their own to those with most traffic."""
        self.refresh()
        passed, self._followed_at = now - self._followed_at, now
        keep = 0.5 ** (max(0.0, passed) / _HALF_LIFE_S)
        for member in self._members.values():
            fresh = member.calls - member.calls_seen
            member.calls_seen = member.calls
            member.load = member.load * keep + fresh
            if fresh:
                member.active_at = now
                self._warned.discard(member.instance.uid)
        self._rank()
        self._warn(now)

    def refresh(self) -> None:
        """Forget groups and instances that are gone and know those that came."""
        groups, active, closing = self._registered()
        self._follow_groups(groups)
        known = set()
        for instance in active:
            known.add(instance.uid)
            if instance.uid not in self._members:
                self._join(instance)
        for instance in closing:
            known.add(instance.uid)
            if (member := self._members.get(instance.uid)) is not None:
                self._close(member)
        for uid in self._members.keys() - known:
            self._demote(self._members.pop(uid))
            self._warned.discard(uid)

    def group_label(self, group: str) -> str:
        """The group's name, or `OTHER` when it has no counts of its own."""
        return group if group in self._others else OTHER

    def instance_label(self, uid: str) -> str:
        """The instance's id, or `OTHER` when it has no counts of its own."""
        member = self._own.get(uid)
        return member.counts.instance_id if member is not None else OTHER

    def groups(self) -> list[str]:
        """The labels of all groups."""
        return list(self._others)

    def counts(self) -> Iterator[Counts]:
        """All that are shown."""
        yield from self._others.values()
        for member in self._own.values():
            yield member.counts

    def silent(self, now: float) -> list[tuple[str, str]]:
        """Group label and id of instances without lookups and writes, the longest silent first."""
        found = [m for m in self._members.values() if self._is_silent(m, now)]
        found.sort(key=lambda member: member.active_at)
        return [
            (self.group_label(m.instance.instance_group), m.instance.instance_id) for m in found
        ]

    def _is_silent(self, member: _Member, now: float) -> bool:
        quiet = member.calls == member.calls_seen and not member.is_closed
        return quiet and now - member.active_at >= self._silent_after_s

    def _join(self, instance: Instance) -> _Member:
        counts = self._others[self.group_label(instance.instance_group)]
        member = self._members[instance.uid] = _Member(instance, counts, self._now())
        return member

    def _promote(self, member: _Member) -> None:
        instance, group = member.instance, self.group_label(member.instance.instance_group)
        if member.is_closed or instance.instance_id == OTHER or group == OTHER:
            return
        self._own[instance.uid] = member
        member.is_own = True
        member.counts = Counts(group, instance.instance_id)

    def _close(self, member: _Member) -> None:
        """It is being removed: what is freed counts among the others."""
        member.is_closed = True
        self._demote(member)

    def _demote(self, member: _Member) -> None:
        if self._own.pop(member.instance.uid, None) is not None:
            member.is_own = False
            member.counts = self._others[self.group_label(member.instance.instance_group)]

    def _rank(self) -> None:
        others = [m for m in self._members.values() if m.load and not m.is_own]
        others.sort(key=lambda member: member.load, reverse=True)
        for member in others:
            if len(self._own) >= self._instances_max:
                least = min(self._own.values(), key=lambda m: m.load, default=None)
                if least is None or member.load <= _TIMES_MORE * least.load:
                    return
                self._demote(least)
            self._promote(member)

    def _follow_groups(self, groups: Iterable[str]) -> None:
        present = list(groups)
        for name in self._others.keys() - {OTHER, *present}:
            del self._others[name]
            self._move(name, self._others[OTHER])
        for name in present:
            if name not in self._others and len(self._others) <= self._groups_max:
                counts = self._others[name] = Counts(name, OTHER)
                self._move(name, counts)

    def _move(self, group: str, counts: Counts) -> None:
        """All instances of a group count there from now on."""
        for member in self._members.values():
            if member.instance.instance_group == group:
                self._own.pop(member.instance.uid, None)
                member.is_own = False
                member.counts = counts

    def _warn(self, now: float) -> None:
        for member in self._members.values():
            uid = member.instance.uid
            if uid not in self._warned and self._is_silent(member, now):
                self._warned.add(uid)
                log.warning(
                    "instance %r of group %r has not looked up or written anything for %.0f s",
                    member.instance.instance_id,
                    member.instance.instance_group,
                    now - member.active_at,
                )
