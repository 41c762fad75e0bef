"""From answers and transport failures to the errors of `kvcm.core.errors`."""

from __future__ import annotations

from kvcm.client.transfer import MISSING, TRUNCATED
from kvcm.core.errors import (
    CapacityReached,
    DuplicateEntity,
    EntityNotExist,
    ErrorCode,
    InstanceNotExist,
    InternalError,
    InvalidArgument,
    KvcmError,
    NoStorage,
    NotLeader,
    NotReady,
    OutcomeUnknown,
    SessionNotExist,
    StorageError,
    Unsupported,
    VersionConflict,
)
from kvcm.core.types import ReportKind

_BY_CODE: dict[int, type[KvcmError]] = {
    ErrorCode.UNSUPPORTED: Unsupported,
    ErrorCode.INTERNAL_ERROR: InternalError,
    ErrorCode.SERVICE_NOT_READY: NotReady,
    ErrorCode.INVALID_ARGUMENT: InvalidArgument,
    ErrorCode.DUPLICATE_ENTITY: DuplicateEntity,
    ErrorCode.REACH_MAX_ENTITY_CAPACITY: CapacityReached,
    ErrorCode.INSTANCE_NOT_EXIST: InstanceNotExist,
    ErrorCode.SERVER_NOT_LEADER: NotLeader,
    ErrorCode.IO_ERROR: StorageError,
}
_BY_REASON: dict[str, type[KvcmError]] = {
    kind.default_reason: kind
    for kind in (EntityNotExist, NoStorage, OutcomeUnknown, SessionNotExist, VersionConflict)
}


def application_error(code: int, message: str, reason: str) -> KvcmError:
    """The error of an answer whose code is not OK (wire.md §1).

    ``reason`` (Status field 100) tells apart what shares a code; managers that do not send it get
    the code's general error. A code this client does not know gives KvcmError.
    """
    general = _BY_CODE.get(code, KvcmError)
    kind = _BY_REASON.get(reason, general)
    if general is KvcmError:
        message = f"error code {code}: {message}"
    return kind(message, reason=reason)


def is_reportable(error: KvcmError) -> bool:
    """Whether an SDK's error says something about the block or its storage. If not, the reader
    itself lacks an SDK or a configuration, and others can read what it cannot."""
    return not isinstance(error, InvalidArgument | Unsupported)


def report_kind(error: KvcmError) -> ReportKind:
    """How a block that an SDK answered with this error is to be reported (ReportCacheError)."""
    if error.reason in (MISSING, TRUNCATED):
        return ReportKind.MISSING
    return ReportKind.UNREACHABLE
