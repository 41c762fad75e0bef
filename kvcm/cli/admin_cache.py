"""``kvcm admin cache``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from kvcm.cli.admin_common import (
    DEFAULT_TARGET,
    TIMEOUT_S,
    JsonOption,
    TargetOption,
    YesOption,
    admin,
    confirm,
    done,
)
from kvcm.cli.output import one_line_errors, print_json, table
from kvcm.client import BlockMeta, Client
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import TrimStrategy

cache = typer.Typer(no_args_is_help=True, help="Blocks.")

# Keys may be negative: what looks like an unknown option is an argument.
_KEYS = {"ignore_unknown_options": True}
InstanceArgument = Annotated[str, typer.Argument(help="The instance id.")]
KeysArgument = Annotated[list[str], typer.Argument(help="Block keys (int64).", metavar="KEY...")]
META_TARGET = "127.0.0.1:6381"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(cache, name="cache")


@cache.command("inspect", context_settings=_KEYS)
def inspect(
    instance_id: InstanceArgument,
    keys: KeysArgument,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """What the manager knows of blocks; does not count as an access.

    Example: kvcm admin cache inspect llama-8b 101 102
    """
    with admin(target) as client:
        numbers = _keys(keys)
        metas = client.get_cache_meta(instance_id, numbers, detail_level=1)
    if as_json:
        print_json([_plain(key, meta) for key, meta in zip(numbers, metas, strict=True)])
        return
    table(
        f"blocks of {instance_id}",
        ("key", "status", "details", "places"),
        (_row(key, meta) for key, meta in zip(numbers, metas, strict=True)),
    )


@cache.command("remove", context_settings=_KEYS)
def remove(
    instance_id: InstanceArgument,
    keys: KeysArgument,
    yes: YesOption = False,
    target: TargetOption = DEFAULT_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Forget blocks and free their space.

    Example: kvcm admin cache remove llama-8b 101 102
    """
    with admin(target) as client:
        numbers = _keys(keys)
        what = "1 block" if len(numbers) == 1 else f"{len(numbers):,} blocks"
        confirm(f"Remove {what} of {instance_id}?", yes)
        client.remove_cache(instance_id, numbers)
    done(f"removed {what} of {instance_id}", as_json)


@cache.command("trim")
def trim(
    instance_id: InstanceArgument,
    begin: Annotated[
        int | None, typer.Option("--from", help="Only blocks finished from here on, epoch seconds.")
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", help="Only blocks finished before, epoch seconds.")
    ] = None,
    meta_only: Annotated[
        bool, typer.Option("--meta-only", help="Drop the records; files fall to the repair sweep.")
    ] = False,
    yes: YesOption = False,
    meta_target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            "--meta-target",
            help="Address of the meta service: the admin service cannot trim.",
        ),
    ] = META_TARGET,
    as_json: JsonOption = False,
) -> None:
    """Forget all blocks of an instance, or those finished in a span of time.

    Example: kvcm admin cache trim llama-8b --from 1767225600 --to 1767312000
    """
    with one_line_errors(meta_target):
        strategy = TrimStrategy.REMOVE_ALL_META if meta_only else TrimStrategy.REMOVE_ALL_CACHE
        if (begin is None) != (end is None):
            raise InvalidArgument("--from and --to go together")
        if begin is not None:
            if meta_only:
                raise InvalidArgument("--meta-only trims everything: it takes no span")
            strategy = TrimStrategy.TIMESTAMP
        which = "all blocks" if begin is None else f"the blocks finished in [{begin}, {end})"
        confirm(f"Remove {which} of {instance_id}?", yes)
        with Client(meta_target, timeout=TIMEOUT_S) as client:
            client.trim_cache(
                instance_id, strategy, begin_timestamp=begin or 0, end_timestamp=end or 0
            )
    done(f"trimmed {instance_id}", as_json)


def _keys(texts: list[str]) -> list[int]:
    numbers = []
    for text in texts:
        try:
            number = int(text)
        except ValueError:
            raise InvalidArgument(f"{text!r} is no block key (int64) and no option") from None
        if not -(2**63) <= number < 2**63:
            raise InvalidArgument(f"key {text} is outside int64")
        numbers.append(number)
    return numbers


def _plain(key: int, meta: BlockMeta) -> dict[str, Any]:
    uris = {name: uri for name, uri in meta.location.specs.items() if uri}
    return {"key": key, "meta": dict(meta.meta), "location": uris}


def _row(key: int, meta: BlockMeta) -> tuple[str, str, str, str]:
    details = []
    for name, value in meta.meta.items():
        if name in ("status", "locations") or isinstance(value, dict | list):
            continue
        details.append(f"{name} {_time(value) if 'time' in name else value}")
    uris = [f"{name}: {uri}" for name, uri in meta.location.specs.items() if uri]
    return str(key), meta.status, "\n".join(details), "\n".join(uris)


def _time(value: Any) -> str:
    """Epoch seconds or milliseconds for people; anything else as it is."""
    if not isinstance(value, int | float) or value <= 0:
        return str(value)
    seconds = value / 1000 if value > 1e11 else value
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return str(value)
