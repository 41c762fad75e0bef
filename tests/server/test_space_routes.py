"""``/v1/trash``, ``/v1/removals`` and their metrics."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from kvcm.reclaimer.lanes import DeadLetter, StorageTrash
from kvcm.reclaimer.trim import Removal
from kvcm.server import space_routes
from kvcm.server.space_metrics import SpaceMetrics

LETTER = DeadLetter("i", "ab", 2, 64, 10, "is a directory", 5.0)
TRASH = StorageTrash("s1", 9, 12, 700, 3, 96, 2, 1, 64, 10, "is a directory", 5.0, 2, 1, (LETTER,))
REMOVALS = [Removal("trim", "i", "u", 7.0, True, 1, 2, 3), Removal("instance", "j", "v", 8.0, True)]


class Space:
    """What a manager has to show."""

    def __init__(self) -> None:
        self.retried: list[str | None] = []

    def trash(self) -> list[StorageTrash]:
        return [TRASH]

    def removals(self) -> list[Removal]:
        return REMOVALS

    def retry(self, storage: str | None) -> int:
        self.retried.append(storage)
        return 3


@pytest.fixture
def space() -> Space:
    return Space()


@pytest.fixture
def http(space: Any) -> httpx.AsyncClient:
    app = FastAPI()
    space_routes.add(app, space)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x")


async def test_trash_is_shown_by_storage_with_its_dead_letters(http: httpx.AsyncClient) -> None:
    (shown,) = (await http.get("/v1/trash")).json()["storages"]
    letters = shown.pop("letters")
    assert shown == {
        "storage": "s1",
        "entries": 9,
        "objects": 12,
        "bytes": 700,
        "second_delete_objects": 3,
        "second_delete_bytes": 96,
        "failing": 2,
        "dead_letters": 1,
        "dead_letter_bytes": 64,
        "tries": 10,
        "error": "is a directory",
        "since": 5.0,
        "calls": 2,
        "late_calls": 1,
    }
    assert letters == [
        {
            "instance": "i",
            "extent": "ab",
            "objects": 2,
            "bytes": 64,
            "tries": 10,
            "error": "is a directory",
            "since": 5.0,
        }
    ]


async def test_retry_is_for_all_storages_or_one(http: httpx.AsyncClient, space: Space) -> None:
    assert (await http.post("/v1/trash/retry")).json() == {"retried": 3}
    await http.post("/v1/trash/retry", params={"storage": "s1"})
    assert space.retried == [None, "s1"]
    assert (await http.get("/v1/trash/retry")).status_code == 405


async def test_removals_say_what_is_left(http: httpx.AsyncClient) -> None:
    first, second = (await http.get("/v1/removals")).json()["removals"]
    assert first["what"] == "trim"
    assert (first["extents"], first["blocks"], first["bytes"]) == (1, 2, 3)
    assert (second["what"], second["instance"], second["uid"]) == ("instance", "j", "v")


def test_the_second_delete_is_part_of_the_usage(space: Any) -> None:
    assert space_routes.awaiting_second_delete(space) == {"s1": {"objects": 3, "bytes": 96}}
    assert space_routes.awaiting_second_delete(None) == {}


def test_metrics_tell_pending_failing_and_dead_letters_apart(space: Any) -> None:
    registry = CollectorRegistry()
    registry.register(SpaceMetrics(space))
    text = generate_latest(registry).decode()
    assert 'kvcm_trash_entries{state="pending",storage="s1"} 9.0' in text
    assert 'kvcm_trash_entries{state="failing",storage="s1"} 2.0' in text
    assert 'kvcm_trash_entries{state="dead_letter",storage="s1"} 1.0' in text
    assert 'kvcm_trash_late_calls{storage="s1"} 1.0' in text
    assert 'kvcm_removals{what="trim"} 1.0' in text
