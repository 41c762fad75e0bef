"""What the use cases tell whoever watches; see `kvcm.metaindex.events`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcm.cache.api import LookupRequest, StartWriteRequest
from kvcm.cache.plan import ADMISSION, Plan
from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType
from kvcm.metaindex.events import LookedUp, WriteRefused, WriteStarted
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import live_blocks, live_bytes
from kvcm.metaindex.records import Extent, State

_QUERIES = {int(query): query for query in QueryType}
"""Making one of a number takes far longer."""


def looked_up(
    index: InstanceIndex,
    request: LookupRequest,
    batch: KeyBatch,
    wanted: KeyBatch,
    at: int,
    blocks: int,
    hits: int,
    *,
    unreadable: bool = False,
) -> None:
    """A lookup of ``batch`` is answered; the rest as in `LookedUp`."""
    index.shared.watchers.tell(
        LookedUp(
            index.instance,
            _QUERIES[request.query],
            batch,
            request.token_ids,
            request.mask,
            request.sw_size,
            wanted,
            at,
            blocks,
            hits,
            unreadable,
        )
    )


def started(
    index: InstanceIndex,
    request: StartWriteRequest,
    plan: Plan,
    session_id: str,
    mask: BlockMask,
    extent: Extent | None,
    state: State | None,
) -> None:
    """A write session begins; ``extent`` and its ``state`` None: it was granted nothing."""
    granted, size, storage = b"", 0, ""
    if extent is not None and state is not None:
        granted, storage = extent.keys, extent.storage
        size = live_bytes(extent, live_blocks(extent, state))
    index.shared.watchers.tell(
        WriteStarted(
            index.instance,
            session_id,
            plan.scan.raw,
            request.token_ids,
            mask,
            granted,
            size,
            storage,
        )
    )


def refused(index: InstanceIndex, plan: Plan) -> None:
    """What a plan does not grant of what is missing."""
    for reason, keys in _refusals(plan):
        index.shared.watchers.tell(
            WriteRefused(index.instance, reason, keys, plan.storage, not plan.granted)
        )


def _refusals(plan: Plan) -> Iterator[tuple[str, bytes]]:
    granted, missing = len(plan.granted), plan.missing
    admitted = len(missing)
    if plan.verdict is not None:
        admitted = min(admitted, plan.verdict.admitted)
    if granted < admitted:
        yield plan.reason, _keys_at(plan.scan.raw, missing[granted:admitted])
    if admitted < len(missing):
        yield ADMISSION, _keys_at(plan.scan.raw, missing[admitted:])


def _keys_at(raw: bytes, indexes: Sequence[int]) -> bytes:
    """The raw keys at ascending indexes."""
    first, last = indexes[0], indexes[-1]
    if last - first == len(indexes) - 1:
        return raw[8 * first : 8 * last + 8]
    return b"".join([raw[8 * i : 8 * i + 8] for i in indexes])
