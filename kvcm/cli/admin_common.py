"""Options, connection and value forms that the admin commands share."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

# Before grpc is imported: its C core writes notes to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import typer
from pydantic import BaseModel, ValidationError

from kvcm.cli.output import fail, one_line_errors
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import (
    STORAGE_TYPE_NAMES,
    AdmissionPolicy,
    CachePreferStrategy,
    ReclaimPolicy,
    StorageType,
    TtlSince,
)
from kvcm.registry.validate import INT64_MAX

DEFAULT_TARGET = "127.0.0.1:6491"
TIMEOUT_S = 10.0

TargetOption = Annotated[
    str,
    typer.Option("--target", "-t", help="host:port, grpc://… or http://… of the admin service."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, for scripts.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", help="JSON file with the settings; - is stdin.")
]

M = TypeVar("M", bound=BaseModel)


@contextmanager
def admin(target: str) -> Iterator[AdminClient]:
    """A connected client; errors become one line and exit code 1."""
    with one_line_errors(target), AdminClient(target, timeout=TIMEOUT_S) as client:
        yield client


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone; without a terminal ``--yes`` is needed."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this asks first; without a terminal give --yes")
    if not typer.confirm(question, default=False, err=True):
        fail("nothing was done")


def done(message: str, as_json: bool) -> None:
    """Say what was done; scripts get an empty object."""
    print("{}" if as_json else message)


def read_text(path: Path) -> str:
    """A file's text, or standard input for ``-``.

    Raises:
        InvalidArgument: it cannot be read.
    """
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object.

    Raises:
        InvalidArgument: it cannot be read or is no object.
    """
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path} is not a JSON object")
    return value


def check_known(kind: type[BaseModel], value: Mapping[str, Any], what: str) -> None:
    """Refuse fields that ``kind`` does not have: a misspelt one must not be dropped unseen.

    Raises:
        InvalidArgument: names the field.
    """
    if unknown := sorted(set(value) - set(kind.model_fields)):
        raise InvalidArgument(f"{what}: unknown field {unknown[0]!r}")


def entity(kind: type[M], value: Mapping[str, Any], what: str) -> M:
    """An entity from JSON, enums as the wire's names or as numbers.

    Raises:
        InvalidArgument: names the field.
    """
    try:
        return kind.model_validate(_enums(value, _number))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"{what}: {field}: {first['msg']}") from error


def plain(value: BaseModel) -> dict[str, Any]:
    """An entity as JSON with the wire's enum names; `entity` reads it back."""
    dumped: dict[str, Any] = _enums(value.model_dump(mode="json", exclude_none=True), _name)
    return dumped


_WIRE_STORAGE = {
    StorageType.UNSPECIFIED: "ST_UNSPECIFIED",
    StorageType.HF3FS: "ST_3FS",
    StorageType.MOONCAKE: "ST_MOONCAKE",
    StorageType.TAIRMEMPOOL: "ST_TAIRMEMPOOL",
    StorageType.NFS: "ST_NFS",
    StorageType.VCNS_HF3FS: "ST_VCNS_3FS",
    StorageType.PLUGIN: "ST_PLUGIN",
}
_NAMES: dict[str, dict[int, str]] = {
    "storage_type": {int(kind): name for kind, name in _WIRE_STORAGE.items()},
    "reclaim_policy": {int(kind): f"POLICY_{kind.name}" for kind in ReclaimPolicy},
    "data_storage_strategy": {int(kind): f"CPS_{kind.name}" for kind in CachePreferStrategy},
    "ttl_since": {int(kind): f"TTL_SINCE_{kind.name}" for kind in TtlSince},
    "admission": {int(kind): f"ADMISSION_{kind.name}" for kind in AdmissionPolicy},
}


def _enums(value: Any, convert: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: convert(key, item) if key in _NAMES else _enums(item, convert)
            for key, item in value.items()
        }
    return [_enums(item, convert) for item in value] if isinstance(value, list | tuple) else value


def _name(field: str, value: Any) -> Any:
    return _NAMES[field].get(value, value) if isinstance(value, int) else value


def _number(field: str, value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    for number, name in _NAMES[field].items():
        if name == value:
            return number
    if field == "storage_type":
        # Inside meta_storage_backend_config the same name holds free text.
        return next((k for k, name in STORAGE_TYPE_NAMES.items() if name == value), value)
    known = ", ".join(_NAMES[field].values())
    raise InvalidArgument(f"{field}: {value!r} is none of {known}")


def storage_type(text: str) -> StorageType:
    """A storage type by its JSON name (``file``) or the wire's (``ST_NFS``).

    Raises:
        InvalidArgument: lists the known ones.
    """
    for kind, name in STORAGE_TYPE_NAMES.items():
        if text in (name, _WIRE_STORAGE[kind]):
            return kind
    known = ", ".join(STORAGE_TYPE_NAMES.values())
    raise InvalidArgument(f"storage type {text!r} is none of {known}")


def storage_type_name(kind: StorageType | int) -> str:
    """The JSON name of a type."""
    try:
        return STORAGE_TYPE_NAMES.get(StorageType(kind), "none")
    except ValueError:
        return f"type {int(kind)}"


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]I?)?B?", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """A number of bytes: ``4096``, ``10GB`` (10^9), ``1.5GiB`` (2^30).

    Raises:
        InvalidArgument: not such a number, not a whole number of bytes, or above int64.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgument(f"{text!r} is no size such as 4096, 10GB or 1.5GiB")
    unit = (match[2] or "").upper()
    factor: int = _UNITS.get(unit) or _BINARY[unit]
    whole, _, fraction = match[1].partition(".")
    scaled: int = int(whole + fraction) * factor
    scale: int = 10 ** len(fraction)
    count, rest = divmod(scaled, scale)
    if rest:
        raise InvalidArgument(f"{text!r} is no whole number of bytes")
    if count > INT64_MAX:
        raise InvalidArgument(f"{text!r} is above the largest size, {INT64_MAX} bytes")
    return count


def pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """``key=value`` arguments.

    Raises:
        InvalidArgument: no ``=``, or a key twice.
    """
    found: dict[str, str] = {}
    for text in texts or []:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise InvalidArgument(f"{option} {text!r} is not NAME=VALUE")
        if key in found:
            raise InvalidArgument(f"{option} names {key!r} twice")
        found[key] = value
    return found
