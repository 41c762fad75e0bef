"""The settings of ``kvcm admin group create`` and ``update``: flags, and what they change."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvcm.cli.admin_common import pairs, parse_bytes, storage_type
from kvcm.core.errors import InvalidArgument

_RECLAIM = ("cache_config", "reclaim_strategy")
_INDEXER = ("cache_config", "meta_indexer_config")


@dataclass(frozen=True, slots=True)
class GroupFlags:
    """What the flags name; None = not named. For `kvcm.cli.spread`."""

    candidate: Annotated[
        list[str] | None,
        typer.Option("--candidate", help="A storage to place blocks on; may be repeated."),
    ] = None
    capacity: Annotated[str | None, typer.Option(help="Bytes in all, as 30GB.")] = None
    type_capacity: Annotated[
        list[str] | None,
        typer.Option(help="Bytes on one storage type, as file=10GB; repeatable."),
    ] = None
    max_instances: Annotated[int | None, typer.Option(help="0 = no limit.")] = None
    max_keys: Annotated[int | None, typer.Option(help="Locations an instance.")] = None
    watermark: Annotated[
        float | None,
        typer.Option(help="Used share of the quota above which blocks are evicted."),
    ] = None
    watermark_size: Annotated[
        str | None, typer.Option(help="The same in bytes of the group, as 20GB; 0 = none.")
    ] = None
    low_watermark: Annotated[
        float | None,
        typer.Option(help="Where eviction stops; 0 = 5 points below the mark it crossed."),
    ] = None
    reclaim_period: Annotated[
        int | None, typer.Option(help="Seconds between rounds of eviction; 0 = at once.")
    ] = None
    reclaim_step: Annotated[
        str | None, typer.Option(help="Bytes that one round evicts at most; 0 = no bound.")
    ] = None
    reclaim_step_percentage: Annotated[
        int | None, typer.Option(help="The same in percent of the limit; 0 = no bound.")
    ] = None
    policy: Annotated[
        str | None, typer.Option(help="Who goes first: POLICY_LRU, POLICY_LFU or POLICY_TTL.")
    ] = None
    ttl: Annotated[
        int | None, typer.Option(help="Seconds after which POLICY_TTL lets blocks go; 0 = never.")
    ] = None
    ttl_since: Annotated[str | None, typer.Option(help="TTL_SINCE_USE or TTL_SINCE_FINISH.")] = None
    admission: Annotated[
        str | None, typer.Option(help="ADMISSION_ALL, or ADMISSION_TINYLFU when space is scarce.")
    ] = None
    delete_delay_ms: Annotated[
        int | None,
        typer.Option(help="From a block's eviction to its bytes' deletion."),
    ] = None
    strategy: Annotated[
        str | None, typer.Option(help="Preferred storage type, as CPS_PREFER_3FS.")
    ] = None
    quota_group: Annotated[str | None, typer.Option()] = None
    user_data: Annotated[str | None, typer.Option()] = None

    def apply(self, value: dict[str, Any]) -> dict[str, Any]:
        """A group's JSON with the flags' changes; what they do not name stays.

        Raises:
            InvalidArgument: a size, number or storage type that is none.
        """
        value = json.loads(json.dumps(value))
        for path, item in self._changes():
            if isinstance(item, float) and not math.isfinite(item):
                raise InvalidArgument(f"{path[-1]} is {item}, must be a finite number")
            if item is not None:
                _put(value, path, item)
        return value

    def _changes(self) -> list[tuple[tuple[str, ...], Any]]:
        types = None
        if self.type_capacity is not None:
            types = [
                {"storage_type": int(storage_type(kind)), "capacity": parse_bytes(size)}
                for kind, size in pairs(self.type_capacity, "--type-capacity").items()
            ]
        trigger = (*_RECLAIM, "trigger_strategy")
        return [
            (("storage_candidates",), self.candidate),
            (("max_instance_count",), self.max_instances),
            (("global_quota_group_name",), self.quota_group),
            (("user_data",), self.user_data),
            (("quota", "capacity"), _bytes(self.capacity)),
            (("quota", "quota_config"), types),
            ((*trigger, "used_percentage"), self.watermark),
            ((*trigger, "used_size"), _bytes(self.watermark_size)),
            ((*_RECLAIM, "low_percentage"), self.low_watermark),
            ((*_RECLAIM, "trigger_period_seconds"), self.reclaim_period),
            ((*_RECLAIM, "reclaim_step_size"), _bytes(self.reclaim_step)),
            ((*_RECLAIM, "reclaim_step_percentage"), self.reclaim_step_percentage),
            ((*_RECLAIM, "reclaim_policy"), self.policy),
            ((*_RECLAIM, "ttl_seconds"), self.ttl),
            ((*_RECLAIM, "ttl_since"), self.ttl_since),
            ((*_RECLAIM, "admission"), self.admission),
            ((*_RECLAIM, "delay_before_delete_ms"), self.delete_delay_ms),
            ((*_INDEXER, "max_key_count"), self.max_keys),
            (("cache_config", "data_storage_strategy"), self.strategy),
        ]


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _put(value: dict[str, Any], path: tuple[str, ...], item: Any) -> None:
    for step in path[:-1]:
        value = value.setdefault(step, {})
    value[path[-1]] = item
