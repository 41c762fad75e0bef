"""Listening sockets, with errors that a person can read."""

from __future__ import annotations

import socket

from kvcm.core.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket.

    Raises:
        ConfigError: the address cannot be bound; the message names it.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {shown(host, port)}: {error.strerror}") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot listen on {shown(host, port)}: {reason}") from None
    return listener


def shown(host: str, port: int) -> str:
    """``host:port``, IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
