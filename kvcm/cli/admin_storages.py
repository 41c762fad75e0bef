"""``kvcm admin storage``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvcm.cli.admin_common import (
    DEFAULT_TARGET,
    FileOption,
    JsonOption,
    TargetOption,
    YesOption,
    admin,
    check_known,
    confirm,
    done,
    entity,
    pairs,
    parse_bytes,
    read_object,
    storage_type,
    storage_type_name,
)
from kvcm.cli.output import exact_bytes, print_json, table
from kvcm.client import AdminClient
from kvcm.core.errors import EntityNotExist, InvalidArgument
from kvcm.core.types import (
    PLUGIN_NAME,
    STORAGE_TYPE_NAMES,
    StorageConfig,
    StorageStatus,
    StorageType,
)

storage = typer.Typer(no_args_is_help=True, help="Places for bytes.")

NameArgument = Annotated[str, typer.Argument(help="The storage's global unique name.")]
SpecOption = Annotated[
    list[str] | None,
    typer.Option(
        "--spec",
        "-s",
        help="A field of the type, as root_path=/mnt/kv, or a plug-in's option; may be repeated.",
    ),
]

CapacityOption = Annotated[
    str | None,
    typer.Option(help="Bytes that all groups together may hold there, as 4TB; 0 = no limit."),
]
HighOption = Annotated[
    float | None,
    typer.Option("--watermark", help="Used share of it above which eviction begins; 0 = never."),
]
LowOption = Annotated[
    float | None,
    typer.Option("--low-watermark", help="Where that eviction stops; 0 = 5 points below."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(storage, name="storage")


@storage.command("list")
def list_storages(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """All storages.

    Example: kvcm admin storage list
    """
    with admin(target) as client:
        configs = client.list_storage()
    if as_json:
        print_json([_plain(config) for config in configs])
        return
    table(
        "storages",
        ("name", "type", "state", "capacity", "watermark", "settings"),
        (
            (
                config.global_unique_name,
                _type_name(config),
                _state(config),
                exact_bytes(config.capacity_bytes) if config.capacity_bytes else "none",
                f"{config.high_percentage:g}" if config.high_percentage else "none",
                ", ".join(f"{key}={value}" for key, value in config.spec.items() if value != ""),
            )
            for config in configs
        ),
    )


@storage.command("add")
def add_storage(
    name: Annotated[str | None, typer.Argument(help="The storage's global unique name.")] = None,
    kind: Annotated[
        str,
        typer.Option("--type", help="file, hf3fs, vcns_hf3fs, mooncake, pace or a plug-in's name."),
    ] = "file",
    spec: SpecOption = None,
    check: Annotated[bool, typer.Option(help="Refuse it when it cannot be used now.")] = False,
    capacity: CapacityOption = None,
    watermark: HighOption = None,
    low_watermark: LowOption = None,
    file: FileOption = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Add a storage, from flags or a JSON file as `storage list --json` prints.

    Example: kvcm admin storage add nfs_02 --type file --spec root_path=/mnt/kv/ --check
    """
    with admin(target) as client:
        config = _wanted(name, kind, spec, check, file)
        space = _space(capacity, watermark, low_watermark)
        client.add_storage(config.model_copy(update=space))
    done(f"added storage {config.global_unique_name}", as_json)


