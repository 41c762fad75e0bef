"""HTTP paths that show what is being freed: ``/v1/trash`` and ``/v1/removals``."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from kvcm.reclaimer.lanes import DeadLetter, StorageTrash
from kvcm.reclaimer.space import SpaceControl
from kvcm.reclaimer.trim import Removal


def add(app: FastAPI, space: SpaceControl | None) -> None:
    """Add the paths to an application that has something to show."""
    if space is None:
        return

    @app.get("/v1/trash", summary="Files that wait to be deleted, by storage")
    async def get_trash() -> JSONResponse:
        return JSONResponse({"storages": [_trash(entry) for entry in space.trash()]})

    @app.post("/v1/trash/retry", summary="Try now to delete what could not be deleted")
    async def retry_trash(storage: str | None = None) -> JSONResponse:
        return JSONResponse({"retried": space.retry(storage)})

    @app.get("/v1/removals", summary="Trims and removed instances whose space is not all free yet")
    async def get_removals() -> JSONResponse:
        return JSONResponse({"removals": [_removal(entry) for entry in space.removals()]})


def awaiting_second_delete(space: SpaceControl | None) -> dict[str, dict[str, int]]:
    """By storage, what is deleted and will be once more, for writers that come late. Its bytes
    count as free."""
    if space is None:
        return {}
    return {
        entry.storage: {"objects": entry.again_objects, "bytes": entry.again_size}
        for entry in space.trash()
        if entry.again_objects
    }


def _trash(entry: StorageTrash) -> dict[str, Any]:
    return {
        "storage": entry.storage,
        "entries": entry.entries,
        "objects": entry.objects,
        "bytes": entry.size,
        "second_delete_objects": entry.again_objects,
        "second_delete_bytes": entry.again_size,
        "failing": entry.failing,
        "dead_letters": entry.dead_letters,
        "dead_letter_bytes": entry.dead_letter_size,
        "tries": entry.tries,
        "error": entry.error,
        "since": entry.since,
        "calls": entry.calls,
        "late_calls": entry.late_calls,
        "letters": [_letter(letter) for letter in entry.letters],
    }


def _letter(letter: DeadLetter) -> dict[str, Any]:
    return {
        "instance": letter.instance,
        "extent": letter.extent,
        "objects": letter.objects,
        "bytes": letter.size,
        "tries": letter.tries,
        "error": letter.error,
        "since": letter.since,
    }


def _removal(removal: Removal) -> dict[str, Any]:
    return {
        "what": removal.what,
        "instance": removal.instance,
        "uid": removal.uid,
        "since": removal.since,
        "is_counted": removal.is_counted,
        "extents": removal.extents,
        "blocks": removal.blocks,
        "bytes": removal.size,
        "trash": removal.trash,
        "trash_bytes": removal.trash_size,
    }
