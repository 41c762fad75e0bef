"""``kvcm serve --bootstrap FILE``: storages and groups from a JSON or TOML file.

The entities have the wire's JSON shape, so what ListStorage and GetInstanceGroup print can be
pasted: numbers also as strings, enums as names or numbers, one oneof member per storage.

::

    [[storages]]
    global_unique_name = "nfs_01"
    nfs = { root_path = "/mnt/kv/", key_count_per_file = 8 }

    [[instance_groups]]
    name = "default"
    storage_candidates = ["nfs_01"]
    quota = { capacity = 30_000_000_000 }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcm.core.errors import ConfigError, InvalidArgument
from kvcm.core.types import (
    CachePreferStrategy,
    Entity,
    InstanceGroup,
    ReclaimPolicy,
    StorageConfig,
    StorageType,
)
from kvcm.registry.documents import distinct_keys, json_path, no_constant
from kvcm.registry.validate import STORAGE_SPEC_FIELDS, check_group, check_storage

_ONEOF: dict[str, StorageType] = {
    "threefs": StorageType.HF3FS,
    "mooncake": StorageType.MOONCAKE,
    "tair_mem_pool": StorageType.TAIRMEMPOOL,
    "nfs": StorageType.NFS,
    "vcnsthreefs": StorageType.VCNS_HF3FS,
}
_WIRE_TYPE_NAMES = {StorageType.HF3FS: "ST_3FS", StorageType.VCNS_HF3FS: "ST_VCNS_3FS"}
_ENUM_FIELDS: dict[str, Mapping[str, IntEnum]] = {
    "storage_type": {_WIRE_TYPE_NAMES.get(kind, f"ST_{kind.name}"): kind for kind in StorageType},
    "reclaim_policy": {f"POLICY_{policy.name}": policy for policy in ReclaimPolicy},
    "data_storage_strategy": {f"CPS_{choice.name}": choice for choice in CachePreferStrategy},
}
"""Wire names of enums, by field. ``storage_type`` of meta_storage_backend_config is a text."""


def load_bootstrap(path: str | Path) -> tuple[list[StorageConfig], list[InstanceGroup]]:
    """Storages and groups of a bootstrap file.

    Raises:
        ConfigError: the file cannot be read, is neither .json nor .toml, or something in it is
            wrong or unknown; the text names the file and the field.
    """
    file = Path(path)
    try:
        raw = _read(file)
        if unknown := sorted(set(raw) - {"storages", "instance_groups"}):
            raise InvalidArgument(f"{unknown[0]}: unknown key")
        storages = [_storage(item, f"storages[{i}]") for i, item in _items(raw, "storages")]
        groups = [
            _group(item, f"instance_groups[{i}]") for i, item in _items(raw, "instance_groups")
        ]
        _check_distinct([c.global_unique_name for c in storages], "storages")
        _check_distinct([g.name for g in groups], "instance_groups")
    except OSError as error:
        raise ConfigError(f"bootstrap file {file}: {error.strerror}") from None
    except (InvalidArgument, ValueError, RecursionError) as error:
        raise ConfigError(f"bootstrap file {file}: {error}") from None
    return storages, groups


def _read(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    if file.suffix == ".toml":
        return tomllib.loads(data.decode())
    if file.suffix != ".json":
        raise InvalidArgument("must end in .json or .toml")
    raw = json.loads(data, object_pairs_hook=distinct_keys, parse_constant=no_constant)
    if not isinstance(raw, dict):
        raise InvalidArgument("is not a JSON object")
    return raw


def _items(raw: dict[str, Any], key: str) -> Iterator[tuple[int, Any]]:
    items = raw.get(key, [])
    if not isinstance(items, list):
        raise InvalidArgument(f"{key} must be a list")
    return enumerate(items)


def _storage(item: Any, path: str) -> StorageConfig:
    members = _object(item, path)
    name = members.pop("global_unique_name", None)
    check_open = members.pop("check_storage_available_when_open", False)
    if not isinstance(name, str):
        raise InvalidArgument(f"{path}.global_unique_name must be a text")
    if not isinstance(check_open, bool):
        raise InvalidArgument(f"{path}.check_storage_available_when_open must be true or false")
    if unknown := sorted(set(members) - set(_ONEOF)):
        raise InvalidArgument(f"{path}.{unknown[0]}: unknown key")
    if len(members) != 1:
        raise InvalidArgument(f"{path} must have exactly one of {', '.join(_ONEOF)}")
    ((member, spec),) = members.items()
    config = StorageConfig(
        global_unique_name=name,
        type=_ONEOF[member],
        spec=_spec(_ONEOF[member], spec, f"{path}.{member}"),
        check_storage_available_when_open=check_open,
    )
    check_storage(config, path)
    return config


def _spec(kind: StorageType, item: Any, path: str) -> dict[str, Any]:
    """All fields of the spec, absent ones at their default as on the wire."""
    given, fields = _object(item, path), STORAGE_SPEC_FIELDS[kind]
    if unknown := sorted(set(given) - set(fields)):
        raise InvalidArgument(f"{path}.{unknown[0]}: unknown key")
    spec = {name: given.get(name, of_type()) for name, of_type in fields.items()}
    for name, value in spec.items():
        if fields[name] is int and isinstance(value, str) and value.isdecimal():
            spec[name] = int(value)
        if type(spec[name]) is not fields[name]:
            raise InvalidArgument(f"{path}.{name} must be of type {fields[name].__name__}")
    return spec


def _group(item: Any, path: str) -> InstanceGroup:
    try:
        group = InstanceGroup.model_validate(_enums_by_number(_object(item, path), path))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidArgument(f"{json_path(path, first['loc'])}: {first['msg']}") from None
    _refuse_unknown(group, path)
    check_group(group, path)
    return group


def _enums_by_number(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_enums_by_number(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    converted = {}
    for key, item in value.items():
        names = _ENUM_FIELDS.get(key)
        if names is None or not isinstance(item, str) or path.endswith("_backend_config"):
            converted[key] = _enums_by_number(item, f"{path}.{key}")
        elif item in names:
            converted[key] = names[item].value
        else:
            raise InvalidArgument(f"{path}.{key}: {item!r} is none of {', '.join(names)}")
    return converted


def _refuse_unknown(entity: Entity, path: str) -> None:
    for key in entity.model_extra or {}:
        raise InvalidArgument(f"{path}.{key}: unknown key")
    for name in type(entity).model_fields:
        value = getattr(entity, name)
        if isinstance(value, Entity):
            _refuse_unknown(value, f"{path}.{name}")
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, Entity):
                    _refuse_unknown(item, f"{path}.{name}[{i}]")


def _object(item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidArgument(f"{path} must be an object")
    return dict(item)


def _check_distinct(names: list[str], key: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidArgument(f"{key}[{i}]: the name {name!r} is used twice")
