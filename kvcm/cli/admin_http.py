"""Calls of a manager's admin HTTP port beside the protocol's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer

from kvcm.cli.admin_common import TIMEOUT_S
from kvcm.core.errors import InvalidArgument, KvcmError, OutcomeUnknown, Unavailable

HTTP_TARGET = "http://127.0.0.1:6492"
HttpOption = Annotated[str, typer.Option("--http", help="Admin HTTP address.")]


def call(method: str, http: str, path: str, **params: str) -> dict[str, Any]:
    """The JSON object that a path answers with.

    Raises:
        KvcmError: no connection, no 200, or no object.
    """
    url = http.rstrip("/") + path
    try:
        reply = httpx.request(method, url, params=params, timeout=TIMEOUT_S, trust_env=False)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgument(f"{url}: {error}") from error
    except httpx.ConnectError as error:
        raise Unavailable(f"{url}: {error}") from error
    except httpx.HTTPError as error:
        raise OutcomeUnknown(f"{url}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise KvcmError(f"{url}: HTTP status {reply.status_code}")
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise KvcmError(f"{url}: no JSON object: not a KV cache manager's admin port?")
    return value


def time_of(seconds: float) -> str:
    """Epoch seconds for people; nothing for 0."""
    if not seconds:
        return ""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
