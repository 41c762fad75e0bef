"""HTTP paths beside the protocol's methods: health, usage, metrics, the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import kvcm
from kvcm.cache.api import Usage, UsageReport
from kvcm.observability.ceiling import Ceilings
from kvcm.observability.trace_events import TraceEvents
from kvcm.reclaimer.repair import Repair
from kvcm.reclaimer.space import SpaceControl
from kvcm.server import (
    ceiling_routes,
    event_routes,
    openapi,
    prometheus,
    repair_routes,
    space_routes,
)


@dataclass(frozen=True, slots=True)
class Sources:
    """What the routes show."""

    ready: Callable[[], bool]
    error_body: Callable[[str], bytes]
    usage: Callable[[], UsageReport] | None = None
    metrics: Callable[[], Awaitable[bytes]] | None = None
    repair: Repair | None = None
    space: SpaceControl | None = None
    ceilings: Ceilings | None = None
    events: TraceEvents | None = None


def build_app(title: str, service: Any, sources: Sources) -> FastAPI:
    """The application of one service's port; ``/v1/usage`` and ``/metrics`` when it has them."""
    app = FastAPI(title=title, version=kvcm.__version__, docs_url=None, redoc_url=None)

    @app.get("/healthz", summary="The process answers")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="The manager serves")
    def readyz() -> JSONResponse:
        ready = sources.ready()
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    if (usage := sources.usage) is not None:

        @app.get("/v1/usage", summary="Space by instance, group, storage and storage type")
        async def get_usage() -> JSONResponse:
            late = {"awaiting_second_delete": space_routes.awaiting_second_delete(sources.space)}
            return JSONResponse(usage_document(usage()) | late)

    if (metrics := sources.metrics) is not None:

        @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
        async def get_metrics() -> Response:
            return Response(await metrics(), media_type=prometheus.CONTENT_TYPE)

    if sources.repair is not None:
        repair_routes.add(app, sources.repair)
    space_routes.add(app, sources.space)
    ceiling_routes.add(app, sources.ceilings)
    event_routes.add(app, sources.events)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return Response(
            sources.error_body(message),
            status_code=error.status_code,
            headers=error.headers,
            media_type="application/json",
        )

    rest = app.openapi
    # FastAPI's documented way to extend the schema.
    app.openapi = lambda: openapi.with_methods(rest(), service)  # type: ignore[method-assign]
    return app


def usage_document(report: UsageReport) -> dict[str, Any]:
    """The JSON of ``/v1/usage``; bytes and blocks."""
    return {
        "instances": {
            name: {"group": report.owners.get(name, ""), **usage}
            for name, usage in _usages(report.instances).items()
        },
        "groups": _usages(report.groups),
        "storages": _usages(report.storages),
        "group_types": [
            {"group": group, "storage_type": kind, **_usage(usage)}
            for (group, kind), usage in sorted(report.group_types.items())
        ],
        "refused_writes": _refusals(report.refused),
        "cut_writes": _refusals(report.cut),
        "error_reports": [
            {"kind": kind, "outcome": outcome, "blocks": count}
            for (kind, outcome), count in sorted(report.error_reports.items())
        ],
        "admission": {name: asdict(found) for name, found in sorted(report.admission.items())},
        "sessions": report.sessions,
        "extents": report.extents,
        "quarantined": report.quarantined,
    }


def _refusals(counts: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    return [
        {"group": group, "reason": reason, "count": count}
        for (group, reason), count in sorted(counts.items())
    ]


def _usages(usages: dict[str, Usage]) -> dict[str, dict[str, Any]]:
    return {name: _usage(usage) for name, usage in sorted(usages.items())}


def _usage(usage: Usage) -> dict[str, Any]:
    return {**asdict(usage), "counted_bytes": usage.counted_bytes}
