"""``/v1/fsck`` on the admin port: start a repair run, watch it, stop it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from kvcm.core.errors import DuplicateEntity, KvcmError
from kvcm.reclaimer.repair import Repair
from kvcm.reclaimer.repair_report import RepairOptions


class FsckRequest(BaseModel):
    """What to do. Without ``fix`` it only reports. ``instance`` is an id or a uid."""

    model_config = ConfigDict(extra="forbid")

    fix: bool = False
    force: bool = False
    instance: str = ""
    storage: str = ""


def add(app: FastAPI, repair: Repair) -> None:
    """Add the routes."""

    @app.post("/v1/fsck", summary="Start a repair run; 409 while one is under way", status_code=202)
    async def start_fsck(request: FsckRequest) -> JSONResponse:
        try:
            repair.start(RepairOptions(**request.model_dump()))
        except DuplicateEntity as error:
            raise HTTPException(409, str(error)) from error
        except KvcmError as error:
            raise HTTPException(404, str(error)) from error
        return JSONResponse(_document(repair), status_code=202)

    @app.get("/v1/fsck", summary="Progress and report of the latest repair run")
    async def get_fsck() -> JSONResponse:
        return JSONResponse(_document(repair))

    @app.delete("/v1/fsck", summary="Stop the repair run under way")
    async def stop_fsck() -> JSONResponse:
        await repair.stop()
        return JSONResponse(_document(repair))


def _document(repair: Repair) -> dict[str, Any]:
    last, scrub = repair.last, repair.last_scrub
    return {
        "running": repair.is_running,
        "report": last.document() if last is not None else None,
        "scrub": scrub.document() if scrub is not None else None,
    }
