"""One exception tree and the one table from it to wire codes.

::

    KvcmError
    ├── InvalidArgument            a field of the request is wrong
    │   └── MalformedRequest       the body does not parse (HTTP 400)
    ├── Unsupported                asked for something this build or backend cannot do
    ├── NotReady                   not recovered, draining, or the index store does not answer
    │   ├── Unavailable            a store or storage did not answer; nothing happened
    │   └── OutcomeUnknown         a time-out: it may or may not have happened
    ├── NotLeader                  another manager leads
    ├── InstanceNotExist
    ├── EntityNotExist             a group, storage, account that is not there
    ├── DuplicateEntity
    ├── CapacityReached            quota, capacity or key-count limit; carries ``reason``
    │   └── NoStorage              no storage could take the write
    ├── SessionNotExist            a write session that is unknown or over
    ├── VersionConflict            optimistic version of a registry entity
    ├── StorageError               a data storage failed (IO_ERROR)
    ├── ReplyTooLarge              the answer exceeds the reply limit (a transport error)
    ├── StaleFence                 a shard was claimed by a higher fence
    ├── CorruptRecord              stored bytes that do not parse
    ├── ConfigError                settings, flags, bootstrap files
    └── InternalError              a fault of ours
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ErrorCode(IntEnum):
    """Application error codes (wire.md §1)."""

    UNSPECIFIED = 0
    OK = 1
    UNSUPPORTED = 2
    INTERNAL_ERROR = 3
    SERVICE_NOT_READY = 4
    INVALID_ARGUMENT = 5
    DUPLICATE_ENTITY = 6
    REACH_MAX_ENTITY_CAPACITY = 7
    INSTANCE_NOT_EXIST = 8
    SERVER_NOT_LEADER = 9
    IO_ERROR = 20
    UNKNOWN_ERROR = 100
    ERROR_MAX = 65535


class KvcmError(Exception):
    """Base of everything kvcm raises on purpose; ``str(error)`` names what is wrong.

    ``reason`` travels in Status field 100; ``default_reason`` tells classes apart that share a
    wire code.
    """

    default_reason: ClassVar[str] = ""

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or self.default_reason


class InvalidArgument(KvcmError):
    """A field of the request is wrong; the message names it."""


class MalformedRequest(InvalidArgument):
    """The body does not parse or has a wrong type (HTTP 400)."""


class Unsupported(KvcmError):
    """This build, backend or store cannot do what was asked."""


class NotReady(KvcmError):
    """The service cannot answer now; try again."""


class Unavailable(NotReady):
    """A store or storage could not be reached; nothing was changed."""


class OutcomeUnknown(NotReady):
    """A time-out after the request was sent: it may have taken effect."""

    default_reason = "OUTCOME_UNKNOWN"


class NotLeader(KvcmError):
    """Another manager leads; the message names its address when known."""


class InstanceNotExist(KvcmError):
    """No instance of that id is registered."""


class EntityNotExist(KvcmError):
    """A group, storage or account that is not there."""

    default_reason = "ENTITY_NOT_EXIST"


class DuplicateEntity(KvcmError):
    """It exists already with different data."""


class CapacityReached(KvcmError):
    """A quota, capacity or count limit refused the request."""


class NoStorage(CapacityReached):
    """No candidate storage could take the write."""

    default_reason = "NO_STORAGE"


class SessionNotExist(KvcmError):
    """The write session is unknown, expired, or another instance's."""

    default_reason = "SESSION_NOT_EXIST"


class VersionConflict(KvcmError):
    """The entity changed since it was read."""

    default_reason = "VERSION_CONFLICT"


class StorageError(KvcmError):
    """A data storage failed."""


class ReplyTooLarge(KvcmError):
    """The answer exceeds the configured reply limit."""


class StaleFence(KvcmError):
    """A shard is claimed with another fence than ours, or not at all.

    ``epoch`` is that of the fence that holds the shard, 0 when nobody claimed it: a higher one than
    ours means that we were deposed, our own means claim again.
    """

    def __init__(self, message: str = "", *, reason: str = "", epoch: int = 0) -> None:
        super().__init__(message, reason=reason)
        self.epoch = epoch


class CorruptRecord(KvcmError):
    """Stored bytes that do not parse."""


class ConfigError(KvcmError):
    """Settings, flags, environment or bootstrap file are wrong."""


class InternalError(KvcmError):
    """A fault of ours."""


WIRE_CODES: dict[type[KvcmError], ErrorCode] = {
    KvcmError: ErrorCode.UNKNOWN_ERROR,
    InvalidArgument: ErrorCode.INVALID_ARGUMENT,
    MalformedRequest: ErrorCode.INVALID_ARGUMENT,
    Unsupported: ErrorCode.UNSUPPORTED,
    NotReady: ErrorCode.SERVICE_NOT_READY,
    Unavailable: ErrorCode.SERVICE_NOT_READY,
    OutcomeUnknown: ErrorCode.SERVICE_NOT_READY,
    NotLeader: ErrorCode.SERVER_NOT_LEADER,
    InstanceNotExist: ErrorCode.INSTANCE_NOT_EXIST,
    EntityNotExist: ErrorCode.INVALID_ARGUMENT,
    DuplicateEntity: ErrorCode.DUPLICATE_ENTITY,
    CapacityReached: ErrorCode.REACH_MAX_ENTITY_CAPACITY,
    NoStorage: ErrorCode.REACH_MAX_ENTITY_CAPACITY,
    SessionNotExist: ErrorCode.INVALID_ARGUMENT,
    VersionConflict: ErrorCode.INVALID_ARGUMENT,
    StorageError: ErrorCode.IO_ERROR,
    ReplyTooLarge: ErrorCode.INVALID_ARGUMENT,
    StaleFence: ErrorCode.SERVICE_NOT_READY,
    CorruptRecord: ErrorCode.INTERNAL_ERROR,
    ConfigError: ErrorCode.INVALID_ARGUMENT,
    InternalError: ErrorCode.INTERNAL_ERROR,
}
"""Every class of the tree has a row; a test holds the table against the tree."""


def wire_code(error: BaseException) -> ErrorCode:
    """The application code of an error; INTERNAL_ERROR for what is not ours."""
    # `get` of any key is meant: what is not ours is not in the table.
    return WIRE_CODES.get(type(error), ErrorCode.INTERNAL_ERROR)  # type: ignore[arg-type]
