"""What the dashboards show, as data. `tools/gen_dashboards.py` makes Grafana's JSON of it.

Traffic is summed over managers. What every manager knows of the same thing (space, storages, hit
rates of windows) is the largest that one of them tells: one that does not lead may know less.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Unit = Literal["short", "percentunit", "bytes", "binBps", "s", "reqps", "ops"]
"""Grafana's ids of units; ``percentunit`` is a share of 1, ``ops`` anything a second."""


@dataclass(frozen=True)
class Panel:
    """Queries on one scale.

    ``queries`` maps legends (``{{label}}`` is that label's value) to expressions of PromQL.
    ``bad_from`` colours a number red from that value on.
    """

    title: str
    says: str
    unit: Unit
    queries: dict[str, str]
    kind: Literal["lines", "stacked", "number"] = "lines"
    bad_from: float | None = None


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard: values of a label of a metric."""

    name: str
    metric: str
    label: str
    all_too: bool = False


@dataclass(frozen=True)
class Dashboard:
    """A page; ``rows`` maps headings to panels."""

    name: str
    title: str
    says: str
    rows: dict[str, list[Panel]]
    variables: list[Variable] = field(default_factory=list)


def rate(metric: str, labels: str = "") -> str:
    """Increase a second."""
    return f"rate({metric}{{{labels}}}[$__rate_interval])"


def share(part: str, whole: str, labels: str = "", whole_labels: str = "", by: str = "") -> str:
    """Two counters, divided over the same time."""
    above = f"sum{by}({rate(part, labels)})"
    return f"{above} / (sum{by}({rate(whole, whole_labels or labels)}) > 0)"


def quantile(q: float, metric: str, by: str, labels: str = "") -> str:
    """Estimate from a histogram, by a label."""
    return f"histogram_quantile({q}, sum by (le, {by}) ({rate(metric + '_bucket', labels)}))"


def hit_rates(labels: str = "") -> dict[str, str]:
    """The three hit rates of docs/metrics.md; windows are left out, see there."""
    prefix = ", ".join(filter(None, [labels, 'query="prefix"']))
    asked = f'{prefix}, outcome!="empty"'
    return {
        "request-weighted": share(
            "kvcm_lookup_hit_ratios_total", "kvcm_lookups_total", prefix, asked
        ),
        "block-weighted": share("kvcm_lookup_hit_blocks_total", "kvcm_lookup_blocks_total", prefix),
        "token-weighted": share("kvcm_lookup_hit_tokens_total", "kvcm_lookup_tokens_total", prefix),
    }


_GROUP = 'group="$group"'
_STORAGE = 'storage=~"$storage"'
_MANAGER = 'instance=~"$manager"'
_NOT_OK = f'{_MANAGER}, code!="OK"'
_IN_USE = "max by (group) (sum by (group, instance, job) (kvcm_group_bytes))"

FLEET = Dashboard(
    "fleet",
    "kvcm: fleet",
    "Is it healthy, is it worth its money, what should change?",
    {
        "Is it healthy?": [
            Panel("Leaders", "Must be 1.", "short", {"": "sum(kvcm_leader)"}, "number"),
            Panel(
                "Managers ready", "Managers that serve.", "short", {"": "sum(kvcm_ready)"}, "number"
            ),
            Panel(
                "Storages in trouble",
                "Suspect or unavailable: their blocks are misses.",
                "short",
                {
                    "": "sum(max by (storage, state) "
                    '(kvcm_storage_state{state=~"suspect|unavailable"}))'
                },
                "number",
                1,
            ),
            Panel(
                "Lookup, 99 of 100",
                "99 of 100 lookups take no longer.",
                "s",
                {"": quantile(0.99, "kvcm_call_seconds", "api", 'api="GetCacheLocation"')},
                "number",
            ),
            Panel(
                "Calls",
                "Calls a second by outcome.",
                "reqps",
                {"{{outcome}}": f"sum by (outcome) ({rate('kvcm_call_seconds_count')})"},
                "stacked",
            ),
            Panel(
                "Refused blocks",
                "Missing blocks a second that a limit or admission did not let through.",
                "ops",
                {"{{reason}}": f"sum by (reason) ({rate('kvcm_write_refused_blocks_total')})"},
                "stacked",
            ),
        ],
        "Is it worth its money?": [
            Panel("Hit rates", "Of prefix lookups.", "percentunit", hit_rates()),
            Panel(
                "Tokens saved",
                "Tokens a second that need not be computed.",
                "ops",
                {"{{group}}": f"sum by (group) ({rate('kvcm_lookup_hit_tokens_total')})"},
                "stacked",
            ),
            Panel(
                "Below the ceiling",
                "What a cache without limits would hit more, of all blocks asked for in an hour.",
                "percentunit",
                {
                    "{{group}}": "max by (group) (clamp_min("
                    'kvcm_group_window_ceiling_ratio{window="1h"} '
                    '- kvcm_group_window_hit_ratio{window="1h"}, 0))'
                },
            ),
        ],
        "What should change?": [
            Panel(
                "Space in use",
                "Bytes held of the group's capacity.",
                "percentunit",
                {"{{group}}": f"{_IN_USE} / max by (group) (kvcm_group_capacity_bytes)"},
            ),
            Panel(
                "More space that would help",
                "Bytes more that would have made nine of ten evicted blocks hits, within a day.",
                "bytes",
                {"{{group}}": 'max by (group) (kvcm_group_window_more_space_bytes{window="24h"})'},
            ),
            Panel(
                "Misses by cause",
                "Blocks of the last hour; new ones no cache could have had.",
                "short",
                {"{{cause}}": 'sum by (cause) (kvcm_group_window_misses{window="1h"})'},
                "stacked",
            ),
        ],
    },
)

GROUP = Dashboard(
    "group",
    "kvcm: instance group",
    "One instance group: hit rate against what is possible, space, writes.",
    {
        "Hits": [
            Panel("Hit rates", "Of prefix lookups.", "percentunit", hit_rates(_GROUP)),
            Panel(
                "Hit rate and ceiling",
                "Of blocks asked for within an hour: what was hit, and what could have been.",
                "percentunit",
                {
                    "hit rate": f'max(kvcm_group_window_hit_ratio{{{_GROUP}, window="1h"}})',
                    "ceiling": f'max(kvcm_group_window_ceiling_ratio{{{_GROUP}, window="1h"}})',
                },
            ),
            Panel(
                "Misses by cause",
                "Blocks of the last hour; new ones no cache could have had.",
                "short",
                {
                    "{{cause}}": "max by (cause) "
                    f'(kvcm_group_window_misses{{{_GROUP}, window="1h"}})'
                },
                "stacked",
            ),
            Panel(
                "Blocks asked for, by instance",
                "Blocks a second.",
                "ops",
                {
                    "{{instance_id}}": "sum by (instance_id) "
                    f"({rate('kvcm_lookup_blocks_total', _GROUP)})"
                },
                "stacked",
            ),
            Panel(
                "Hit rate by instance",
                "Block-weighted.",
                "percentunit",
                {
                    "{{instance_id}}": share(
                        "kvcm_lookup_hit_blocks_total",
                        "kvcm_lookup_blocks_total",
                        f'{_GROUP}, query="prefix"',
                        by=" by (instance_id) ",
                    )
                },
            ),
            Panel(
                "Silent instances",
                "Registered, and without lookups and writes for a while.",
                "short",
                {"silent": f"max(kvcm_silent_instances{{{_GROUP}}})"},
            ),
        ],
        "Space": [
            Panel(
                "Bytes held",
                "By state; dead ones wait in files that hold living blocks, trash to be deleted.",
                "bytes",
                {"{{state}}": f"max by (state) (kvcm_group_bytes{{{_GROUP}}})"},
                "stacked",
            ),
            Panel(
                "Bytes against limits",
                "Eviction begins above the high mark and ends at the low one.",
                "bytes",
                {
                    "held": f"max(sum by (instance, job) (kvcm_group_bytes{{{_GROUP}}}))",
                    "capacity": f"max(kvcm_group_capacity_bytes{{{_GROUP}}})",
                    "high mark": f"max(kvcm_group_high_bytes{{{_GROUP}}})",
                    "low mark": f"max(kvcm_group_low_bytes{{{_GROUP}}})",
                },
            ),
            Panel(
                "Blocks by instance",
                "Blocks that are served.",
                "short",
                {
                    "{{instance_id}}": "max by (instance_id) "
                    f'(kvcm_instance_blocks{{{_GROUP}, state="serving"}})'
                },
                "stacked",
            ),
        ],
        "Writes": [
            Panel(
                "Blocks written",
                "Blocks a second whose write ended, by how.",
                "ops",
                {
                    "{{outcome}}": "sum by (outcome) "
                    f"({rate('kvcm_write_ended_blocks_total', _GROUP)})"
                },
                "stacked",
            ),
            Panel(
                "Blocks refused",
                "Missing blocks a second that a limit or admission did not let through.",
                "ops",
                {
                    "{{reason}}": "sum by (reason) "
                    f"({rate('kvcm_write_refused_blocks_total', _GROUP)})"
                },
                "stacked",
            ),
            Panel(
                "Blocks gone",
                "Blocks a second that stopped being served, by reason.",
                "ops",
                {"{{reason}}": f"sum by (reason) ({rate('kvcm_removed_blocks_total', _GROUP)})"},
                "stacked",
            ),
        ],
    },
    [Variable("group", "kvcm_group_capacity_bytes", "group")],
)

STORAGE = Dashboard(
    "storage",
    "kvcm: storages",
    "Health and space of the storages, and what waits to be deleted there.",
    {
        "Health": [
            Panel(
                "In trouble",
                "1 while a storage is suspect or unavailable: its blocks are misses.",
                "short",
                {
                    "{{storage}} {{state}}": "max by (storage, state) "
                    f'(kvcm_storage_state{{{_STORAGE}, state=~"suspect|unavailable"}})'
                },
            ),
            Panel(
                "Writable",
                "0 while a storage is full or read-only.",
                "short",
                {"{{storage}}": f"min by (storage) (kvcm_storage_writable{{{_STORAGE}}})"},
            ),
            Panel(
                "Left alone",
                "1 while several readers could not read it.",
                "short",
                {"{{storage}}": f"max by (storage) (kvcm_storage_breaker_open{{{_STORAGE}}})"},
            ),
            Panel(
                "Probes, 99 of 100",
                "99 of 100 probes take no longer.",
                "s",
                {"{{storage}}": quantile(0.99, "kvcm_storage_probe_seconds", "storage", _STORAGE)},
            ),
            Panel(
                "Probes",
                "Probes a second by result.",
                "ops",
                {
                    "{{storage}} {{result}}": "sum by (storage, result) "
                    f"({rate('kvcm_storage_probe_seconds_count', _STORAGE)})"
                },
            ),
            Panel(
                "Changes of state",
                "How often a storage came into a state, within an hour.",
                "short",
                {
                    "{{storage}} {{state}}": "sum by (storage, state) "
                    f"(increase(kvcm_storage_state_changes_total{{{_STORAGE}}}[1h]))"
                },
            ),
        ],
        "Space": [
            Panel(
                "Bytes held",
                "By state.",
                "bytes",
                {
                    "{{storage}} {{state}}": "max by (storage, state) "
                    f"(kvcm_storage_bytes{{{_STORAGE}}})"
                },
                "stacked",
            ),
            Panel(
                "Free",
                "On the storage itself, where it tells.",
                "bytes",
                {"{{storage}}": f"min by (storage) (kvcm_storage_free_bytes{{{_STORAGE}}})"},
            ),
            Panel(
                "Deletes that wait",
                "In all, and given up for now; storages together.",
                "short",
                {
                    state: "sum(max by (storage) "
                    f'(kvcm_trash_entries{{{_STORAGE}, state="{state}"}})) or vector(0)'
                    for state in ("pending", "failing", "dead_letter")
                },
            ),
        ],
    },
    [Variable("storage", "kvcm_storage_state", "storage", all_too=True)],
)

MANAGER = Dashboard(
    "manager",
    "kvcm: manager internals",
    "One manager: calls, its index store, its loops.",
    {
        "Calls": [
            Panel(
                "Calls",
                "Calls a second.",
                "reqps",
                {"{{api}}": f"sum by (api) ({rate('kvcm_call_seconds_count', _MANAGER)})"},
                "stacked",
            ),
            Panel(
                "Duration, half",
                "Half of the calls take no longer.",
                "s",
                {"{{api}}": quantile(0.5, "kvcm_call_seconds", "api", _MANAGER)},
            ),
            Panel(
                "Duration, 99 of 100",
                "99 of 100 calls take no longer.",
                "s",
                {"{{api}}": quantile(0.99, "kvcm_call_seconds", "api", _MANAGER)},
            ),
            Panel(
                "Answers that are not OK",
                "Calls a second by code.",
                "reqps",
                {"{{code}}": f"sum by (code) ({rate('kvcm_calls_total', _NOT_OK)})"},
                "stacked",
            ),
            Panel(
                "Write sessions",
                "Open, and past their deadline.",
                "short",
                {
                    "open": f"sum(kvcm_write_sessions{{{_MANAGER}}})",
                    "overdue": f"sum(kvcm_overdue_write_sessions{{{_MANAGER}}})",
                },
            ),
            Panel(
                "Leads",
                "1 for the manager that leads.",
                "short",
                {"{{instance}}": f"kvcm_leader{{{_MANAGER}}}"},
            ),
        ],
        "Index store": [
            Panel(
                "Duration, 99 of 100",
                "Of calls of the index store.",
                "s",
                {"{{operation}}": quantile(0.99, "kvcm_store_call_seconds", "operation", _MANAGER)},
            ),
            Panel(
                "Read cache: hit rate",
                "Extents that need not be read from the store.",
                "percentunit",
                {
                    "hit rate": "1 - "
                    + share("kvcm_read_cache_misses_total", "kvcm_read_cache_uses_total", _MANAGER)
                },
            ),
            Panel(
                "Read cache: bytes",
                "Held, and allowed.",
                "bytes",
                {
                    "{{instance}} held": f"kvcm_read_cache_bytes{{{_MANAGER}}}",
                    "{{instance}} limit": f"kvcm_read_cache_limit_bytes{{{_MANAGER}}}",
                },
            ),
        ],
        "Loops": [
            Panel(
                "Event loop: lag",
                "Its largest of a minute; everything waits for so long.",
                "s",
                {"{{instance}}": f"kvcm_event_loop_lag_max_seconds{{{_MANAGER}}}"},
            ),
            Panel(
                "Rounds: time taken",
                "Seconds a second that a loop works.",
                "percentunit",
                {"{{loop}}": f"sum by (loop) ({rate('kvcm_loop_round_seconds_sum', _MANAGER)})"},
                "stacked",
            ),
            Panel(
                "Since the last round",
                "A loop whose line only climbs stands still.",
                "s",
                {
                    "{{loop}}": "max by (loop) "
                    f"(time() - kvcm_loop_last_round_timestamp_seconds{{{_MANAGER}}})"
                },
            ),
        ],
    },
    [Variable("manager", "kvcm_build_info", "instance", all_too=True)],
)

ALL = (FLEET, GROUP, STORAGE, MANAGER)
