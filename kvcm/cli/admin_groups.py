"""``kvcm admin group``."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    plain,
    read_object,
    storage_type,
    storage_type_name,
)
from kvcm.cli.output import human_bytes, print_json, table
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.types import InstanceGroup

group = typer.Typer(no_args_is_help=True, help="Teams or model families: quota, candidates.")

NameArgument = Annotated[str, typer.Argument(help="The group's name.")]
CandidateOption = Annotated[
    list[str] | None,
    typer.Option("--candidate", help="A storage to place blocks on; may be repeated."),
]
CapacityOption = Annotated[str | None, typer.Option(help="Bytes in all, as 30GB.")]
TypeCapacityOption = Annotated[
    list[str] | None,
    typer.Option("--type-capacity", help="Bytes on one storage type, as file=10GB; repeatable."),
]
InstancesOption = Annotated[int | None, typer.Option("--max-instances", help="0 = no limit.")]
KeysOption = Annotated[int | None, typer.Option("--max-keys", help="Locations an instance.")]
WatermarkOption = Annotated[
    float | None,
    typer.Option("--watermark", help="Used share of the quota above which blocks are evicted."),
]
DelayOption = Annotated[
    int | None,
    typer.Option("--delete-delay-ms", help="From a block's eviction to its bytes' deletion."),
]
StrategyOption = Annotated[
    str | None, typer.Option("--strategy", help="Preferred storage type, as CPS_PREFER_3FS.")
]
QuotaGroupOption = Annotated[str | None, typer.Option("--quota-group")]
UserDataOption = Annotated[str | None, typer.Option("--user-data")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="group")


@dataclass(frozen=True, slots=True)
class _Flags:
    """What the flags name; None = not named."""

    candidates: list[str] | None
    capacity: str | None
    type_capacity: list[str] | None
    max_instances: int | None
    max_keys: int | None
    watermark: float | None
    delete_delay_ms: int | None
    strategy: str | None
    quota_group: str | None
    user_data: str | None

    def apply(self, value: dict[str, Any]) -> dict[str, Any]:
        """A group's JSON with the flags' changes; what they do not name stays."""
        value = json.loads(json.dumps(value))
        _put(value, ("storage_candidates",), self.candidates)
        _put(value, ("max_instance_count",), self.max_instances)
        _put(value, ("global_quota_group_name",), self.quota_group)
        _put(value, ("user_data",), self.user_data)
        if self.capacity is not None:
            _put(value, ("quota", "capacity"), parse_bytes(self.capacity))
        if self.type_capacity is not None:
            listed = [
                {"storage_type": int(storage_type(kind)), "capacity": parse_bytes(size)}
                for kind, size in pairs(self.type_capacity, "--type-capacity").items()
            ]
            _put(value, ("quota", "quota_config"), listed)
        reclaim = ("cache_config", "reclaim_strategy")
        _put(value, (*reclaim, "trigger_strategy", "used_percentage"), self.watermark)
        _put(value, (*reclaim, "delay_before_delete_ms"), self.delete_delay_ms)
        _put(value, ("cache_config", "meta_indexer_config", "max_key_count"), self.max_keys)
        _put(value, ("cache_config", "data_storage_strategy"), self.strategy)
        return value


def _put(value: dict[str, Any], path: tuple[str, ...], item: Any) -> None:
    if item is None:
        return
    for step in path[:-1]:
        value = value.setdefault(step, {})
    value[path[-1]] = item


@group.command("list")
def list_groups(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """All groups (read from a configuration snapshot)."""
    with admin(target) as client:
        groups = _groups(client)
        counts: dict[str, int] = {}
        for instance in client.list_instance_info():
            counts[instance.instance_group] = counts.get(instance.instance_group, 0) + 1
    if as_json:
        print_json([plain(item) for item in groups])
        return
    table(
        "instance groups",
        ("name", "instances", "capacity", "candidates", "version"),
        (
            (
                item.name,
                counts.get(item.name, 0),
                human_bytes(item.quota.capacity) if item.quota else "none",
                ", ".join(item.storage_candidates),
                item.version,
            )
            for item in groups
        ),
    )


@group.command("show")
def show_group(
    name: NameArgument, target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False
) -> None:
    """One group."""
    with admin(target) as client:
        found = client.get_instance_group(name)
    if as_json:
        print_json(plain(found))
        return
    table(f"instance group {name}", ("setting", "value"), _rows(found))


@group.command("create")
def create_group(
    name: Annotated[str | None, typer.Argument(help="The group's name.")] = None,
    candidate: CandidateOption = None,
    capacity: CapacityOption = None,
    type_capacity: TypeCapacityOption = None,
    max_instances: InstancesOption = None,
    max_keys: KeysOption = None,
    watermark: WatermarkOption = None,
    delete_delay_ms: DelayOption = None,
    strategy: StrategyOption = None,
    quota_group: QuotaGroupOption = None,
    user_data: UserDataOption = None,
    file: FileOption = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Create a group, from flags or a JSON file as `group show --json` prints (flags win)."""
    with admin(target) as client:
        value = _from_file(file) if file is not None else {"name": name, "version": 1}
        if name is not None:
            value["name"] = name
        elif file is None:
            raise InvalidArgument("a name or --file is needed")
        flags = _Flags(
            candidate, capacity, type_capacity, max_instances, max_keys, watermark,
            delete_delay_ms, strategy, quota_group, user_data,
        )  # fmt: skip
        wanted = entity(InstanceGroup, flags.apply(value), "instance group")
        client.create_instance_group(wanted)
    done(f"created instance group {wanted.name}", as_json)


