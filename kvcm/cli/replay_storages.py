"""``kvcm replay --storage``: storages and a group of their own for a replay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvcm.client import AdminClient
from kvcm.core.errors import EntityNotExist, InvalidArgument
from kvcm.core.types import (
    InstanceGroup,
    InstanceGroupQuota,
    StorageConfig,
    StorageType,
)

REPLAY_GROUP = "replay"
_FILE_TYPES = {
    "file": StorageType.NFS,
    "hf3fs": StorageType.HF3FS,
    "vcns_hf3fs": StorageType.VCNS_HF3FS,
}
_NAMED = re.compile(r"(?:([A-Za-z0-9._-]+)=)?([a-z0-9_]+)://(.*)", re.ASCII | re.DOTALL)
_NAME_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """A storage to replay on. ``name`` is derived unless ``is_named``."""

    name: str
    is_named: bool
    type: StorageType
    fields: tuple[tuple[str, Any], ...]


def parse_storage(text: str) -> Wanted:
    """``[NAME=]file:///path``, ``hf3fs:///mountpoint``, ``vcns_hf3fs:///mountpoint`` or
    ``mooncake://host:port``; further fields of the type as ``?key_count_per_file=8``.

    Raises:
        InvalidArgument: none of these.
    """
    match = _NAMED.fullmatch(text)
    scheme = match[2] if match else ""
    if match is None or scheme not in (*_FILE_TYPES, "mooncake"):
        raise InvalidArgument(
            f"storage {text!r} is none of file:///path, hf3fs:///mountpoint, "
            "vcns_hf3fs:///mountpoint, mooncake://host:port"
        )
    try:
        parts = urlsplit(f"//{match[3]}")
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise InvalidArgument(f"storage {text!r}: {error}") from error
    if "#" in match[3]:
        raise InvalidArgument(f"storage {text!r}: '#' cannot be part of a path or a field")
    more = dict(pairs)
    if len(more) < len(pairs):
        raise InvalidArgument(f"storage {text!r}: a field is given twice")
    fields: dict[str, Any] = {
        name: int(value) if value.isdecimal() else value for name, value in more.items()
    }
    if scheme == "mooncake":
        if not parts.netloc or parts.path.strip("/"):
            raise InvalidArgument(f"storage {text!r} is not mooncake://host:port of a master")
        where, fields["master_service_entry"] = parts.netloc, parts.netloc
        kind = StorageType.MOONCAKE
    else:
        if parts.netloc or not parts.path.strip("/"):
            raise InvalidArgument(f"storage {text!r}: an absolute path is needed: {scheme}:///path")
        where, kind = parts.path, _FILE_TYPES[scheme]
        fields["root_path" if kind is StorageType.NFS else "mountpoint"] = parts.path
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", where).strip("-")
    name = match[1] or f"{scheme}-{slug}"[:_NAME_BYTES_MAX]
    return Wanted(name, match[1] is not None, kind, tuple(fields.items()))


def prepare(client: AdminClient, wanted: Sequence[Wanted], group: str, capacity: int) -> list[str]:
    """Register the storages that are not there, and the group with them as candidates.

    What exists is never changed: a storage that is there under any name is used.

    Args:
        capacity: bytes, of a group that is made.

    Returns:
        What was done, line by line.

    Raises:
        KvcmError: a name is taken by another storage, a storage is disabled, or the group exists
            without one of them as candidate; the message names it.
    """
    listed = client.list_storage()
    found = {want: _existing(want, listed) for want in dict.fromkeys(wanted)}
    names = list(dict.fromkeys(config.global_unique_name for config in found.values()))
    # Looked at before anything is added: what cannot be replayed on leaves no traces.
    is_new, note = _look_at_group(client, group, names)
    notes: list[str] = []
    known = {config.global_unique_name for config in listed}
    for config in found.values():
        name = config.global_unique_name
        if name in known:
            notes.append(f"storage {name}: was there")
            continue
        client.add_storage(config)
        known.add(name)
        notes.append(f"storage {name}: added")
    if is_new:
        client.create_instance_group(
            InstanceGroup(
                name=group,
                storage_candidates=tuple(names),
                global_quota_group_name=group,
                quota=InstanceGroupQuota(capacity=capacity),
            )
        )
    notes.append(note)
    return notes


def _existing(want: Wanted, listed: Sequence[StorageConfig]) -> StorageConfig:
    """The storage that is there, or the one to add."""
    for config in listed:
        if want.is_named and config.global_unique_name != want.name:
            continue
        if config.type is want.type and _is_same(dict(want.fields), config.spec):
            if not config.enabled:
                raise InvalidArgument(f"storage {config.global_unique_name!r} is disabled")
            return config
    if any(config.global_unique_name == want.name for config in listed):
        raise InvalidArgument(
            f"storage {want.name!r} exists and is another one: "
            "give another name, as NAME=file:///path"
        )
    return StorageConfig(global_unique_name=want.name, type=want.type, spec=dict(want.fields))


def _is_same(wanted: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Whether a storage has all the wanted fields; the manager may add and tidy."""
    return all(_tidy(spec.get(name)) == _tidy(value) for name, value in wanted.items())


def _tidy(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("/"):
        return "".join(f"/{part}" for part in value.split("/") if part)
    return value


def _look_at_group(client: AdminClient, name: str, storages: Sequence[str]) -> tuple[bool, str]:
    """Whether the group is to be made, and what to tell of it."""
    try:
        found = client.get_instance_group(name)
    except EntityNotExist:
        return True, f"group {name}: made, with candidates {', '.join(storages)}"
    missing = [storage for storage in storages if storage not in found.storage_candidates]
    if missing:
        raise InvalidArgument(
            f"group {name!r} exists and has not {', '.join(missing)} as storage candidate but "
            f"{', '.join(found.storage_candidates) or 'none'}: take another --group, or change it "
            "with kvcm admin group update"
        )
    others = [storage for storage in found.storage_candidates if storage not in storages]
    also = f"; blocks may go to {', '.join(others)} too" if others else ""
    return False, f"group {name}: was there, and stays as it is{also}"
