"""The HTTP path ``/v1/ceiling``: hit rates, the best possible ones, and what stands between."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from kvcm.observability.ceiling import Ceilings
from kvcm.observability.ceiling_report import CeilingReport, WindowReport


def add(app: FastAPI, ceilings: Ceilings | None) -> None:
    """Add the path to an application that has something to show."""
    if ceilings is None:
        return

    @app.get("/v1/ceiling", summary="Hit rates beside the best possible ones, and why they differ")
    async def get_ceiling() -> JSONResponse:
        return JSONResponse(document(await ceilings.refresh()))


def document(report: CeilingReport) -> dict[str, Any]:
    """The JSON of ``/v1/ceiling``; blocks, bytes and epoch seconds. A scope with an empty
    ``instance`` is the whole group."""
    return {
        "at": report.at_s,
        "since": report.since_s,
        "sample_weight": report.sample_weight,
        "uncounted_events": report.uncounted,
        "instances_without_windows": report.instances_without,
        "scopes": [
            {
                "group": scope.group,
                "instance": scope.instance,
                "windows": [_window(window) for window in scope.windows],
            }
            for scope in report.scopes
        ],
    }


def _window(window: WindowReport) -> dict[str, Any]:
    return {
        **asdict(window),
        "hit_rate": window.hit_rate,
        "gap": window.gap,
        "is_exact": window.is_exact,
        "distinct": round(window.distinct),
    }
