"""From parsed messages to the requests of the cache use cases. Works for both packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

from kvcm.cache.api import (
    FinishWriteRequest,
    LookupRequest,
    MetaRequest,
    RemoveRequest,
    ReportRequest,
    StartWriteRequest,
    TrimRequest,
)
from kvcm.core import limits
from kvcm.core.errors import InvalidArgument
from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, TrimStrategy
from kvcm.server.calls import Call

FEATURE_MULTI_STORAGE = 1
"""Bit 0 of ``features``: the client handles answers that span several storages."""

AnyCall = Call[Any, Any]

_COUNT_MAX = {
    "block_keys": limits.KEYS_PER_REQUEST_MAX,
    "token_ids": limits.TOKENS_PER_REQUEST_MAX,
}


def lookup_request(call: AnyCall) -> LookupRequest:
    """GetCacheLocation."""
    message = call.request
    keys, tokens = _keys(call)
    return LookupRequest(
        instance_id=message.instance_id,
        keys=keys,
        token_ids=tokens,
        form=call.form,
        query=_member(QueryType, message.query_type),
        mask=_mask(message, "block_mask"),
        sw_size=message.sw_size,
        spec_names=tuple(message.location_spec_names),
        multi_storage=bool(message.features & FEATURE_MULTI_STORAGE),
    )


def meta_request(call: AnyCall) -> MetaRequest:
    """GetCacheMeta."""
    message = call.request
    keys, tokens = _keys(call)
    return MetaRequest(
        instance_id=message.instance_id,
        keys=keys,
        token_ids=tokens,
        form=call.form,
        mask=_mask(message, "block_mask"),
        detail_level=message.detail_level,
    )


def start_write_request(call: AnyCall) -> StartWriteRequest:
    """StartWriteCache."""
    message = call.request
    keys, tokens = _keys(call)
    return StartWriteRequest(
        instance_id=message.instance_id,
        keys=keys,
        token_ids=tokens,
        form=call.form,
        group_names=tuple(message.location_spec_group_names),
        write_timeout_seconds=message.write_timeout_seconds,
        multi_storage=bool(message.features & FEATURE_MULTI_STORAGE),
    )


def finish_write_request(call: AnyCall) -> FinishWriteRequest:
    """FinishWriteCache; the locations that clients repeat are not looked at."""
    message = call.request
    return FinishWriteRequest(
        instance_id=message.instance_id,
        session_id=message.write_session_id,
        success=_mask(message, "success_blocks"),
    )


def remove_request(call: AnyCall) -> RemoveRequest:
    """RemoveCache."""
    message = call.request
    keys, tokens = _keys(call)
    return RemoveRequest(
        instance_id=message.instance_id,
        keys=keys,
        token_ids=tokens,
        form=call.form,
        mask=_mask(message, "block_mask"),
    )


def trim_request(call: AnyCall) -> TrimRequest:
    """TrimCache."""
    message = call.request
    return TrimRequest(
        instance_id=message.instance_id,
        strategy=_member(TrimStrategy, message.strategy),
        begin_timestamp=message.begin_timestamp,
        end_timestamp=message.end_timestamp,
    )


def report_request(call: AnyCall) -> ReportRequest:
    """ReportCacheError."""
    message = call.request
    keys, tokens = _keys(call)
    return ReportRequest(
        instance_id=message.instance_id,
        keys=keys,
        token_ids=tokens,
        form=call.form,
        locations=_Locations(message.locations),
        kinds=message.kinds,
        reader=message.reader,
    )


class _Locations(Sequence[Mapping[str, str]]):
    """URI by spec name of CacheLocations; made when looked at, so that no step makes thousands."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, str]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, str] | Sequence[Mapping[str, str]]:
        if isinstance(index, slice):
            return _Locations(self._messages[index])
        return {spec.name: spec.uri for spec in self._messages[index].location_specs}


def _member(kind: type[Any], number: int) -> Any:
    """The enum member, or the bare number when the enum has none."""
    try:
        return kind(number)
    except ValueError:
        return number


def _keys(call: AnyCall) -> tuple[KeyBatch, KeyBatch | None]:
    keys = _values(call, "block_keys")
    if keys.data:
        return keys, None
    tokens = _values(call, "token_ids")
    return keys, tokens if tokens.data else None


def _values(call: AnyCall, field: str) -> KeyBatch:
    values = call.packed.get(field)
    if values is None:
        values = KeyBatch.from_ints(getattr(call.request, field))
    count_max = _COUNT_MAX[field]
    # A packed value takes a byte or more.
    if len(values.data) > count_max and len(values) > count_max:
        raise InvalidArgument(f"{field} has {len(values)} entries, more than {count_max}")
    return values


def _mask(message: Any, field: str) -> BlockMask | None:
    """None when the field is absent; present without a member: a vector of length 0."""
    if not message.HasField(field):
        return None
    mask = getattr(message, field)
    if mask.WhichOneof("info") == "offset":
        return BlockMask(offset=mask.offset)
    return BlockMask(values=tuple(mask.bool_masks.values))
