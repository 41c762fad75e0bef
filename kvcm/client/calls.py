"""The calls of MetaService (wire.md §2, §4, §5): each function checks its arguments and returns
the call to make. `Client` and `AsyncClient` have one method for each, with the same arguments.

Every function takes ``trace_id`` (free text that comes back in the request id and the access log)
and ``timeout`` (seconds for the whole call, all attempts included; None = the client's default).
Keys are int64; when ``keys`` is empty the manager derives them from ``token_ids``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcm._pb import meta_pb2 as pb
from kvcm.client.call import META_SERVICE, Call, Method, build, nothing
from kvcm.client.types import (
    BlockMeta,
    ErrorReport,
    InstanceInfo,
    Location,
    Locations,
    Lookup,
    Registration,
    StorageInfo,
    WriteGrant,
    report_outcome,
)
from kvcm.core.errors import KvcmError
from kvcm.core.mask import BlockMask
from kvcm.core.types import (
    LocationSpecGroup,
    LocationSpecInfo,
    ModelDeployment,
    QueryType,
    ReportKind,
    TrimStrategy,
)

Ints = Sequence[int] | npt.NDArray[np.integer]
"""Keys or token ids: any sequence of int64, an ``array('q')`` or an integer NumPy array."""
Mask = BlockMask | int | Sequence[bool] | None
"""A BlockMask, a leading count, or one bool a key."""

MULTI_STORAGE = 1
"""Bit 0 of ``features``: this client picks the SDK per location, not per answer."""

_REGISTER = Method(META_SERVICE, "RegisterInstance", pb.RegisterInstanceResponse, True)
_GET_INSTANCE = Method(META_SERVICE, "GetInstanceInfo", pb.GetInstanceInfoResponse, True)
_GET_LOCATION = Method(META_SERVICE, "GetCacheLocation", pb.GetCacheLocationResponse, True)
_GET_META = Method(META_SERVICE, "GetCacheMeta", pb.GetCacheMetaResponse, True)
_START = Method(META_SERVICE, "StartWriteCache", pb.StartWriteCacheResponse, False)
_FINISH = Method(META_SERVICE, "FinishWriteCache", pb.CommonResponse, True)
_REMOVE = Method(META_SERVICE, "RemoveCache", pb.CommonResponse, False)
_TRIM = Method(META_SERVICE, "TrimCache", pb.CommonResponse, False)
_REPORT = Method(META_SERVICE, "ReportCacheError", pb.ReportCacheErrorResponse, True)
METHODS = (
    *(_REGISTER, _GET_INSTANCE, _GET_LOCATION, _GET_META),
    *(_START, _FINISH, _REMOVE, _TRIM, _REPORT),
)


def register_instance(
    instance_group: str,
    instance_id: str,
    block_size: int,
    location_spec_infos: Mapping[str, int] | Sequence[LocationSpecInfo],
    *,
    model_deployment: ModelDeployment | None = None,
    location_spec_groups: Mapping[str, Sequence[str]] | Sequence[LocationSpecGroup] = (),
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[Registration]:
    """Register an instance; again with equal data is OK.

    Args:
        block_size: tokens a block.
        location_spec_infos: bytes of one block by spec name.
        location_spec_groups: spec names by group name.

    Raises:
        DuplicateEntity: registered with other data; names the differing field.
    """
    request = build(
        pb.RegisterInstanceRequest,
        trace_id=trace_id,
        instance_group=instance_group,
        instance_id=instance_id,
        **registration_fields(
            block_size, location_spec_infos, model_deployment, location_spec_groups
        ),
    )
    return Call(_REGISTER, request, _registration, timeout)


def get_instance_info(
    instance_id: str, *, trace_id: str = "", timeout: float | None = None
) -> Call[InstanceInfo]:
    """What is registered under the id.

    Raises:
        InstanceNotExist: nothing is.
    """
    request = build(pb.GetInstanceInfoRequest, trace_id=trace_id, instance_id=instance_id)
    return Call(
        _GET_INSTANCE,
        request,
        lambda reply: instance_info(reply.instance_info, reply.instance_group),
        timeout,
    )


def get_cache_location(
    instance_id: str,
    keys: Ints = (),
    *,
    token_ids: Ints = (),
    query: QueryType = QueryType.PREFIX_MATCH,
    mask: Mask = None,
    sw_size: int = 0,
    spec_names: Sequence[str] = (),
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[Lookup]:
    """Where blocks lie.

    Args:
        query: PREFIX_MATCH, BATCH_GET, or REVERSE_ROLL_SW_MATCH with ``sw_size`` keys a window.
        mask: keys the caller already has; only PREFIX_MATCH looks at it.
        spec_names: only blocks that have all these specs, and only these of each location.

    Raises:
        InstanceNotExist: nothing is registered under the id.
    """
    request = build(
        pb.GetCacheLocationRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        query_type=int(query),
        block_keys=_ints(keys),
        token_ids=_ints(token_ids),
        block_mask=_mask(mask),
        sw_size=sw_size,
        location_spec_names=spec_names,
        features=MULTI_STORAGE,
    )
    return Call(_GET_LOCATION, request, lambda reply: Lookup(Locations(reply.locations)), timeout)


def get_cache_meta(
    instance_id: str,
    keys: Ints = (),
    *,
    token_ids: Ints = (),
    mask: Mask = None,
    detail_level: int = 0,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[tuple[BlockMeta, ...]]:
    """State of every unmasked key, in order; does not count as an access.

    Args:
        detail_level: from 1 up also sizes, times, storage and all locations.
    """
    request = build(
        pb.GetCacheMetaRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        block_keys=_ints(keys),
        token_ids=_ints(token_ids),
        block_mask=_mask(mask),
        detail_level=detail_level,
    )
    return Call(_GET_META, request, block_metas, timeout)


def start_write_cache(
    instance_id: str,
    keys: Ints = (),
    *,
    token_ids: Ints = (),
    spec_group_names: Sequence[str] = (),
    write_timeout_s: int = 0,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[WriteGrant]:
    """Ask for places for the keys that need writing; `write` does the whole protocol.

    Args:
        keys: the chain from its first key on, the ones already cached included.
        spec_group_names: one a key; only that group's specs are allocated.
        write_timeout_s: seconds until an unfinished session ends; 0 = the manager's default.

    Raises:
        CapacityReached: a limit refused even the first missing key; ``reason`` says which.
        OutcomeUnknown: the reply was lost. Not repeated: what may have been granted is freed
            when the session times out.
    """
    request = build(
        pb.StartWriteCacheRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        block_keys=_ints(keys),
        token_ids=_ints(token_ids),
        location_spec_group_names=spec_group_names,
        write_timeout_seconds=write_timeout_s,
        features=MULTI_STORAGE,
    )
    return Call(_START, request, _write_grant, timeout)


def finish_write_cache(
    instance_id: str,
    session_id: str,
    success: Mask,
    *,
    trace_id: str = "",
    timeout: float | None = None,
    attempts_of_timeout: int = 1,
) -> Call[None]:
    """Publish what succeeded; the rest is freed.

    Args:
        success: one bool a *granted* key, or how many of them, from the first, succeeded; None
            for a session that granted nothing. Repeating with the same value is OK.

    Raises:
        SessionNotExist: unknown or over; nothing was published. (InvalidArgument from managers
            that send no reason.)
        InvalidArgument: a mask of the wrong length, or another one than before.
    """
    # Present but empty is right for a session that granted nothing.
    empty = pb.BlockMask(bool_masks=pb.BoolMasksType())
    request = build(
        pb.FinishWriteCacheRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        write_session_id=session_id,
        success_blocks=empty if success is None else _mask(success),
    )
    return Call(_FINISH, request, nothing, timeout, attempts_of_timeout)


def remove_cache(
    instance_id: str,
    keys: Ints = (),
    *,
    token_ids: Ints = (),
    mask: Mask = None,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Forget the blocks of the unmasked keys; masked ones are kept."""
    request = build(
        pb.RemoveCacheRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        block_keys=_ints(keys),
        token_ids=_ints(token_ids),
        block_mask=_mask(mask),
    )
    return Call(_REMOVE, request, nothing, timeout)


