"""Changing many extents of an instance at once.

Commits are batched per home shard and sent together. Every extent has an outcome of its own, so
that a shard that is away, or a record that keeps changing, holds up no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcm.core.errors import InternalError, KvcmError, NotReady, OutcomeUnknown, StaleFence
from kvcm.core.keys import array_of
from kvcm.metaindex import records
from kvcm.metaindex.events import Reason
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import Change, Decide, Found, InstanceIndex, Step
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.reading import RowRefs
from kvcm.metaindex.records import Extent, Trash
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Compare, Mutation, Outcome, Table, Write
from kvcm.metaindex.stores.common import Turn

EXTENTS_AT_ONCE = 32
"""Extents that are read, and then committed, together: some 1.5 ms of work."""
_ROWS_AT_ONCE = 512


async def change_many(
    index: InstanceIndex,
    extent_ids: Iterable[bytes],
    decide: Decide,
    *,
    keep_bytes: bool = False,
    at_once: int = EXTENTS_AT_ONCE,
    reason: Reason = Reason.OTHER,
) -> dict[bytes, Change | Exception | None]:
    """``InstanceIndex.change`` of many extents, ``at_once`` of them in one round trip.

    Returns:
        Per extent what was found and done, None when there is no such extent, or the error that
        ``change`` would have raised.
    """
    ids = list(dict.fromkeys(extent_ids))
    answers: dict[bytes, Change | Exception | None] = {}
    for at in range(0, len(ids), at_once):
        await _change_some(index, ids[at : at + at_once], decide, keep_bytes, reason, answers)
    return answers


async def _change_some(
    index: InstanceIndex,
    ids: Sequence[bytes],
    decide: Decide,
    keep_bytes: bool,
    reason: Reason,
    answers: dict[bytes, Change | Exception | None],
) -> None:
    steps: list[Step] = []
    turn = Turn(index.clock)
    for extent_id, found in (await index.read_many(ids)).items():
        if found is None or isinstance(found, KvcmError):
            answers[extent_id] = found
            continue
        extent, state = found
        wanted = decide(extent, state)
        if wanted is None:
            answers[extent_id] = index.unchanged(extent, state, reason)
        else:
            steps.append(index.step(extent, state, wanted, keep_bytes))
        if turn.is_over():
            await turn.give()
    outcomes = await _commit_steps(index, steps)
    away: dict[int, KvcmError] = {}
    for step, outcome in zip(steps, outcomes, strict=True):
        extent_id = step.extent.extent_id
        done = index.committed(step, outcome, reason) if isinstance(outcome, Outcome) else None
        if done is not None:
            answers[extent_id] = done
        elif isinstance(outcome, Outcome | OutcomeUnknown | StaleFence):
            answers[extent_id] = await _alone(index, extent_id, decide, keep_bytes, reason, away)
        else:
            answers[extent_id] = outcome
        if turn.is_over():
            await turn.give()


async def _commit_steps(index: InstanceIndex, steps: Sequence[Step]) -> list[Outcome | Exception]:
    for step in steps:
        index.hide(step.extent.extent_id)
    try:
        return await _commit_all(index, [(s.extent.extent_id, s.mutation) for s in steps])
    finally:
        for step in steps:
            index.hide(step.extent.extent_id)


async def _commit_all(
    index: InstanceIndex, mutations: Sequence[tuple[bytes, Mutation]]
) -> list[Outcome | Exception]:
    """Commit one mutation an extent, all of a home shard together; what became of each."""
    parts: dict[int, list[int]] = {}
    for at, (extent_id, _) in enumerate(mutations):
        parts.setdefault(home_shard(extent_id), []).append(at)
    answers = await index.shards.commit_each(
        [(number, [mutations[at][1] for at in members]) for number, members in parts.items()]
    )
    out: dict[int, Outcome | Exception] = {}
    for members, answer in zip(parts.values(), answers, strict=True):
        if isinstance(answer, Exception):
            out |= dict.fromkeys(members, answer)
        else:
            out |= zip(members, answer, strict=True)
    return [out[at] for at in range(len(mutations))]


async def _alone(
    index: InstanceIndex,
    extent_id: bytes,
    decide: Decide,
    keep_bytes: bool,
    reason: Reason,
    away: dict[int, KvcmError],
) -> Change | Exception | None:
    """The change by itself, unless one in the same shard just failed."""
    home = home_shard(extent_id)
    if home in away:
        return away[home]
    try:
        return await index.change(extent_id, decide, keep_bytes=keep_bytes, reason=reason)
    except KvcmError as error:
        if isinstance(error, NotReady | StaleFence):
            away[home] = error
        return error


async def replace_trash(
    index: InstanceIndex, pairs: Sequence[tuple[Trash, Trash | None]]
) -> list[Exception | None]:
    """The bytes of these are deleted: each entry goes, or the one beside it takes its place.

    Returns:
        The error for each that is not known to be replaced; calling again is safe.
    """
    mutations: list[tuple[bytes, Mutation]] = []
    turn = Turn(index.clock)
    for trash, again in pairs:
        if turn.is_over():
            await turn.give()
        freed = trash.counted - (again.counted if again is not None else 0)
        value = records.encode_trash(again) if again is not None else None
        mutation = Mutation(
            writes=[Write(Table.TRASH, trash.key, value)],
            compare=[Compare(Table.TRASH, trash.key, records.encode_trash(trash), whole=True)],
            counters=to_counters(trash.storage, Delta(trash_bytes=-freed)),
        )
        mutations.append((trash.extent_id, mutation))
    answers: list[Exception | None] = []
    for (trash, again), outcome in zip(pairs, await _commit_all(index, mutations), strict=True):
        if not isinstance(outcome, Outcome):
            answers.append(outcome)
            continue
        # A conflict, too: a commit before, whose answer never came, did it.
        answers.append(None)
        if again is not None:
            index.trash[trash.key] = again
        else:
            index.trash.pop(trash.key, None)
    return answers


async def delete_rows(index: InstanceIndex, extents: Sequence[Extent]) -> int:
    """Remove the references to extents that are gone; other references of their rows stay.

    Returns:
        Rows changed.

    Raises:
        Unavailable, OutcomeUnknown, StaleFence: the store; some rows may be changed.
    """
    gone = {extent.extent_id for extent in extents}
    keys = list(dict.fromkeys(k for extent in extents for k in array_of(extent.keys)))
    changed = 0
    turn = Turn(index.clock)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        part = keys[start : start + _ROWS_AT_ONCE]
        groups: dict[int, list[Mutation]] = {}
        for key, value in zip(part, await index.row_values(part), strict=True):
            mutation = _without(key, value, index.refs_of(value), gone)
            if mutation is not None:
                groups.setdefault(shard_of(key, index.shard_count), []).append(mutation)
                changed += 1
            if turn.is_over():
                await turn.give()
        if groups:
            await index.shards.commit(list(groups.items()))
            await turn.give()
    return changed


def _without(key: int, value: bytes | None, refs: RowRefs, gone: set[bytes]) -> Mutation | None:
    rest = [ref for ref in refs if ref[0] not in gone]
    if value is None or len(rest) == len(refs):
        return None
    raw = key.to_bytes(8, "little", signed=True)
    left = b"".join(records.encode_ref(e, p) for e, p in rest) or None
    return Mutation(
        writes=[Write(Table.ROWS, raw, left)],
        compare=[Compare(Table.ROWS, raw, value, whole=True)],
    )


async def forget_many(index: InstanceIndex, found: Sequence[Found]) -> list[Exception | None]:
    """Remove the records of retired or aborted extents whose trash is empty, after their rows.

    Returns:
        The error for each whose records may still be there.
    """
    try:
        await delete_rows(index, [extent for extent, _ in found])
    except KvcmError as error:
        return [error for _ in found]
    mutations = []
    for extent, state in found:
        eid = extent.extent_id
        chunks = range(records.chunk_count(extent.count))
        writes = [Write(Table.EXTENTS, records.chunk_key(eid, i), None) for i in chunks]
        writes += [Write(Table.STATES, eid, None), Write(Table.DUE, eid, None)]
        compare = [Compare(Table.STATES, eid, state.version)]
        mutations.append((eid, Mutation(writes=writes, compare=compare)))
        index.hide(eid)
    answers: list[Exception | None] = []
    for (extent, _), outcome in zip(found, await _commit_all(index, mutations), strict=True):
        if outcome is Outcome.APPLIED:
            index.book.forget(extent.extent_id)
            answers.append(None)
        elif outcome is Outcome.CONFLICT:
            answers.append(InternalError(f"extent {extent.extent_id.hex()} changed meanwhile"))
        else:
            answers.append(outcome)
    return answers
