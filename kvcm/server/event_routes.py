"""The HTTP path ``/v1/events``: what happens, as server-sent events."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvcm.core.errors import InvalidArgument, NotReady
from kvcm.core.limits import EVENT_FILTER_VALUES_MAX
from kvcm.observability.event_stream import Subscriber
from kvcm.observability.trace_events import TraceEvents
from kvcm.server.http_edge import ABORT

HEARTBEAT_S = 10.0
SEND_S_MAX = 30.0
"""A subscriber that takes nothing for so long is let go."""
_LAST_SEND_S = 1.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies that hold answers back until they are whole.
    (b"x-accel-buffering", b"no"),
]


def add(app: FastAPI, events: TraceEvents | None) -> None:
    """Add the path to an application that has events."""
    if events is None:
        return

    @app.get(
        "/v1/events",
        summary="What happens from now on: lookups, writes, removals, as server-sent events",
        status_code=200,
        response_class=_EventStreamResponse,
        responses={
            200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
            400: {"description": "An unknown type"},
            503: {"description": "Too many subscribers, or the manager stops"},
        },
    )
    async def get_events(
        instances: Annotated[list[str], _filter("instance", "Events of these instances only")],
        types: Annotated[list[str], _filter("type", "Events of these types only")],
    ) -> Response:
        try:
            return _EventStreamResponse(events, events.subscribe(instances, types))
        except InvalidArgument as error:
            raise HTTPException(400, str(error)) from None
        except NotReady as error:
            raise HTTPException(503, str(error)) from None


def _filter(name: str, what: str) -> Any:
    return Query(
        alias=name, description=what, default_factory=list, max_length=EVENT_FILTER_VALUES_MAX
    )


class _EventStreamResponse(Response):
    """Sends until the client leaves, takes nothing more, or the manager stops."""

    media_type = "text/event-stream"

    def __init__(self, events: TraceEvents, subscriber: Subscriber) -> None:
        super().__init__()
        self._events = events
        self._subscriber = subscriber

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.ensure_future(self._pump(send)),
            asyncio.ensure_future(_left(receive)),
            asyncio.ensure_future(self._subscriber.closed.wait()),
        ]
        pump, left, _ = tasks
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._subscriber.closed.is_set() and not left.done():
                # What was sent already may go out; the end of the stream is the last of it.
                await asyncio.wait((pump, left), timeout=_LAST_SEND_S)
            if pump.done() and not isinstance(pump.exception(), TimeoutError):
                pump.result()
            elif not left.done():
                # It takes nothing: whatever is still to be sent would keep the connection open.
                scope["extensions"][ABORT][ABORT]()
                await asyncio.wait([left], timeout=_LAST_SEND_S)
        finally:
            for task in tasks:
                task.cancel()
            self._events.leave(self._subscriber)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        piece: bytes | None = b"event: Subscribed\ndata: {}\n\n"
        while piece is not None:
            async with asyncio.timeout(SEND_S_MAX):
                await send(_body(piece, more=True))
            piece = await self._subscriber.next(HEARTBEAT_S)
        await send(_body(b"", more=False))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
