"""ReportCacheError: blocks that were answered and that a reader could not use.

What a reader says is checked as far as it can be. The location it names must be what a lookup
answers now: addresses are never used twice, so a late report cannot touch what was written since.
Bytes that are said to be missing are looked for. That bytes are wrong, a manager that never reads
them has to believe, so how much belief may take out of the cache within a minute is limited.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from kvcm.cache.api import ReportAnswer, ReportRequest
from kvcm.cache.base import Context
from kvcm.cache.places import Part, Places
from kvcm.cache.removal import take_out
from kvcm.core import limits
from kvcm.core.allowance import Allowance
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.types import ReportKind, ReportOutcome
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Extent, State
from kvcm.metaindex.stores.common import Turn
from kvcm.storage_backends.base import Capability, DataStorageBackend

_log = logging.getLogger(__name__)
_KEYS_AT_ONCE = 256
_EXTENTS_AT_ONCE = 128
_PARTS_AT_ONCE = 512

_KINDS = {int(kind): kind for kind in ReportKind if kind is not ReportKind.UNSPECIFIED}

Uris = Mapping[str, str]


class Storages(Protocol):
    """The opened storages by name."""

    def get(self, name: str) -> DataStorageBackend | None: ...

    def available(self, name: str) -> bool: ...

    def complain(self, name: str, reader: str) -> None: ...


class _Block(NamedTuple):
    """A reported block whose location is current; ``at`` is its index in the request."""

    at: int
    extent_id: bytes
    position: int
    storage: str
    uris: Uris
    places: Places


@dataclass(slots=True)
class _Allowances:
    """Of one instance."""

    corrupt: Allowance = field(
        default_factory=lambda: Allowance(limits.REPORTED_CORRUPT_BLOCKS_PER_MINUTE_MAX)
    )
    unconfirmed: Allowance = field(
        default_factory=lambda: Allowance(limits.REPORTED_UNCONFIRMED_BLOCKS_PER_MINUTE_MAX)
    )


class Reports:
    """Use case of readers' reports.

    ``counts``: blocks reported since the start, by kind and outcome.
    """

    def __init__(self, context: Context, storages: Storages) -> None:
        self.counts: Counter[tuple[ReportKind, ReportOutcome]] = Counter()
        self._context = context
        self._storages = storages
        self._allowances: WeakKeyDictionary[InstanceIndex, _Allowances] = WeakKeyDictionary()

    async def report(self, request: ReportRequest) -> ReportAnswer:
        """ReportCacheError; calling again is safe.

        Raises:
            InstanceNotExist: unknown instance.
            InvalidArgument: too many keys, a number of locations or kinds that is not that of the
                keys, a kind that is none, a reader's name that is too long, a spec that the
                instance has not, a URI of no storage; nothing is changed.
            NotReady: the index store failed; some of the blocks may be misses already.
        """
        index = self._context.instance(request.instance_id)
        keys = (await self._context.keys(index, request)).array()
        if len(keys) > limits.REPORTED_BLOCKS_PER_REQUEST_MAX:
            raise InvalidArgument(
                f"block_keys: {len(keys)} keys in one report, "
                f"the limit is {limits.REPORTED_BLOCKS_PER_REQUEST_MAX}"
            )
        kinds = _kinds(request.kinds, len(keys))
        if len(request.locations) != len(keys):
            raise InvalidArgument(
                f"locations: {len(request.locations)} of them for {len(keys)} block_keys"
            )
        if len(request.reader.encode()) > limits.READER_BYTES_MAX:
            raise InvalidArgument(
                f"reader: {len(request.reader.encode())} bytes, the limit is "
                f"{limits.READER_BYTES_MAX}"
            )
        outcomes = [ReportOutcome.NOTHING] * len(keys)
        by_kind: dict[ReportKind, list[_Block]] = {kind: [] for kind in ReportKind}
        for block in await self._find(index, keys, request.locations, outcomes):
            by_kind[kinds[block.at]].append(block)
        for block in by_kind[ReportKind.UNREACHABLE]:
            outcomes[block.at] = ReportOutcome.ACCEPTED
        missing = await self._check(index, by_kind[ReportKind.MISSING], outcomes)
        believed = self._believe(index, by_kind[ReportKind.CORRUPT], outcomes)
        try:
            await _retire(index, [*missing, *believed], outcomes)
        finally:
            self._conclude(index, kinds, by_kind, outcomes)
            for storage in _unreadable(by_kind, outcomes):
                self._storages.complain(storage, request.reader)
        return ReportAnswer(outcomes)

    # ---- which blocks are meant --------------------------------------------------------------

    async def _find(
        self,
        index: InstanceIndex,
        keys: Sequence[int],
        locations: Sequence[Uris],
        outcomes: list[ReportOutcome],
    ) -> list[_Block]:
        """The blocks that a lookup answers where the report says; the others are STALE."""
        found: list[_Block] = []
        places: dict[bytes, Places] = {}
        turn = Turn(index.clock)
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            part = keys[start : start + _KEYS_AT_ONCE]
            rows = await index.rows_of(part)
            views = await index.views_of({e for row in rows for e, _ in row})
            for at, (key, row) in enumerate(zip(part, rows, strict=True), start):
                uris = {name: uri for name, uri in locations[at].items() if uri}
                if turn.is_over():
                    await turn.give()
                if not uris:
                    continue
                outcomes[at] = ReportOutcome.STALE
                raw = key.to_bytes(8, "little", signed=True)
                for extent_id, position in row:
                    view = views.get(extent_id)
                    if view is None or view.storage is None:
                        continue
                    if not view.serving >> position & 1 or view.key_at(position) != raw:
                        continue
                    if extent_id not in places:
                        places[extent_id] = Places(view.extent, view.owner, view.storage)
                    here = places[extent_id]
                    if here.lies_at(position, uris):
                        storage = view.extent.storage
                        found.append(_Block(at, extent_id, position, storage, uris, here))
                        break
                else:
                    _refuse_foreign(index, at, uris)
        return found

    # ---- whether it is so --------------------------------------------------------------------

    async def _check(
        self, index: InstanceIndex, blocks: Sequence[_Block], outcomes: list[ReportOutcome]
    ) -> list[_Block]:
        """Those that really are missing."""
        checks = [
            self._check_storage(index, storage, members, outcomes)
            for storage, members in _by_storage(blocks).items()
        ]
        return [block for gone in await asyncio.gather(*checks) for block in gone]

    async def _check_storage(
        self,
        index: InstanceIndex,
        storage: str,
        blocks: Sequence[_Block],
        outcomes: list[ReportOutcome],
    ) -> list[_Block]:
        backend = self._storages.get(storage)
        if backend is None or not self._storages.available(storage):
            _set(outcomes, blocks, ReportOutcome.UNCHECKED)
            return []
        if Capability.EXISTS not in backend.capabilities:
            return self._believe(index, blocks, outcomes)
        allowance = self._allowances.setdefault(index, _Allowances()).unconfirmed
        allowed = allowance.take(len(blocks), index.clock.monotonic())
        _set(outcomes, blocks[allowed:], ReportOutcome.LIMITED)
        blocks = blocks[:allowed]
        try:
            async with asyncio.timeout(limits.REPORT_CHECK_S_MAX):
                step = max(1, _PARTS_AT_ONCE // max(1, len(index.spec_bits)))
                parts = [blocks[at : at + step] for at in range(0, len(blocks), step)]
                looks = await asyncio.gather(*(_missing(backend, part) for part in parts))
                gone = [block for found in looks for block in found]
                # A file system that is no longer mounted has no files either: only a storage that
                # works is believed that it lost some.
                works = not gone or (await backend.probe()).available
        except (TimeoutError, KvcmError) as error:
            _log.warning("storage %r: reported blocks are not checked: %s", storage, error)
            works = False
        if not works:
            _set(outcomes, blocks, ReportOutcome.UNCHECKED)
            return []
        _set(outcomes, blocks, ReportOutcome.NOT_VERIFIED)
        allowance.give_back(len(gone))
        return gone

    def _believe(
        self, index: InstanceIndex, blocks: Sequence[_Block], outcomes: list[ReportOutcome]
    ) -> list[_Block]:
        """As many as reports of the instance may take out unseen."""
        allowance = self._allowances.setdefault(index, _Allowances()).corrupt
        allowed = allowance.take(len(blocks), index.clock.monotonic())
        _set(outcomes, blocks[allowed:], ReportOutcome.LIMITED)
        return list(blocks[:allowed])

    # ---- what came of it ---------------------------------------------------------------------

    def _conclude(
        self,
        index: InstanceIndex,
        kinds: Sequence[ReportKind],
        by_kind: Mapping[ReportKind, Sequence[_Block]],
        outcomes: Sequence[ReportOutcome],
    ) -> None:
        reported = Counter(zip(kinds, outcomes, strict=True))
        for kind in ReportKind:
            reported.pop((kind, ReportOutcome.NOTHING), None)
        self.counts += reported
        accepted = Counter(
            (block.storage, kind)
            for kind, blocks in by_kind.items()
            for block in blocks
            if outcomes[block.at] is ReportOutcome.ACCEPTED
        )
        for (storage, kind), count in accepted.items():
            _log.info(
                "instance %s: %d blocks on storage %r are reported %s",
                index.uid,
                count,
                storage,
                kind.name.lower(),
            )


async def _retire(
    index: InstanceIndex, blocks: Sequence[_Block], outcomes: list[ReportOutcome]
) -> None:
    """Take the blocks out of their extents, one commit an extent.

    Raises:
        NotReady, …: the first error, once all that could be changed are.
    """
    turn = Turn(index.clock)
    named: dict[bytes, int] = {}
    for block in blocks:
        named[block.extent_id] = named.get(block.extent_id, 0) | 1 << block.position
        if turn.is_over():
            await turn.give()
    taken: dict[bytes, int] = {}

    def decide(extent: Extent, state: State) -> State | None:
        eid = extent.extent_id
        # Again after an unknown outcome: what that commit took out is not serving any more.
        taken[eid] = taken.get(eid, 0) | (state.serving & named[eid])
        return take_out(index, extent, state, named[eid])

    answers = await change_many(
        index, list(named), decide, at_once=_EXTENTS_AT_ONCE, reason=Reason.REPORTED
    )
    error: Exception | None = None
    for block in blocks:
        answer = answers[block.extent_id]
        if isinstance(answer, Exception):
            error = error or answer
            outcomes[block.at] = ReportOutcome.UNCHECKED
        elif taken.get(block.extent_id, 0) >> block.position & 1:
            outcomes[block.at] = ReportOutcome.ACCEPTED
        else:
            outcomes[block.at] = ReportOutcome.STALE
    if error is not None:
        raise error


async def _missing(backend: DataStorageBackend, blocks: Sequence[_Block]) -> list[_Block]:
    """Blocks of which some part is not there, or is cut short.

    Raises:
        StorageError, CorruptRecord: it could not be found out.
    """
    wanted = [block.places.parts(block.position, block.uris) for block in blocks]
    sizes: dict[str, list[int]] = {}
    for name, size in sorted({part for parts in wanted for part in parts}):
        sizes.setdefault(name, []).append(size)
    # An object that is there in full, or not at all, needs no more than these two.
    ends = [Part(name, size) for name, found in sizes.items() for size in {found[0], found[-1]}]
    there = await _exist(backend, ends)
    between = [
        Part(name, size)
        for name, found in sizes.items()
        if there[Part(name, found[0])] and not there[Part(name, found[-1])]
        for size in found[1:-1]
    ]
    there |= await _exist(backend, between)

    def is_there(part: Part) -> bool:
        # What was not asked for lies between two ends that agree.
        return there.get(part, there[Part(part.name, sizes[part.name][0])])

    return [b for b, parts in zip(blocks, wanted, strict=True) if not all(map(is_there, parts))]


async def _exist(backend: DataStorageBackend, parts: Sequence[Part]) -> dict[Part, bool]:
    if not parts:
        return {}
    found = await backend.exists([p.name for p in parts], [p.size for p in parts])
    return dict(zip(parts, found, strict=True))


def _kinds(given: Sequence[int], count: int) -> Sequence[ReportKind]:
    """One kind a key."""
    for at, kind in enumerate(given):
        if kind not in _KINDS:
            raise InvalidArgument(f"kinds[{at}]: {kind} is not a kind of error")
    if len(given) == 1:
        return [_KINDS[given[0]]] * count
    if len(given) != count:
        raise InvalidArgument(f"kinds: {len(given)} of them for {count} block_keys; one does, too")
    return [_KINDS[kind] for kind in given]


def _unreadable(
    by_kind: Mapping[ReportKind, Sequence[_Block]], outcomes: Sequence[ReportOutcome]
) -> set[str]:
    """Storages that the reader cannot use: what it does not see may be there for others. Of blocks
    that are really missing the storage itself tells truly."""
    blind = {
        ReportKind.UNREACHABLE: ReportOutcome.ACCEPTED,
        ReportKind.CORRUPT: ReportOutcome.ACCEPTED,
        ReportKind.MISSING: ReportOutcome.NOT_VERIFIED,
    }
    return {
        block.storage
        for kind, outcome in blind.items()
        for block in by_kind[kind]
        if outcomes[block.at] is outcome
    }


def _refuse_foreign(index: InstanceIndex, at: int, uris: Uris) -> None:
    """Raises InvalidArgument for a location that this manager cannot have answered, ever."""
    for name, uri in uris.items():
        if name not in index.spec_bits:
            raise InvalidArgument(
                f"locations[{at}]: instance {index.instance.instance_id!r} has no location spec "
                f"{name[:200]!r}"
            )
        _, _, rest = uri.partition("://")
        if rest.partition("/")[0] not in index.shared.storage_types:
            raise InvalidArgument(
                f"locations[{at}]: uri {uri[:200]!r} names no storage of this manager"
            )


def _by_storage(blocks: Iterable[_Block]) -> dict[str, list[_Block]]:
    groups: dict[str, list[_Block]] = {}
    for block in blocks:
        groups.setdefault(block.storage, []).append(block)
    return groups


def _set(outcomes: list[ReportOutcome], blocks: Iterable[_Block], outcome: ReportOutcome) -> None:
    for block in blocks:
        outcomes[block.at] = outcome
