"""The form of trace events: one JSON object for each thing that happens (docs/protocol.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcm.core.keys import KeyBatch, array_of
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


def encode(event: Event, event_id: str, at_us: int) -> bytes:
    """The JSON of an event on one line, without its end.

    Args:
        at_us: when it happened, in epoch microseconds.
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
    return msgspec.json.encode(common | _fields(event))


def _fields(event: Event) -> dict[str, Any]:
    if isinstance(event, LookedUp):
        return {
            "query_type": f"QT_{event.query.name}",
            "keys": _keys(event.batch.raw()),
            "tokens": _tokens(event.tokens),
            "block_mask": _mask(event.mask),
            "sw_size": event.sw_size,
            "asked_blocks": event.blocks,
            "hit_blocks": event.hits,
        }
    if isinstance(event, WriteStarted):
        return {
            "write_session_id": event.session_id,
            "keys": _keys(event.asked),
            "tokens": _tokens(event.tokens),
            "block_mask": _mask(event.mask),
            "granted_blocks": len(event.granted) // 8,
            "bytes": event.size,
            "storage": event.storage,
        }
    if isinstance(event, WriteRefused):
        return {
            "keys": _keys(event.keys),
            "reason": event.reason,
            "is_whole": event.whole,
            "storage": event.storage,
        }
    if isinstance(event, WriteFinished):
        return _finished(event)
    if isinstance(event, BlocksRemoved):
        return {
            "keys": _keys(event.keys),
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
        "keys": _keys(keys_at(event.keys, event.published)) if event.keys else [],
        "published_blocks": event.published.bit_count(),
        "bytes": event.published_size,
        "reason": event.how.name.lower(),
        "storage": event.storage,
    }


def _positions(positions: int, count: int) -> BlockMask:
    ones = positions.bit_count()
    if positions == bits.ones(ones):
        return BlockMask(offset=ones)
    return BlockMask(values=[bool(positions >> i & 1) for i in range(count)])


def _keys(raw: bytes) -> list[int]:
    return array_of(raw).tolist()


def _tokens(tokens: KeyBatch | None) -> list[int]:
    return [] if tokens is None else tokens.array().tolist()


def _mask(mask: BlockMask | None) -> dict[str, Any]:
    """As BlockMask stands in the JSON of the protocol."""
    if mask is None:
        return {}
    if mask.values is not None:
        return {"bool_masks": {"values": list(mask.values)}}
    return {"offset": mask.offset or 0}
