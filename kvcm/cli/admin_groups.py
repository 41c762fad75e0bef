"""``kvcm admin group``."""

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
    plain,
    read_object,
    storage_type_name,
)
from kvcm.cli.group_flags import GroupFlags
from kvcm.cli.output import exact_bytes, print_json, table
from kvcm.cli.spread import spread
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument, KvcmError
from kvcm.core.types import AdmissionPolicy, CacheReclaimStrategy, InstanceGroup

group = typer.Typer(no_args_is_help=True, help="Teams or model families: quota, candidates.")

NameArgument = Annotated[str, typer.Argument(help="The group's name.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="group")


@group.command("list")
def list_groups(target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False) -> None:
    """All groups (read from a configuration snapshot).

    Example: kvcm admin group list
    """
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
                exact_bytes(item.quota.capacity) if item.quota else "none",
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
    """One group.

    Example: kvcm admin group show default
    """
    with admin(target) as client:
        found = client.get_instance_group(name)
    if as_json:
        print_json(plain(found))
        return
    table(f"instance group {name}", ("setting", "value"), _rows(found))


@group.command("create")
@spread(GroupFlags)
def create_group(
    name: Annotated[str | None, typer.Argument(help="The group's name.")] = None,
    *,
    flags: GroupFlags,
    file: FileOption = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Create a group, from flags or a JSON file as `group show --json` prints (flags win).

    Example: kvcm admin group create team-a --candidate nfs_01 --capacity 500GB
    """
    with admin(target) as client:
        value = _from_file(file) if file is not None else {"name": name, "version": 1}
        if name is not None:
            value["name"] = name
        elif file is None:
            raise InvalidArgument("a name or --file is needed")
        wanted = entity(InstanceGroup, flags.apply(value), "instance group")
        client.create_instance_group(wanted)
    done(f"created instance group {wanted.name}", as_json)


@group.command("update")
@spread(GroupFlags)
def update_group(
    name: NameArgument,
    flags: GroupFlags,
    file: FileOption = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Change a group; with flags what they do not name stays, a file replaces all.

    Example: kvcm admin group update team-a --capacity 1TB --watermark 0.9
    """
    with admin(target) as client:
        stored = client.get_instance_group(name)
        value = plain(stored) if file is None else _from_file(file) | {"name": name}
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
    """Remove a group.

    Example: kvcm admin group remove team-a
    """
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
        rows.append(("capacity", exact_bytes(found.quota.capacity)))
        for quota in found.quota.quota_config:
            kind = storage_type_name(quota.storage_type)
            rows.append((f"capacity on {kind}", exact_bytes(quota.capacity)))
    config = found.cache_config
    if config is not None:
        rows.append(("preferred storage", f"CPS_{config.data_storage_strategy.name}"))
        if config.meta_indexer_config is not None:
            rows.append(("max keys an instance", f"{config.meta_indexer_config.max_key_count:,}"))
        reclaim = config.reclaim_strategy
        if reclaim is not None:
            rows += _reclaim_rows(reclaim)
    if found.user_data:
        rows.append(("user data", found.user_data))
    return rows


def _reclaim_rows(reclaim: CacheReclaimStrategy) -> list[tuple[str, object]]:
    """What is set; bounds and ages of 0 are none, and left out."""
    rows: list[tuple[str, object]] = [
        ("reclaim policy", f"POLICY_{reclaim.reclaim_policy.name}"),
        ("deletion delay", f"{reclaim.delay_before_delete_ms:,} ms"),
    ]
    if (trigger := reclaim.trigger_strategy) is not None:
        rows.append(("watermark", f"{trigger.used_percentage:g}"))
        if trigger.used_size:
            rows.append(("watermark in bytes", exact_bytes(trigger.used_size)))
    if reclaim.low_percentage:
        rows.append(("low watermark", f"{reclaim.low_percentage:g}"))
    if reclaim.trigger_period_seconds:
        rows.append(("seconds between rounds", f"{reclaim.trigger_period_seconds:,}"))
    if reclaim.reclaim_step_size:
        rows.append(("evicted a round", exact_bytes(reclaim.reclaim_step_size)))
    if reclaim.reclaim_step_percentage:
        rows.append(("evicted a round", f"{reclaim.reclaim_step_percentage} %"))
    if reclaim.ttl_seconds:
        since = reclaim.ttl_since.name.lower()
        rows.append(("age limit", f"{reclaim.ttl_seconds:,} s since {since}"))
    if reclaim.admission is not AdmissionPolicy.ALL:
        rows.append(("admission", f"ADMISSION_{reclaim.admission.name}"))
    return rows
