"""Rules for entities, one by one. Pure: what needs the rest of the registry is elsewhere.

Every function raises InvalidArgument naming the field with its path, and returns nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvcm.core import limits
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import (
    PLUGIN_NAME,
    CacheConfig,
    CacheReclaimStrategy,
    Instance,
    InstanceGroup,
    InstanceGroupQuota,
    LocationSpecGroup,
    MetaIndexerConfig,
    ModelDeployment,
    StorageConfig,
    StorageType,
)

INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1

_STORAGE_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
_PLUGIN_NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{limits.PLUGIN_NAME_CHARACTERS_MAX - 1}}}")

_POSIX_SPEC: dict[str, type] = {
    "cluster_name": str,
    "mountpoint": str,
    "root_dir": str,
    "key_count_per_file": int,
    "touch_file_when_create": bool,
}
STORAGE_SPEC_FIELDS: dict[StorageType, dict[str, type]] = {
    StorageType.HF3FS: _POSIX_SPEC,
    StorageType.VCNS_HF3FS: {
        **_POSIX_SPEC,
        "remote_host": str,
        "remote_port": int,
        "meta_storage_uri": str,
    },
    StorageType.MOONCAKE: {
        "local_hostname": str,
        "metadata_connstring": str,
        "protocol": str,
        "rdma_device": str,
        "master_service_entry": str,
    },
    StorageType.TAIRMEMPOOL: {"domain": str, "timeout": int, "enable_vipserver": bool},
    StorageType.NFS: {"root_path": str, "key_count_per_file": int},
    StorageType.PLUGIN: {},
}
"""Fields of each storage type's spec, by wire name (wire.md §2); of plug-ins none is known."""


def check_text(value: str, field: str, *, bytes_max: int = limits.TEXT_FIELD_BYTES_MAX) -> None:
    """``value`` is storable text (UTF-8, no NUL) of at most ``bytes_max`` bytes."""
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} is not valid Unicode text") from None
    if "\0" in value:
        raise InvalidArgument(f"{field} contains a NUL character")
    if size > bytes_max:
        raise InvalidArgument(f"{field} has {size} bytes, more than {bytes_max}")


def check_name(value: str, field: str) -> None:
    """A name: not empty, no white space around it, within the limit."""
    if not value.strip():
        raise InvalidArgument(f"{field} is empty")
    if value != value.strip():
        raise InvalidArgument(f"{field} {value!r} begins or ends with white space")
    check_text(value, field, bytes_max=limits.ENTITY_NAME_BYTES_MAX)


def check_instance_id(value: str, field: str = "instance_id") -> None:
    """Any text goes, hostile ones included; nothing is ever named after it."""
    if not value:
        raise InvalidArgument(f"{field} is empty")
    check_text(value, field, bytes_max=limits.INSTANCE_ID_BYTES_MAX)


def check_storage(config: StorageConfig, field: str = "storage") -> None:
    """One storage configuration. Whether it opens is the backend's business."""
    name_field = f"{field}.global_unique_name"
    check_name(config.global_unique_name, name_field)
    # It is the host of every location URI, which existing clients cut at "/".
    if not _STORAGE_NAME.match(config.global_unique_name):
        raise InvalidArgument(
            f"{name_field} {config.global_unique_name!r} may hold only letters, digits and ._-"
        )
    fields = STORAGE_SPEC_FIELDS.get(config.type)
    if fields is None:
        raise InvalidArgument(f"{field}.storage_spec is not set")
    _check_integers(config, field, ("capacity_bytes",))
    _check_marks(config, field)
    if config.type is StorageType.PLUGIN:
        _check_plugin(config.spec, f"{field}.storage_spec.plugin")
    for key, value in config.spec.items():
        _check_spec_value(value, fields.get(key), f"{field}.storage_spec.{key}")
    _check_stored_values(config, field)


