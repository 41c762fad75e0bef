"""From a storage's configuration to its backend."""

from __future__ import annotations

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import Unsupported
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends import plugins
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.mooncake import MooncakeBackend
from kvcm.storage_backends.posix import PosixBackend, root_of

_POSIX = (StorageType.NFS, StorageType.HF3FS, StorageType.VCNS_HF3FS)


def build_backend(config: StorageConfig, clock: Clock) -> DataStorageBackend:
    """The backend of a storage, not opened yet. Touches nothing.

    A plug-in serves types that are not built in, and no others: one named ``file`` is never asked.

    Raises:
        Unsupported: a type that is not built in and has no plug-in that can be loaded; the message
            names it.
        InvalidArgument: the config is wrong; the message names the field.
        StorageError: its plug-in failed otherwise.
    """
    if config.type in _POSIX:
        return PosixBackend(config, clock)
    if config.type is StorageType.MOONCAKE:
        return MooncakeBackend(config, clock)
    if config.type is StorageType.UNSPECIFIED:
        raise Unsupported(f"storage {config.global_unique_name!r} has no type")
    return plugins.build(config.type_name, config, clock)


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
