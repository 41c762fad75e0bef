"""Calls over HTTP, blocking and asyncio (wire.md §1)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvcm.client import jsonwire
from kvcm.client.addresses import Address
from kvcm.client.call import Call
from kvcm.core.clock import Clock
from kvcm.core.errors import (
    InternalError,
    KvcmError,
    MalformedRequest,
    NotReady,
    OutcomeUnknown,
    ReplyTooLarge,
    Unavailable,
    Unsupported,
)

_CONNECT_S = 0.5
"""Time one attempt to connect may take, so that the next address gets its turn."""
_HEADERS = {"content-type": "application/json"}
# Shorter than what servers keep an idle connection, so that none is used that they just closed.
_LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64, keepalive_expiry=4.0)
_ERROR_TEXT_CHARS = 500


def status_error(status: int, body: bytes) -> KvcmError:
    """The error for an HTTP status other than 200."""
    text = f"HTTP {status}: {body.decode('utf-8', 'replace')[:_ERROR_TEXT_CHARS]}"
    if status in (400, 422):
        return MalformedRequest(text)
    if status in (404, 405, 501):
        return Unsupported(f"the manager does not know this call: {text}")
    if status == 413:
        return ReplyTooLarge(text)
    if status in (429, 503):
        return NotReady(text)
    if status in (408, 502, 504):
        return OutcomeUnknown(text)
    return InternalError(text) if status >= 500 else KvcmError(text)


@contextmanager
def _translated(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unavailable(f"cannot connect: {error or type(error).__name__}") from None
    except httpx.PoolTimeout:
        raise Unavailable(f"no free connection within {timeout_s:.3g} s") from None
    except (httpx.TimeoutException, TimeoutError):
        raise OutcomeUnknown(f"no reply within {timeout_s:.3g} s") from None
    except httpx.TransportError as error:
        text = str(error) or type(error).__name__
        raise OutcomeUnknown(f"the connection broke: {text}") from None


def _no_tls() -> ssl.SSLContext:
    """Trusts nobody. Only http:// is spoken, and loading the system's authorities takes long."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _timeouts(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))


class HttpTransport:
    """Blocking; safe to share between threads."""

    def __init__(self, address: Address, receive_bytes_max: int, clock: Clock) -> None:
        self._url = str(address)
        self._receive_bytes_max = receive_bytes_max
        self._clock = clock
        # A manager is reached directly; a proxy from the environment is meant for the web.
        self._http = httpx.Client(
            trust_env=False, verify=_no_tls(), limits=_LIMITS, headers=_HEADERS
        )

    def send(self, call: Call[Any], timeout_s: float) -> Any:
        """One attempt; raises OutcomeUnknown, Unavailable or what `status_error` gives."""
        deadline = self._clock.monotonic() + timeout_s
        body = bytearray()
        with _translated(timeout_s):
            with self._http.stream(
                "POST",
                self._url + call.method.http_path,
                content=jsonwire.encode(call.request),
                timeout=_timeouts(timeout_s),
            ) as reply:
                # httpx limits each read, not their sum.
                for chunk in reply.iter_bytes():
                    body += chunk
                    _check_size(body, self._receive_bytes_max)
                    if self._clock.monotonic() > deadline:
                        raise TimeoutError
        return _message(reply.status_code, bytes(body), call)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class AsyncHttpTransport:
    """For one event loop."""

    def __init__(self, address: Address, receive_bytes_max: int) -> None:
        self._url = str(address)
        self._receive_bytes_max = receive_bytes_max
        self._http = httpx.AsyncClient(
            trust_env=False, verify=_no_tls(), limits=_LIMITS, headers=_HEADERS
        )

    async def send(self, call: Call[Any], timeout_s: float) -> Any:
        """One attempt; raises OutcomeUnknown, Unavailable or what `status_error` gives."""
        body = bytearray()
        with _translated(timeout_s):
            async with asyncio.timeout(timeout_s):
                async with self._http.stream(
                    "POST",
                    self._url + call.method.http_path,
                    content=jsonwire.encode(call.request),
                    timeout=_timeouts(timeout_s),
                ) as reply:
                    async for chunk in reply.aiter_bytes():
                        body += chunk
                        _check_size(body, self._receive_bytes_max)
        return _message(reply.status_code, bytes(body), call)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def _check_size(body: bytearray, receive_bytes_max: int) -> None:
    if len(body) > receive_bytes_max:
        raise ReplyTooLarge(f"the reply is larger than {receive_bytes_max} bytes")


def _message(status: int, body: bytes, call: Call[Any]) -> Any:
    if status != httpx.codes.OK:
        raise status_error(status, body)
    return jsonwire.decode(body, call.method.reply)
