"""Addresses of managers: ``host:port``, ``grpc://host:port``, ``http://host:port``, IPv6 too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvcm.core.errors import InvalidArgument

META_PORTS = {"grpc": 6381, "http": 6382}
ADMIN_PORTS = {"grpc": 6491, "http": 6492}
"""Default port by scheme (wire.md §1)."""


@dataclass(frozen=True, slots=True)
class Address:
    """One endpoint; ``str()`` gives the form in which people write it."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """``host:port``, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_address(text: str, default_ports: dict[str, int]) -> Address:
    """Parse one address; without a scheme it is gRPC, without a port the default one.

    Raises:
        InvalidArgument: what cannot be an address, saying why.
    """
    url = text if "://" in text else f"grpc://{text}"
    try:
        parts = urlsplit(url)
        if parts.netloc.count(":") > 1 and "[" not in parts.netloc:
            raise ValueError("an IPv6 host stands in brackets, [::1]:6381")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgument(f"address {text!r}: {error}") from None
    if parts.scheme not in default_ports:
        raise InvalidArgument(f"address {text!r}: the scheme must be grpc or http")
    if not host:
        raise InvalidArgument(f"address {text!r} has no host")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidArgument(f"address {text!r}: only scheme, host and port are allowed")
    if port == 0:
        raise InvalidArgument(f"address {text!r}: port 0 cannot be called")
    return Address(parts.scheme, host, port or default_ports[parts.scheme])


def parse_addresses(
    addresses: str | Sequence[str], default_ports: dict[str, int]
) -> tuple[Address, ...]:
    """Parse one address, a comma-separated list, or a sequence; the order is kept.

    Raises:
        InvalidArgument: no address, or one that is wrong.
    """
    texts = addresses.split(",") if isinstance(addresses, str) else addresses
    found = [parse_address(text.strip(), default_ports) for text in texts if text.strip()]
    if not found:
        raise InvalidArgument("no address of a manager given")
    return tuple(dict.fromkeys(found))
