"""The form of trace events: one JSON object for each thing that happens (docs/protocol.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvcm.core.keys import KeyBatch, KeyForm, array_of
from kvcm.core.mask import BlockMask
from kvcm.metaindex import bits
from kvcm.metaindex.events import (
    BlocksRemoved,
    Cleared,
    Event,
    LookedUp,
    Reason,
    WriteFinished,
    WriteRefused,
    WriteStarted,
    keys_at,
)

LOOKUP = "GetCacheLocation"
START = "StartWriteCache"
REFUSED = "StartWriteCacheRefused"
FINISH = "FinishWriteCache"
RECLAIM = "CacheReclaimSubmit"
REMOVE = "RemoveCache"
TRIM = "TrimCache"
TYPES = (LOOKUP, START, REFUSED, FINISH, RECLAIM, REMOVE, TRIM)
"""All types, in the order of docs/protocol.md."""

_RECLAIMED = (Reason.EVICTED, Reason.AGED)
STEP_BYTES = 1 << 14
"""Of keys that are encoded at once."""
_EVENT_BYTES = 512
"""What an event takes beside its keys, about."""


def type_of(event: Event) -> str:
    """Its ``type``."""
    if isinstance(event, LookedUp):
        return LOOKUP
    if isinstance(event, WriteStarted):
        return START
    if isinstance(event, WriteRefused):
        return REFUSED
    if isinstance(event, WriteFinished):
        return FINISH
    if isinstance(event, Cleared):
        return TRIM
    return RECLAIM if event.reason in _RECLAIMED else REMOVE


def size_of(event: Event) -> int:
    """Bytes of memory that waiting for its turn takes, about."""
    size = _EVENT_BYTES
    if isinstance(event, LookedUp):
        size += len(event.batch.data)
    elif isinstance(event, WriteStarted):
        size += len(event.asked) + len(event.granted)
    elif not isinstance(event, Cleared):
        size += len(event.keys)
    if isinstance(event, LookedUp | WriteStarted) and event.tokens is not None:
        size += len(event.tokens.data)
    return size


def numbers_of(event: Event) -> dict[str, KeyBatch]:
    """The fields that are long arrays of integers."""
    if isinstance(event, Cleared):
        return {}
    if isinstance(event, LookedUp):
        keys = event.batch
    elif isinstance(event, WriteStarted):
        keys = KeyBatch(KeyForm.RAW, event.asked)
    elif isinstance(event, WriteFinished):
        published = keys_at(event.keys, event.published) if event.keys else b""
        keys = KeyBatch(KeyForm.RAW, published)
    else:
        keys = KeyBatch(KeyForm.RAW, event.keys)
    if not isinstance(event, LookedUp | WriteStarted):
        return {"keys": keys}
    return {"keys": keys, "tokens": event.tokens or KeyBatch(KeyForm.RAW, b"")}


def number_steps(batch: KeyBatch) -> Iterator[bytes]:
    """The JSON of an array's elements, joined with commas, below a millisecond each.

    Raises:
        InvalidArgument: malformed varints.
    """
    if len(batch.data) <= STEP_BYTES:
        if batch.data:
            yield msgspec.json.encode(batch.array().tolist())[1:-1]
        return
    at = 0
    while at < len(batch.data):
        raw, at = batch.piece(at, STEP_BYTES // 10)
        yield msgspec.json.encode(array_of(raw).tolist())[1:-1]


def encode(event: Event, event_id: str, at_us: int, numbers: Mapping[str, bytes]) -> bytes:
    """The JSON of an event on one line, without its end.

    Args:
        at_us: when it happened, in epoch microseconds.
        numbers: the elements of its ``numbers_of`` fields, as `number_steps` makes them.
    """
    instance = event.instance
    kind = type_of(event)
    common = {
        "id": event_id,
        "source": instance.instance_id,
        "component": "reclaimer" if kind == RECLAIM else "cache",
        "type": kind,
        "trigger_time_us": at_us,
        "instance_group": instance.instance_group,
        "block_size": instance.block_size,
    }
    arrays = {name: msgspec.Raw(b"[%b]" % elements) for name, elements in numbers.items()}
    return msgspec.json.encode(common | arrays | _fields(event))


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, LookedUp):
        return {
            "query_type": f"QT_{event.query.name}",
            "block_mask": _mask(event.mask),
            "sw_size": event.sw_size,
            "asked_blocks": event.blocks,
            "hit_blocks": event.hits,
        }
    if isinstance(event, WriteStarted):
        return {
            "write_session_id": event.session_id,
            "block_mask": _mask(event.mask),
            "granted_blocks": len(event.granted) // 8,
            "bytes": event.size,
            "storage": event.storage,
        }
    if isinstance(event, WriteRefused):
        return {
            "reason": event.reason,
            "is_whole": event.whole,
            "storage": event.storage,
        }
    if isinstance(event, WriteFinished):
        return _finished(event)
    if isinstance(event, BlocksRemoved):
        return {
            "blocks": event.blocks,
            "bytes": event.size,
            "reason": event.reason.name.lower(),
            "policy": event.policy.name.lower(),
            "storage": event.storage,
            "was_open": event.was_open,
        }
    return {"reason": event.reason.name.lower()}


def _finished(event: WriteFinished) -> dict[str, Any]:
    return {
        "write_session_id": event.session_id,
        "success_block": _mask(_positions(event.success, event.count)),
        "published_blocks": event.published.bit_count(),
        "bytes": event.published_size,
        "reason": event.how.name.lower(),
        "storage": event.storage,
    }


def _positions(positions: int, count: int) -> BlockMask:
    ones = positions.bit_count()
    if positions == bits.ones(ones):
        return BlockMask(offset=ones)
    return BlockMask(values=bits.to_flags(positions, count).tolist())


def _mask(mask: BlockMask | None) -> dict[str, Any]:
    """As BlockMask stands in the JSON of the protocol."""
    if mask is None:
        return {}
    if mask.values is not None:
        return {"bool_masks": {"values": list(mask.values)}}
    return {"offset": mask.offset or 0}