def check_group(group: InstanceGroup, field: str = "instance_group") -> None:
    """One instance group."""
    check_name(group.name, f"{field}.name")
    candidates = group.storage_candidates
    _check_count(candidates, f"{field}.storage_candidates", limits.STORAGE_CANDIDATES_PER_GROUP_MAX)
    for i, name in enumerate(candidates):
        check_name(name, f"{field}.storage_candidates[{i}]")
    _check_distinct(candidates, f"{field}.storage_candidates")
    _check_integers(group, field, ("max_instance_count", "version"))
    check_text(group.user_data, f"{field}.user_data", bytes_max=limits.USER_DATA_BYTES_MAX)
    check_text(group.global_quota_group_name, f"{field}.global_quota_group_name")
    if group.quota is not None:
        _check_quota(group.quota, f"{field}.quota")
    if group.cache_config is not None:
        _check_cache_config(group.cache_config, f"{field}.cache_config")
    _check_stored_values(group, field)


def check_instance(wanted: Instance) -> None:
    """The data of a registration (wire.md §7)."""
    check_instance_id(wanted.instance_id)
    if not wanted.instance_group.strip():
        raise InvalidArgument("instance_group is empty")
    check_text(wanted.instance_group, "instance_group", bytes_max=limits.ENTITY_NAME_BYTES_MAX)
    if not 0 < wanted.block_size <= INT32_MAX:
        raise InvalidArgument(f"block_size is {wanted.block_size}, must be above 0")
    _check_specs(wanted)
    _check_spec_groups(wanted)
    if wanted.model_deployment is not None:
        _check_deployment(wanted.model_deployment)
    _check_stored_values(wanted, "instance")


def check_account(user_name: str, password: str) -> None:
    """Name and password of a new account."""
    check_name(user_name, "user_name")
    if not password:
        raise InvalidArgument("password is empty")
    check_text(password, "password", bytes_max=limits.PASSWORD_BYTES_MAX)


def _check_quota(quota: InstanceGroupQuota, field: str) -> None:
    _check_integers(quota, field, ("capacity",))
    for i, entry in enumerate(quota.quota_config):
        path = f"{field}.quota_config[{i}]"
        if entry.storage_type is StorageType.UNSPECIFIED:
            raise InvalidArgument(f"{path}.storage_type is not set")
        _check_integers(entry, path, ("capacity",))
    types = [entry.storage_type.name for entry in quota.quota_config]
    _check_distinct(types, f"{field}.quota_config", what="storage_type")


def _check_cache_config(config: CacheConfig, field: str) -> None:
    if config.reclaim_strategy is not None:
        _check_reclaim(config.reclaim_strategy, f"{field}.reclaim_strategy")
    if config.meta_indexer_config is not None:
        _check_indexer(config.meta_indexer_config, f"{field}.meta_indexer_config")


def _check_reclaim(strategy: CacheReclaimStrategy, field: str) -> None:
    numbers = (
        "trigger_period_seconds",
        "reclaim_step_size",
        "reclaim_step_percentage",
        "delay_before_delete_ms",
        "ttl_seconds",
    )
    _check_integers(strategy, field, numbers)
    low = strategy.low_percentage
    _check_share(low, f"{field}.low_percentage")
    trigger = strategy.trigger_strategy
    if trigger is None:
        return
    _check_integers(trigger, f"{field}.trigger_strategy", ("used_size",))
    share = trigger.used_percentage
    _check_share(share, f"{field}.trigger_strategy.used_percentage")
    if 0 < share < low:
        raise InvalidArgument(
            f"{field}.low_percentage is {low}, above trigger_strategy.used_percentage {share}"
        )


def _check_marks(config: StorageConfig, field: str) -> None:
    high, low = config.high_percentage, config.low_percentage
    _check_share(high, f"{field}.high_percentage")
    _check_share(low, f"{field}.low_percentage")
    if 0 < high < low:
        raise InvalidArgument(f"{field}.low_percentage is {low}, above high_percentage {high}")


def _check_plugin(spec: Mapping[str, Any], field: str) -> None:
    name = spec.get(PLUGIN_NAME)
    if not isinstance(name, str) or not _PLUGIN_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{field}.name {name!r} must be 1 to {limits.PLUGIN_NAME_CHARACTERS_MAX} small letters,"
            " digits and _, a letter first: it is the scheme of location URIs"
        )
    options = {key: value for key, value in spec.items() if key != PLUGIN_NAME}
    _check_count(options, f"{field}.options", limits.OPTIONS_PER_PLUGIN_MAX)
    for option, value in options.items():
        check_name(option, f"{field}.options.name")
        if not isinstance(value, str):
            raise InvalidArgument(f"{field}.options: the value of {option!r} must be text")


