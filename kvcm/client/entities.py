"""Registry entities of `kvcm.core.types` to and from AdminService's messages."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from kvcm._pb import admin_pb2 as pb
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.types import (
    PLUGIN_NAME,
    InstanceGroup,
    StorageConfig,
    StorageStatus,
    StorageType,
)

E = TypeVar("E", bound=BaseModel)

_SPEC_FIELDS = {
    StorageType.HF3FS: "threefs",
    StorageType.MOONCAKE: "mooncake",
    StorageType.TAIRMEMPOOL: "tair_mem_pool",
    StorageType.NFS: "nfs",
    StorageType.VCNS_HF3FS: "vcnsthreefs",
    StorageType.PLUGIN: "plugin",
}
"""Member of the oneof ``storage_spec`` by type (wire.md §6)."""
_TYPES = {field: kind for kind, field in _SPEC_FIELDS.items()}


def storage_message(config: StorageConfig) -> pb.StorageConfig:
    """The message of a storage.

    Raises:
        InvalidArgument: an unknown type or spec field, or a value of the wrong type.
    """
    field = _SPEC_FIELDS.get(config.type)
    if field is None:
        raise InvalidArgument(f"storage {config.global_unique_name!r}: type {config.type!r}")
    spec = _plugin_fields(config) if config.type is StorageType.PLUGIN else config.spec
    fields = {
        "global_unique_name": config.global_unique_name,
        field: spec,
        "check_storage_available_when_open": config.check_storage_available_when_open,
    }
    fields |= {name: getattr(config, name) for name in config.additions & config.model_fields_set}
    what = f"storage {config.global_unique_name!r}"
    known = list(getattr(pb.StorageConfig(), field).DESCRIPTOR.fields_by_name)
    if unknown := sorted(set(spec) - set(known)):
        names = ", ".join(known) or "none"
        raise InvalidArgument(f"{what}: {field} has no field {unknown[0]!r}; its fields: {names}")
    return _message(fields, pb.StorageConfig(), what)


def _plugin_fields(config: StorageConfig) -> dict[str, Any]:
    options = [{"name": k, "value": v} for k, v in config.spec.items() if k != PLUGIN_NAME]
    return {"name": config.type_name, "options": options}


def storage_config(raw: pb.StorageConfig) -> StorageStatus:
    """A storage as listed; ``spec`` has every field of its type."""
    field = raw.WhichOneof("storage_spec") or ""
    spec: dict[str, Any] = {}
    if field == "plugin":
        spec = {PLUGIN_NAME: raw.plugin.name, **{o.name: o.value for o in raw.plugin.options}}
    elif field:
        spec = _plain(getattr(raw, field), with_defaults=True)
    return StorageStatus(
        global_unique_name=raw.global_unique_name,
        type=_TYPES.get(field, StorageType.UNSPECIFIED),
        spec=spec,
        check_storage_available_when_open=raw.check_storage_available_when_open,
        **{f.name: value for f, value in raw.ListFields() if f.name in StorageConfig.additions},
        enabled=not raw.disabled,
        unavailable_reason=raw.unavailable_reason,
        health=raw.health,
        unwritable_reason=raw.unwritable_reason,
    )


def group_message(group: InstanceGroup) -> pb.InstanceGroup:
    """The message of a group; raises InvalidArgument as `storage_message` does."""
    fields = group.model_dump(exclude_none=True)
    reclaim = group.cache_config.reclaim_strategy if group.cache_config is not None else None
    if reclaim is not None:
        # What was not given is left out, so that an update keeps what is stored.
        for name in reclaim.additions - reclaim.model_fields_set:
            del fields["cache_config"]["reclaim_strategy"][name]
    return _message(fields, pb.InstanceGroup(), f"instance group {group.name!r}")


def instance_group(raw: pb.InstanceGroup) -> InstanceGroup:
    """A group as stored by the manager."""
    return _entity(raw, InstanceGroup)


M = TypeVar("M", bound=Message)


def _message(fields: dict[str, Any], message: M, what: str) -> M:
    try:
        return json_format.ParseDict(fields, message)
    except json_format.ParseError as error:
        raise InvalidArgument(f"{what}: {error}") from error


def _entity(message: Message, kind: type[E]) -> E:
    try:
        return kind.model_validate(_plain(message, with_defaults=False))
    except ValidationError as error:
        raise KvcmError(f"reply: {error}") from error


def _plain(message: Message, *, with_defaults: bool) -> dict[str, Any]:
    return json_format.MessageToDict(
        message,
        preserving_proto_field_name=True,
        use_integers_for_enums=True,
        always_print_fields_with_no_presence=with_defaults,
    )
