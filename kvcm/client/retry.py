"""Which address a call goes to next, and whether it may go again: pure, for both clients.

The rules: a request that did not take effect (the connection was refused, the manager does not
lead or is not ready) goes to the next address, whatever it is. A request whose reply was lost, or
whose outcome the manager itself does not know, is repeated only when its method is safe to repeat.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kvcm.client.addresses import Address
from kvcm.client.call import Call
from kvcm.client.errors import application_error
from kvcm.core.clock import Clock
from kvcm.core.errors import ErrorCode, KvcmError, NotLeader, NotReady, OutcomeUnknown, Unavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often the addresses are gone through, and the jittered pauses between (seconds)."""

    rounds_max: int = 6
    backoff_s: float = 0.05
    backoff_s_max: float = 1.0

    def pause(self, round_number: int, clock: Clock) -> float:
        """Between half and all of a pause that doubles from round to round."""
        full = min(self.backoff_s_max, self.backoff_s * 2.0**round_number)
        return full * (0.5 + clock.random_bytes(1)[0] / 510)


class Peers:
    """The addresses, and which of them answered last as leader."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.addresses = tuple(addresses)
        self._preferred = 0

    def order(self) -> list[int]:
        """Indexes in the order to try: from the preferred one on, round to the start."""
        count = len(self.addresses)
        return [(self._preferred + step) % count for step in range(count)]

    def answered(self, index: int) -> None:
        """Begin with this one from now on."""
        self._preferred = index

    def failed(self, index: int) -> None:
        """Begin with another one, if this was the preferred."""
        if index == self._preferred:
            self._preferred = (index + 1) % len(self.addresses)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Send the call to an address; answer with the reply, or throw the transport's error."""

    index: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait."""

    seconds: float


Step: TypeAlias = Attempt | Pause


def attempts(
    call: Call[T], peers: Peers, timeout_s: float, policy: RetryPolicy, clock: Clock
) -> Generator[Step, Any, T]:
    """Drive one call: yields steps, is sent replies (or thrown errors), returns the result.

    Args:
        timeout_s: the client's time-out, for calls that bring none.
    """
    one = timeout_s if call.timeout is None else call.timeout
    budget = one * call.attempts_of_timeout
    deadline = clock.monotonic() + budget
    seen: dict[int, KvcmError] = {}
    for round_number in range(policy.rounds_max):
        for index in peers.order():
            left = deadline - clock.monotonic()
            if left <= 0:
                raise _summary(call, peers, seen, budget)
            try:
                reply = yield Attempt(index, min(left, one))
                _check(reply)
            except (NotLeader, NotReady) as error:
                peers.failed(index)
                seen[index] = error
                if isinstance(error, OutcomeUnknown) and not call.method.safe:
                    _note(error, call, peers, index)
                    raise
            except KvcmError as error:
                _note(error, call, peers, index)
                raise
            else:
                peers.answered(index)
                return call.parse(reply)
        pause = policy.pause(round_number, clock)
        if round_number + 1 == policy.rounds_max or clock.monotonic() + pause >= deadline:
            break
        yield Pause(pause)
    raise _summary(call, peers, seen, budget)


def _check(reply: Any) -> None:
    """Raise the error an answer carries."""
    if reply.HasField("header") and reply.header.HasField("status"):
        status = reply.header.status
        if status.code != ErrorCode.OK:
            raise application_error(status.code, status.message, status.reason)
    else:
        raise KvcmError("the reply has no header.status: not a KV cache manager?")


def _note(error: KvcmError, call: Call[Any], peers: Peers, index: int) -> None:
    error.add_note(f"{call.method.name} at {peers.addresses[index]}")


def _summary(
    call: Call[Any], peers: Peers, seen: dict[int, KvcmError], budget_s: float
) -> KvcmError:
    """One error for all addresses, of the class that promises least."""
    if len(seen) == 1 and len(peers.addresses) == 1:
        ((index, error),) = seen.items()
        _note(error, call, peers, index)
        return error
    kinds = {type(error) for error in seen.values()}
    kind: type[KvcmError]
    if kinds == {NotLeader}:
        kind, what = NotLeader, "no address leads"
    elif OutcomeUnknown in kinds:
        kind, what = OutcomeUnknown, "no reply"
    elif NotReady in kinds:
        kind, what = NotReady, "no manager is ready"
    else:
        kind, what = Unavailable, "no manager could be reached"
    each = "; ".join(f"{peers.addresses[i]}: {error}" for i, error in seen.items())
    return kind(f"{call.method.name}: {what} within {budget_s:g} s: {each}")
