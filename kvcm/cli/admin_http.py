"""Calls of a manager's admin HTTP port beside the protocol's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer

from kvcm.cli.admin_common import TIMEOUT_S
from kvcm.core.errors import InvalidArgument, KvcmError, OutcomeUnknown, Unavailable

HTTP_TARGET = "http://127.0.0.1:6492"
HttpTargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", "--http", help="host:port or http://… of the admin HTTP service."
    ),
]


def call(method: str, target: str, path: str, **params: str) -> dict[str, Any]:
    """The JSON object that a path answers with.

    Raises:
        KvcmError: no connection, no 200, or no object.
    """
    reply = request(method, target, path, params=params)
    where = f"{reply.url}"
    if reply.status_code != 200:
        raise KvcmError(f"{where}: HTTP status {reply.status_code}")
    value = json_of(reply)
    if not isinstance(value, dict):
        raise KvcmError(f"{where}: no JSON object: not a KV cache manager's admin port?")
    return value


def request(
    method: str,
    target: str,
    path: str,
    *,
    params: Mapping[str, str] | None = None,
    body: Any = None,
) -> httpx.Response:
    """Whatever answer comes.

    Raises:
        KvcmError: none came.
    """
    address = (target if "://" in target else f"http://{target}").rstrip("/")
    try:
        return httpx.request(
            method, address + path, params=params, json=body, timeout=TIMEOUT_S, trust_env=False
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgument(f"{address}: {error}") from error
    except httpx.ConnectError as error:
        raise Unavailable(f"no manager at {address}: {error}") from error
    except httpx.RemoteProtocolError as error:
        raise InvalidArgument(f"{address}: no HTTP: {error}; the port of gRPC?") from error
    except httpx.HTTPError as error:
        raise OutcomeUnknown(f"{address}{path}: {error or type(error).__name__}") from error


def json_of(reply: httpx.Response) -> Any:
    """The answer's JSON; None when it is none."""
    try:
        return reply.json()
    except ValueError:
        return None


def time_of(seconds: float) -> str:
    """Epoch seconds for people; nothing for 0."""
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
