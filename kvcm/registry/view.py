"""Immutable snapshots of the registry. A request takes one reference and asks nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcm.core.types import Instance, InstanceGroup, StorageConfig


@dataclass(frozen=True, slots=True)
class RegistryView:
    """All entities at one moment. ``revision`` grows with every change."""

    revision: int
    cluster_uid: str
    """[a-z0-9]{8}, made once with the registry; the first folder of every storage path."""
    secret: bytes = field(repr=False)
    """32 random bytes, made once; keys the check inside write session ids."""
    storages: Mapping[str, StorageConfig]
    groups: Mapping[str, InstanceGroup]
    instances: Mapping[str, Instance]
    """By instance id, without closing ones."""
    closing: tuple[Instance, ...]
    """Removed instances whose space is still being freed; several may share an instance id."""
    next_instance_number: int = 0
    """Instance uids with this number or a higher one were not given out yet."""
