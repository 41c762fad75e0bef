"""What every client is built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvcm.client.addresses import META_PORTS, parse_addresses
from kvcm.client.retry import Peers, RetryPolicy
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import InvalidArgument
from kvcm.core.limits import RECEIVE_BYTES_DEFAULT

TIMEOUT_S = 2.0
"""Seconds for a whole call, unless the client or the call says otherwise."""


class ClientBase:
    """Addresses, time-outs and retries of a client; see its subclasses."""

    default_ports: ClassVar[dict[str, int]] = META_PORTS

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
        retry: RetryPolicy | None = None,
        receive_bytes_max: int = RECEIVE_BYTES_DEFAULT,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is connected before the first call.

        Args:
            addresses: managers in the order to try: ``host:port`` or ``grpc://host:port`` for
                gRPC, ``http://host:port`` for HTTP, IPv6 hosts in brackets; one, several with
                commas, or a sequence.
            timeout: seconds for each call with all its attempts.
            receive_bytes_max: the largest reply taken.

        Raises:
            InvalidArgument: a wrong address or a time-out that is not positive.
        """
        if not timeout > 0:
            raise InvalidArgument(f"timeout must be positive: {timeout}")
        self.timeout = timeout
        self._peers = Peers(parse_addresses(addresses, self.default_ports))
        self._retry = retry or RetryPolicy()
        self._receive_bytes_max = receive_bytes_max
        self._clock = clock or SystemClock()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses, in the order given."""
        return tuple(map(str, self._peers.addresses))
