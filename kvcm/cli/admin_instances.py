"""``kvcm admin instance``."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from kvcm.cli.admin_common import (
    DEFAULT_TARGET,
    JsonOption,
    TargetOption,
    YesOption,
    admin,
    confirm,
    done,
    pairs,
    parse_bytes,
)
from kvcm.cli.output import exact_bytes, print_json, table
from kvcm.client import InstanceInfo
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import ModelDeployment

instance = typer.Typer(no_args_is_help=True, help="Model deployments.")

IdArgument = Annotated[str, typer.Argument(help="The instance id.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(instance, name="instance")


@instance.command("list")
def list_instances(
    group: Annotated[str, typer.Option(help="Only those of this group.")] = "",
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """The instances.

    Example: kvcm admin instance list --group default
    """
    with admin(target) as client:
        found = client.list_instance_info(group)
        if group and not found:
            # A group that does not exist is told apart from an empty one.
            client.get_instance_group(group)
    if as_json:
        print_json([_plain(info) for info in found])
        return
    table(
        "instances",
        ("id", "group", "model", "tokens a block", "specs", "bytes a block"),
        (
            (
                info.instance_id,
                info.instance_group,
                info.model_deployment.model_name if info.model_deployment else "",
                info.block_size,
                len(info.location_spec_infos),
                sum(spec.size for spec in info.location_spec_infos),
            )
            for info in found
        ),
    )


@instance.command("show")
def show_instance(
    instance_id: IdArgument, target: TargetOption = DEFAULT_TARGET, as_json: JsonOption = False
) -> None:
    """One instance.

    Example: kvcm admin instance show llama-8b
    """
    with admin(target) as client:
        info = client.get_instance_info(instance_id)
    if as_json:
        print_json(_plain(info))
        return
    rows: list[tuple[str, object]] = [
        ("group", info.instance_group),
        ("quota group", info.quota_group_name),
        ("tokens a block", f"{info.block_size:,}"),
    ]
    rows += [(f"spec {spec.name}", exact_bytes(spec.size)) for spec in info.location_spec_infos]
    rows += [(f"spec group {g.name}", ", ".join(g.spec_names)) for g in info.location_spec_groups]
    if info.model_deployment is not None:
        rows += [(name, str(value)) for name, value in info.model_deployment if value]
    table(f"instance {instance_id}", ("setting", "value"), rows)


@instance.command("register")
def register_instance(
    instance_id: IdArgument,
    spec: Annotated[
        list[str], typer.Option("--spec", "-s", help="Name and bytes, as tp0=4096; repeatable.")
    ],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a block.")],
    group: Annotated[str, typer.Option(help="The instance group.")] = "default",
    model: Annotated[str, typer.Option(help="The model's name.")] = "",
    dtype: Annotated[str, typer.Option(help="Its data type.")] = "",
    spec_group: Annotated[
        list[str] | None,
        typer.Option("--spec-group", help="Name and specs, as full=tp0,tp1; repeatable."),
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Register an instance; again with the same data is fine.

    Example: kvcm admin instance register llama-8b --block-size 16 --spec tp0=4096 --spec tp1=4096
    """
    with admin(target) as client:
        sizes = {name: parse_bytes(size) for name, size in pairs(spec, "--spec").items()}
        if not sizes:
            raise InvalidArgument("at least one --spec is needed")
        groups = {
            name: names.split(",") for name, names in pairs(spec_group, "--spec-group").items()
        }
        client.register_instance(
            group,
            instance_id,
            block_size,
            sizes,
            location_spec_groups=groups,
            model_deployment=ModelDeployment(model_name=model, dtype=dtype, tp_size=len(sizes)),
        )
    done(f"registered instance {instance_id} in group {group}", as_json)


@instance.command("remove")
def remove_instance(
    instance_id: IdArgument,
    group: Annotated[str, typer.Option(help="Refuse it unless it is of this group.")] = "",
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Remove an instance and all its blocks.

    Example: kvcm admin instance remove llama-8b
    """
    with admin(target) as client:
        confirm(f"Remove instance {instance_id} and all its blocks?", yes)
        client.remove_instance(instance_id, instance_group=group)
    done(f"removed instance {instance_id}; its space is freed in the background", as_json)


def _plain(info: InstanceInfo) -> dict[str, Any]:
    return {
        field.name: _plain_value(getattr(info, field.name)) for field in dataclasses.fields(info)
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