@storage.command("update")
def update_storage(
    name: NameArgument,
    spec: SpecOption = None,
    check: Annotated[bool | None, typer.Option(help="Check it when it is opened.")] = None,
    capacity: CapacityOption = None,
    watermark: HighOption = None,
    low_watermark: LowOption = None,
    file: FileOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Move it although blocks live there: they are lost.")
    ] = False,
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Change a storage; fields that are not named stay.

    Example: kvcm admin storage update nfs_02 --capacity 4TB --watermark 0.9
    """
    with admin(target) as client:
        if file is not None:
            config = _from_file(file)
            if config.global_unique_name != name:
                raise InvalidArgument(f"{file} is of storage {config.global_unique_name!r}")
        else:
            config = _stored(client, name)
        is_plugin = config.type is StorageType.PLUGIN
        fields = _options(spec) if is_plugin else _fields(spec)
        changes: dict[str, Any] = {"spec": {**config.spec, **fields}}
        changes |= _space(capacity, watermark, low_watermark)
        if check is not None:
            changes["check_storage_available_when_open"] = check
        if force:
            confirm(f"Blocks on {name} may become misses. Go on?", yes)
        client.update_storage(config.model_copy(update=changes), force_update=force)
    done(f"updated storage {name}", as_json)


@storage.command("enable")
def enable_storage(
    name: NameArgument, target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False
) -> None:
    """Let a storage take writes and answer lookups again.

    Example: kvcm admin storage enable nfs_02
    """
    with admin(target) as client:
        client.enable_storage(name)
    done(f"enabled storage {name}", as_json)


@storage.command("disable")
def disable_storage(
    name: NameArgument, target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False
) -> None:
    """Take a storage out of service; its blocks are misses until it is enabled again.

    Example: kvcm admin storage disable nfs_02
    """
    with admin(target) as client:
        client.disable_storage(name)
    done(f"disabled storage {name}", as_json)


@storage.command("remove")
def remove_storage(
    name: NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Although blocks live there: they become misses.")
    ] = False,
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Remove a storage from the configuration.

    Example: kvcm admin storage remove nfs_02
    """
    with admin(target) as client:
        confirm(f"Remove storage {name}?", yes)
        client.remove_storage(name, force=force)
    done(f"removed storage {name}", as_json)


def _wanted(
    name: str | None, kind: str, spec: list[str] | None, check: bool, file: FileOption
) -> StorageConfig:
    if file is not None:
        if name is not None or spec:
            raise InvalidArgument("give either --file or a name and flags")
        return _from_file(file)
    if name is None:
        raise InvalidArgument("a name or --file is needed")
    served_as, named = _typed(kind)
    fields = _options(spec) if named else _fields(spec)
    return StorageConfig(
        global_unique_name=name,
        type=served_as,
        spec={**fields, **named},
        check_storage_available_when_open=check,
    )


def _space(
    capacity: str | None, watermark: float | None, low_watermark: float | None
) -> dict[str, Any]:
    """Fields that the flags name."""
    given = {
        "capacity_bytes": None if capacity is None else parse_bytes(capacity),
        "high_percentage": watermark,
        "low_percentage": low_watermark,
    }
    return {name: value for name, value in given.items() if value is not None}


def _from_file(file: FileOption) -> StorageConfig:
    assert file is not None
    value = read_object(file)
    # What `storage list --json` prints can be given back.
    check_known(StorageStatus, value, str(file))
    value.pop("unavailable_reason", None)
    value.pop("health", None)
    value.pop("unwritable_reason", None)
    if isinstance(value.get("type"), str):
        value["type"], named = _typed(value["type"])
        value["spec"] = {**value.get("spec", {}), **named}
    return entity(StorageConfig, value, str(file))


def _stored(client: AdminClient, name: str) -> StorageConfig:
    for config in client.list_storage():
        if config.global_unique_name == name:
            return config
    raise EntityNotExist(f"storage {name!r} does not exist")


def _fields(spec: list[str] | None) -> dict[str, Any]:
    return {key: _value(text) for key, text in pairs(spec, "--spec").items()}


def _options(spec: list[str] | None) -> dict[str, Any]:
    """A plug-in's: all of them are text."""
    return dict(pairs(spec, "--spec"))


def _typed(name: str) -> tuple[StorageType, dict[str, Any]]:
    """A type and, when a plug-in serves it, the field of the spec that says which. What is
    installed, only the manager knows."""
    if name in STORAGE_TYPE_NAMES.values() or name.startswith("ST_"):
        return storage_type(name), {}
    return StorageType.PLUGIN, {PLUGIN_NAME: name}


def _type_name(config: StorageConfig) -> str:
    return config.type_name or storage_type_name(config.type)


def _value(text: str) -> Any:
    """Numbers and booleans as such, all else as text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _plain(config: StorageStatus) -> dict[str, Any]:
    return config.model_dump(mode="json") | {"type": _type_name(config)}


def _state(config: StorageStatus) -> str:
    if not config.enabled:
        return "disabled"
    reason = config.unavailable_reason
    if reason:
        return f"unavailable: {reason}"
    if config.unwritable_reason:
        return f"only readable: {config.unwritable_reason}"
    return config.health or "available"
