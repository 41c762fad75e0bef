"""Adapters of third parties: entry points of the group ``kvcm.storage_backends``.

An entry point's name is the storage type that it serves, its object a `BackendFactory`. See
docs/plugins.md and docs/decisions/0019-storage-plugins.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias, cast

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument, KvcmError, StorageError, Unsupported
from kvcm.core.types import STORAGE_TYPE_NAMES, StorageConfig, StorageType
from kvcm.storage_backends.base import DataStorageBackend

_log = logging.getLogger(__name__)

GROUP = "kvcm.storage_backends"

BackendFactory: TypeAlias = Callable[[StorageConfig, Clock], DataStorageBackend]
"""Makes the backend of a storage, not opened yet, and touches nothing. Raises InvalidArgument for
a config that is wrong; the message names the option."""


def build(kind: str, config: StorageConfig, clock: Clock) -> DataStorageBackend:
    """The backend that the plug-in for storages of type ``kind`` makes.

    Raises:
        Unsupported: none is installed, several are, or it cannot be loaded.
        InvalidArgument: it refuses the config, or the config should have been of a type of ours.
        StorageError: it fails in any other way.
    """
    storage = f"storage {config.global_unique_name!r}"
    if config.type is StorageType.PLUGIN and kind in STORAGE_TYPE_NAMES.values():
        raise InvalidArgument(f"{storage}: {kind!r} is a type of its own, with fields of its own")
    try:
        factory = _load(kind)
    except Unsupported as error:
        raise Unsupported(f"{storage}: {error}") from error
    label = f"{storage}: plug-in {kind!r}"
    try:
        backend = factory(config, clock)
    except KvcmError:
        raise
    except Exception as error:  # code of others: its faults must be told from ours
        raise StorageError(f"{label} failed: {_text(error)}") from error
    return cast(DataStorageBackend, _Guarded(backend, label))


class _Guarded:
    """A plug-in's backend whose faults are StorageErrors, which all callers expect: a fault of one
    storage must not end what others have a part in, such as a report of blocks on several."""

    def __init__(self, backend: DataStorageBackend, label: str) -> None:
        self._backend = backend
        self._label = label

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        return self._guarded(name, value) if inspect.iscoroutinefunction(value) else value

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return await call(*args, **kwargs)
            except KvcmError:
                raise
            except Exception as error:  # code of others may raise anything
                _log.exception("%s: fault in %s", self._label, name)
                raise StorageError(f"{self._label} failed in {name}: {_text(error)}") from error

        return guarded


# Both are asked for again and again while a storage cannot be built; reading what is installed
# takes milliseconds. What is installed later counts from the next start.
@cache
def _installed() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def _outcome(kind: str) -> BackendFactory | str:
    """The factory, or why there is none."""
    points = _installed().get(kind, [])
    if not points:
        return f"type {kind!r} is not built in, and no plug-in {GROUP}:{kind} is installed"
    if len({point.value for point in points}) > 1:
        packages = ", ".join(sorted(map(_package, points)))
        return f"type {kind!r} is served by several plug-ins: {packages}; leave one installed"
    point = points[0]
    label = f"plug-in {kind!r} ({point.value}, {_package(point)})"
    try:
        factory = point.load()
    except (Exception, SystemExit) as error:  # code of others may do anything when imported
        return f"{label} cannot be loaded: {_text(error)}"
    if not callable(factory):
        return f"{label} is no factory but {type(factory).__name__}"
    loaded: BackendFactory = factory
    return loaded


def _load(kind: str) -> BackendFactory:
    outcome = _outcome(kind)
    if isinstance(outcome, str):
        raise Unsupported(outcome)
    return outcome


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