@group.command("update")
def update_group(
    name: NameArgument,
    candidate: CandidateOption = None,
    capacity: CapacityOption = None,
    type_capacity: TypeCapacityOption = None,
    max_instances: InstancesOption = None,
    max_keys: KeysOption = None,
    watermark: WatermarkOption = None,
    delete_delay_ms: DelayOption = None,
    strategy: StrategyOption = None,
    quota_group: QuotaGroupOption = None,
    user_data: UserDataOption = None,
    file: FileOption = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Change a group; with flags what they do not name stays, a file replaces all."""
    with admin(target) as client:
        stored = client.get_instance_group(name)
        value = plain(stored) if file is None else _from_file(file) | {"name": name}
        flags = _Flags(
            candidate, capacity, type_capacity, max_instances, max_keys, watermark,
            delete_delay_ms, strategy, quota_group, user_data,
        )  # fmt: skip
        value = flags.apply(value) | {"version": stored.version + 1}
        client.update_instance_group(entity(InstanceGroup, value, "instance group"), stored.version)
    done(f"updated instance group {name} to version {stored.version + 1}", as_json)


@group.command("remove")
def remove_group(
    name: NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Remove its instances and all their blocks too.")
    ] = False,
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Remove a group."""
    with admin(target) as client:
        what = " with all its instances and blocks" if force else ""
        confirm(f"Remove instance group {name}{what}?", yes)
        client.remove_instance_group(name, force=force)
    done(f"removed instance group {name}", as_json)


def _from_file(file: FileOption) -> dict[str, Any]:
    assert file is not None
    value = read_object(file)
    check_known(InstanceGroup, value, str(file))
    return value


def _groups(client: AdminClient) -> list[InstanceGroup]:
    # There is no call that lists groups (wire.md §2).
    try:
        listed = json.loads(client.gen_config_snapshot())["instance_groups"]
    except (ValueError, KeyError, TypeError):
        raise KvcmError("the manager's snapshot does not list its instance groups") from None
    return [entity(InstanceGroup, value, "config_snapshot") for value in listed]


def _rows(found: InstanceGroup) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("version", str(found.version)),
        ("storage candidates", ", ".join(found.storage_candidates)),
        ("quota group", found.global_quota_group_name),
        ("max instances", f"{found.max_instance_count:,}"),
    ]
    if found.quota is not None:
        rows.append(("capacity", human_bytes(found.quota.capacity)))
        for quota in found.quota.quota_config:
            kind = storage_type_name(quota.storage_type)
            rows.append((f"capacity on {kind}", human_bytes(quota.capacity)))
    config = found.cache_config
    if config is not None:
        rows.append(("preferred storage", f"CPS_{config.data_storage_strategy.name}"))
        if config.meta_indexer_config is not None:
            rows.append(("max keys an instance", f"{config.meta_indexer_config.max_key_count:,}"))
        reclaim = config.reclaim_strategy
        if reclaim is not None:
            rows.append(("reclaim policy", f"POLICY_{reclaim.reclaim_policy.name}"))
            rows.append(("deletion delay", f"{reclaim.delay_before_delete_ms:,} ms"))
            if reclaim.trigger_strategy is not None:
                rows.append(("watermark", f"{reclaim.trigger_strategy.used_percentage:g}"))
    if found.user_data:
        rows.append(("user data", found.user_data))
    return rows