def _check_share(value: float, field: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise InvalidArgument(f"{field} is {value}, must be a finite number >= 0")


def _check_indexer(config: MetaIndexerConfig, field: str) -> None:
    _check_integers(config, field, ("max_key_count", "mutex_shard_num", "batch_key_size"))
    shards = config.mutex_shard_num
    if shards & (shards - 1):
        raise InvalidArgument(f"{field}.mutex_shard_num is {shards}, must be a power of two")


def _check_specs(wanted: Instance) -> None:
    infos, field = wanted.location_spec_infos, "location_spec_infos"
    if not infos:
        raise InvalidArgument(f"{field} is empty: an instance has at least one spec")
    _check_count(infos, field, limits.SPECS_PER_INSTANCE_MAX)
    for i, info in enumerate(infos):
        check_name(info.name, f"{field}[{i}].name")
        if not 0 < info.size <= limits.SPEC_SIZE_BYTES_MAX:
            raise InvalidArgument(
                f"{field}[{i}].size of spec {info.name!r} is {info.size}, "
                f"must be within 1..{limits.SPEC_SIZE_BYTES_MAX}"
            )
    _check_distinct([info.name for info in infos], field, what="name")


def _check_spec_groups(wanted: Instance) -> None:
    groups, field = wanted.location_spec_groups, "location_spec_groups"
    _check_count(groups, field, limits.SPEC_GROUPS_PER_INSTANCE_MAX)
    known = {info.name for info in wanted.location_spec_infos}
    for i, group in enumerate(groups):
        check_name(group.name, f"{field}[{i}].name")
        _check_spec_names(group, known, f"{field}[{i}].spec_names")
    _check_distinct([group.name for group in groups], field, what="name")


def _check_spec_names(group: LocationSpecGroup, known: set[str], field: str) -> None:
    if not group.spec_names:
        raise InvalidArgument(f"{field} of group {group.name!r} is empty")
    for name in group.spec_names:
        if name not in known:
            raise InvalidArgument(f"{field} of group {group.name!r} names unknown spec {name!r}")
    _check_distinct(group.spec_names, field)


def _check_deployment(deployment: ModelDeployment) -> None:
    for name in ("model_name", "dtype", "lora_name"):
        check_text(getattr(deployment, name), f"model_deployment.{name}")
    for name in ("extra", "user_data"):
        value = getattr(deployment, name)
        check_text(value, f"model_deployment.{name}", bytes_max=limits.USER_DATA_BYTES_MAX)
    _check_integers(deployment, "model_deployment", ("tp_size", "dp_size", "pp_size"))


def _check_spec_value(value: Any, kind: type | None, field: str) -> None:
    if kind is not None and type(value) is not kind:
        raise InvalidArgument(f"{field} must be of type {kind.__name__}")
    if isinstance(value, str):
        check_text(value, field)
    elif kind is int and not 0 <= value <= INT32_MAX:
        raise InvalidArgument(f"{field} is {value}, must be within 0..{INT32_MAX}")


def _check_integers(entity: Any, field: str, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(entity, name)
        if not 0 <= value <= INT64_MAX:
            raise InvalidArgument(f"{field}.{name} is {value}, must be within 0..{INT64_MAX}")


def _check_count(values: Any, field: str, count_max: int) -> None:
    if len(values) > count_max:
        raise InvalidArgument(f"{field} has {len(values)} entries, more than {count_max}")


def _check_distinct(values: Iterable[str], field: str, *, what: str = "value") -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise InvalidArgument(f"{field} has {what} {value!r} twice")
        seen.add(value)


def _check_stored_values(entity: Any, field: str) -> None:
    """What the particular rules did not look at: other texts and numbers must be storable."""
    _walk(entity.model_dump(mode="python"), field)


def _walk(value: Any, field: str) -> None:
    if isinstance(value, str):
        check_text(value, field, bytes_max=limits.USER_DATA_BYTES_MAX)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"{field} is {value}, must be a finite number")
    elif isinstance(value, int) and not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise InvalidArgument(f"{field} is {value}, out of the range of int64")
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(item, f"{field}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _walk(item, f"{field}[{i}]")
