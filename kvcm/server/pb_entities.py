"""Protobuf messages ↔ registry entities, both ways, for both packages (wire.md §2).

Entity field names equal the wire's, so plain messages are copied by descriptor; what differs
(the storage oneof, instance info) is written out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar, get_args

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvcm.core.errors import InvalidArgument
from kvcm.core.types import (
    PLUGIN_NAME,
    Account,
    Entity,
    Instance,
    InstanceGroup,
    LocationSpecGroup,
    LocationSpecInfo,
    ModelDeployment,
    StorageConfig,
    StorageType,
)

E = TypeVar("E", bound=Entity)

ONEOF_TYPES: dict[str, StorageType] = {
    "threefs": StorageType.HF3FS,
    "mooncake": StorageType.MOONCAKE,
    "tair_mem_pool": StorageType.TAIRMEMPOOL,
    "nfs": StorageType.NFS,
    "vcnsthreefs": StorageType.VCNS_HF3FS,
    "plugin": StorageType.PLUGIN,
}
"""Member of StorageConfig.storage_spec → type (wire.md §6)."""

_ONEOF_OF = {kind: member for member, kind in ONEOF_TYPES.items()}


def storage_of(message: Any, field: str = "storage") -> StorageConfig:
    """The storage that an admin StorageConfig describes; enabled.

    Raises:
        InvalidArgument: no member of ``storage_spec`` is set, or an option of a plug-in twice.
    """
    member = message.WhichOneof("storage_spec")
    if member is None:
        raise InvalidArgument(f"{field}.storage_spec is not set")
    return StorageConfig(
        global_unique_name=message.global_unique_name,
        # `local` has no type on the wire; it is refused as not built in.
        type=ONEOF_TYPES.get(member, StorageType.UNSPECIFIED),
        spec=_spec_of(getattr(message, member), f"{field}.storage_spec.{member}"),
        check_storage_available_when_open=message.check_storage_available_when_open,
        **{n: getattr(message, n) for n in StorageConfig.additions if message.HasField(n)},
    )


def fill_storage(message: Any, config: StorageConfig) -> None:
    """The other way round; spec fields that the wire does not know are left out."""
    message.global_unique_name = config.global_unique_name
    message.check_storage_available_when_open = config.check_storage_available_when_open
    for name in config.additions:
        if value := getattr(config, name):
            setattr(message, name, value)
    member = _ONEOF_OF.get(config.type)
    if member is None:
        return
    spec = getattr(message, member)
    spec.SetInParent()
    if config.type is StorageType.PLUGIN:
        spec.name = config.type_name
        for name, value in config.spec.items():
            if name != PLUGIN_NAME:
                spec.options.add(name=name, value=value)
        return
    for field in spec.DESCRIPTOR.fields:
        if field.name in config.spec:
            setattr(spec, field.name, config.spec[field.name])


def _spec_of(message: Any, field: str) -> dict[str, Any]:
    names = [f.name for f in message.DESCRIPTOR.fields]
    if "options" not in names:
        return {name: getattr(message, name) for name in names}
    spec: dict[str, Any] = {PLUGIN_NAME: message.name}
    for i, option in enumerate(message.options):
        if option.name in spec:
            raise InvalidArgument(f"{field}.options[{i}].name {option.name!r} is taken already")
        spec[option.name] = option.value
    return spec


def group_of(message: Message, field: str = "instance_group") -> InstanceGroup:
    """The group that an InstanceGroup message describes.

    Raises:
        InvalidArgument: an enum number that is none of the enum's; the message names the field.
    """
    return _read(message, InstanceGroup, field)


def fill_group(message: Message, group: InstanceGroup) -> None:
    """The other way round."""
    _fill(message, group)


def instance_of(request: Any) -> Instance:
    """What a RegisterInstanceRequest of either package wants registered."""
    deployment = None
    if request.HasField("model_deployment"):
        deployment = _read(request.model_deployment, ModelDeployment, "model_deployment")
    return Instance(
        instance_id=request.instance_id,
        instance_group=request.instance_group,
        block_size=request.block_size,
        location_spec_infos=tuple(
            LocationSpecInfo(name=info.name, size=info.size) for info in request.location_spec_infos
        ),
        location_spec_groups=tuple(
            LocationSpecGroup(name=group.name, spec_names=tuple(group.spec_names))
            for group in request.location_spec_groups
        ),
        model_deployment=deployment,
    )


def fill_instance_info(message: Any, instance: Instance, group: InstanceGroup | None) -> None:
    """InstanceInfo of either package."""
    message.quota_group_name = group.global_quota_group_name if group is not None else ""
    message.instance_group_name = instance.instance_group
    message.instance_id = instance.instance_id
    message.block_size = instance.block_size
    for info in instance.location_spec_infos:
        message.location_spec_infos.add(name=info.name, size=info.size)
    for spec_group in instance.location_spec_groups:
        message.location_spec_groups.add(name=spec_group.name, spec_names=spec_group.spec_names)
    if instance.model_deployment is not None:
        message.model_deployment.SetInParent()
        _fill(message.model_deployment, instance.model_deployment)


def fill_account(message: Any, account: Account) -> None:
    """Account, as shown."""
    message.user_name = account.user_name
    message.role = int(account.role)


def member_of(kind: type[IntEnum], number: int, field: str) -> Any:
    """The enum member.

    Raises:
        InvalidArgument: a number outside the enum.
    """
    try:
        return kind(number)
    except ValueError:
        raise InvalidArgument(f"{field}: {number} is none of its values") from None


def _read(message: Message, entity: type[E], path: str) -> E:
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        info = entity.model_fields.get(field.name)
        if info is None:
            continue
        if field.name in entity.additions and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        where = f"{path}.{field.name}"
        kind = _element(info.annotation)
        if field.is_repeated:
            values[field.name] = tuple(
                _read(item, kind, f"{where}[{i}]")
                if field.type == FieldDescriptor.TYPE_MESSAGE
                else item
                for i, item in enumerate(value)
            )
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if message.HasField(field.name):
                values[field.name] = _read(value, kind, where)
        elif field.type == FieldDescriptor.TYPE_ENUM:
            values[field.name] = member_of(kind, value, where)
        else:
            values[field.name] = value
    return entity(**values)


def _element(annotation: Any) -> Any:
    """``X`` of ``X``, ``X | None`` and ``tuple[X, ...]``."""
    inner = [arg for arg in get_args(annotation) if arg not in (type(None), Ellipsis)]
    return inner[0] if inner else annotation


def _fill(message: Message, entity: Entity) -> None:
    for field in message.DESCRIPTOR.fields:
        value = getattr(entity, field.name, None)
        if value is None or (field.name in entity.additions and not value):
            # An addition at its default stays out: answers are what they were without it.
            continue
        if field.is_repeated:
            target = getattr(message, field.name)
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                for item in value:
                    _fill(target.add(), item)
            else:
                target.extend(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            child = getattr(message, field.name)
            child.SetInParent()
            _fill(child, value)
        else:
            setattr(message, field.name, value)
