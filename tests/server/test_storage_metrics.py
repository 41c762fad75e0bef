"""What /metrics says of the storages' health."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, generate_latest

from kvcm.core.health import HealthState
from kvcm.core.types import StorageConfig, StorageType
from kvcm.observability.histogram import Timings
from kvcm.server.backends import StorageHealth
from kvcm.server.storage_metrics import StorageMetrics


def scraped(*statuses: StorageHealth) -> list[str]:
    registry = CollectorRegistry()
    timings = Timings()
    for seconds in (0.3, 0.001):
        timings["a", "good"].observe(seconds)
    registry.register(StorageMetrics(lambda: statuses, timings))
    return generate_latest(registry).decode().splitlines()


def status(state: HealthState, *, enabled: bool = True, free: int | None = None) -> StorageHealth:
    config = StorageConfig(global_unique_name="a", type=StorageType.NFS, enabled=enabled)
    changes = Counter({HealthState.AVAILABLE: 2, HealthState.SUSPECT: 1})
    return StorageHealth(config, state, "", free, "", True, changes)


def test_one_state_is_shown_beside_what_led_to_it() -> None:
    lines = scraped(status(HealthState.SUSPECT, free=4096))
    states = [line for line in lines if line.startswith("kvcm_storage_state{")]
    assert [s for s in states if s.endswith(" 1.0")] == [
        'kvcm_storage_state{state="suspect",storage="a",type="file"} 1.0'
    ]
    assert len(states) == 4
    assert 'kvcm_storage_state_changes_total{state="available",storage="a"} 2.0' in lines
    assert 'kvcm_storage_probe_seconds_count{result="good",storage="a"} 2.0' in lines
    assert 'kvcm_storage_probe_seconds_bucket{le="0.25",result="good",storage="a"} 1.0' in lines
    assert 'kvcm_storage_free_bytes{storage="a"} 4096.0' in lines
    assert 'kvcm_storage_writable{storage="a"} 1.0' in lines
    assert 'kvcm_storage_breaker_open{storage="a"} 1.0' in lines


def test_a_disabled_storage_shows_as_such_and_unknown_room_not_at_all() -> None:
    lines = scraped(status(HealthState.AVAILABLE, enabled=False))
    assert 'kvcm_storage_state{state="disabled",storage="a",type="file"} 1.0' in lines
    assert 'kvcm_storage_state{state="available",storage="a",type="file"} 0.0' in lines
    assert not [line for line in lines if line.startswith("kvcm_storage_free_bytes{")]
