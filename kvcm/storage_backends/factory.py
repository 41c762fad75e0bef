"""From a storage's configuration to its backend."""

from __future__ import annotations

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import Unsupported
from kvcm.core.types import STORAGE_TYPE_NAMES, StorageConfig, StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.mooncake import MooncakeBackend
from kvcm.storage_backends.posix import PosixBackend, root_of

_POSIX = (StorageType.NFS, StorageType.HF3FS)


def build_backend(config: StorageConfig, clock: Clock) -> DataStorageBackend:
    """The backend of a storage, not opened yet. Touches nothing.

    Raises:
        Unsupported: a type that is not built in; the message names it.
        InvalidArgument: the config is wrong; the message names the field.
    """
    if config.type is StorageType.MOONCAKE:
        return MooncakeBackend(config, clock)
    if config.type not in _POSIX:
        name = STORAGE_TYPE_NAMES.get(config.type, "unspecified")
        raise Unsupported(
            f"storage {config.global_unique_name!r}: type {name} (ST_{config.type.name}) "
            "is not built in"
        )
    return PosixBackend(config, clock)


def validate_config(config: StorageConfig) -> None:
    """What AddStorage checks before it opens a storage.

    Raises:
        Unsupported, InvalidArgument: as ``build_backend``.
    """
    build_backend(config, SystemClock())


def with_former_root(config: StorageConfig, stored: StorageConfig) -> StorageConfig:
    """``config`` that still knows the root of ``stored``, so that what lies there is deleted."""
    if stored.type is not config.type or stored.type not in _POSIX:
        return config
    former = dict.fromkeys([*stored.spec.get("former_roots", ()), root_of(stored)])
    spec = {**config.spec, "former_roots": list(former)}
    return config.model_copy(update={"spec": spec})