def trim_cache(
    instance_id: str,
    strategy: TrimStrategy = TrimStrategy.REMOVE_ALL_CACHE,
    *,
    begin_timestamp: int = 0,
    end_timestamp: int = 0,
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[None]:
    """Forget all blocks of an instance, or with TIMESTAMP those finished in [begin, end).

    Args:
        begin_timestamp, end_timestamp: epoch seconds.
    """
    request = build(
        pb.TrimCacheRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        strategy=int(strategy),
        begin_timestamp=begin_timestamp,
        end_timestamp=end_timestamp,
    )
    return Call(_TRIM, request, nothing, timeout)


def report_cache_error(
    instance_id: str,
    keys: Ints = (),
    locations: Sequence[Location | Mapping[str, str]] = (),
    kinds: ReportKind | Sequence[ReportKind] = ReportKind.MISSING,
    *,
    reader: str | None = None,
    token_ids: Ints = (),
    trace_id: str = "",
    timeout: float | None = None,
) -> Call[ErrorReport]:
    """Tell that blocks which a lookup answered could not be read.

    What is missing (the manager looks) or corrupt (it takes your word for so many blocks a minute)
    is a miss from then on, and can be written again. Repeating a report does no harm.

    Args:
        locations: one a key, as it was answered, or URIs by name of the specs that failed; one
            without a URI reports nothing for its key.
        kinds: one a key, or one for all.
        reader: who could not read; this host when left out. A storage that several readers cannot
            read is left alone for a while.

    Raises:
        InvalidArgument: numbers that do not fit, an unknown spec, a URI of no storage.
        Unsupported: a manager that does not know this call.
    """
    request = build(
        pb.ReportCacheErrorRequest,
        trace_id=trace_id,
        instance_id=instance_id,
        block_keys=_ints(keys),
        token_ids=_ints(token_ids),
        locations=[_reported(location) for location in locations],
        kinds=[int(kinds)] if isinstance(kinds, ReportKind) else list(map(int, kinds)),
        reader=socket.gethostname() if reader is None else reader,
    )
    return Call(_REPORT, request, _error_report, timeout)


def _reported(location: Location | Mapping[str, str]) -> dict[str, Any]:
    specs = location.specs if isinstance(location, Location) else location
    return {"location_specs": [{"name": name, "uri": uri} for name, uri in specs.items()]}


def _error_report(reply: pb.ReportCacheErrorResponse) -> ErrorReport:
    return ErrorReport(tuple(map(report_outcome, reply.outcomes)))


def registration_fields(
    block_size: int,
    location_spec_infos: Mapping[str, int] | Sequence[LocationSpecInfo],
    model_deployment: ModelDeployment | None,
    location_spec_groups: Mapping[str, Sequence[str]] | Sequence[LocationSpecGroup],
) -> dict[str, Any]:
    """The fields that RegisterInstance of both services share."""
    infos = (
        [{"name": name, "size": size} for name, size in location_spec_infos.items()]
        if isinstance(location_spec_infos, Mapping)
        else [{"name": info.name, "size": info.size} for info in location_spec_infos]
    )
    groups = (
        [{"name": name, "spec_names": names} for name, names in location_spec_groups.items()]
        if isinstance(location_spec_groups, Mapping)
        else [{"name": g.name, "spec_names": g.spec_names} for g in location_spec_groups]
    )
    return {
        "block_size": block_size,
        "location_spec_infos": infos,
        "model_deployment": None if model_deployment is None else model_deployment.model_dump(),
        "location_spec_groups": groups,
    }


def instance_info(raw: Any, instance_group: str = "") -> InstanceInfo:
    """From the message of either service."""
    model = raw.model_deployment
    return InstanceInfo(
        instance_id=raw.instance_id,
        instance_group=raw.instance_group_name or instance_group,
        quota_group_name=raw.quota_group_name,
        block_size=raw.block_size,
        location_spec_infos=tuple(
            LocationSpecInfo(name=info.name, size=info.size) for info in raw.location_spec_infos
        ),
        location_spec_groups=tuple(
            LocationSpecGroup(name=group.name, spec_names=tuple(group.spec_names))
            for group in raw.location_spec_groups
        ),
        model_deployment=ModelDeployment(
            **{field.name: getattr(model, field.name) for field in model.DESCRIPTOR.fields}
        )
        if raw.HasField("model_deployment")
        else None,
    )


def block_metas(reply: Any) -> tuple[BlockMeta, ...]:
    """From GetCacheMetaResponse of either service."""
    return tuple(
        BlockMeta(location, _json(meta, "metas"))
        for location, meta in zip(Locations(reply.locations), reply.metas, strict=True)
    )


def _registration(reply: pb.RegisterInstanceResponse) -> Registration:
    return Registration(
        tuple(
            StorageInfo(
                type=str(entry.get("type", "")),
                global_unique_name=str(entry.get("global_unique_name", "")),
                is_available=bool(entry.get("is_available", False)),
                storage_spec=entry.get("storage_spec", {}),
            )
            for entry in _json(reply.storage_configs or "[]", "storage_configs")
        )
    )


def _write_grant(reply: pb.StartWriteCacheResponse) -> WriteGrant:
    locations = Locations(reply.locations)
    if reply.block_mask.WhichOneof("info") == "bool_masks":
        values = tuple(reply.block_mask.bool_masks.values)
        mask, key_count = BlockMask(values=values), len(values)
    else:
        offset = reply.block_mask.offset
        mask, key_count = BlockMask(offset=offset), offset + len(locations)
    reason = reply.header.status.reason
    grant = WriteGrant(reply.write_session_id, mask, locations, key_count, reason)
    if len(grant.granted) != len(locations):
        raise KvcmError(
            f"reply: block_mask leaves {len(grant.granted)} keys, locations are {len(locations)}"
        )
    return grant


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise KvcmError(f"reply: {field} is no JSON: {error}") from error


def _ints(values: Ints) -> Sequence[int]:
    if isinstance(values, np.ndarray):
        listed: list[int] = values.tolist()
        return listed
    return values


def _mask(mask: Mask) -> pb.BlockMask | None:
    if mask is None:
        return None
    if not isinstance(mask, BlockMask):
        mask = BlockMask(offset=mask) if isinstance(mask, int) else BlockMask(values=mask)
    if mask.values is not None:
        return build(pb.BlockMask, bool_masks={"values": list(map(bool, mask.values))})
    return build(pb.BlockMask, offset=mask.offset or 0)
