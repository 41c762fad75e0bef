"""First contents of an empty registry: the startup defaults, or a bootstrap file.

A bootstrap file is JSON, or TOML when it ends in ``.toml``: ``storages`` and ``instance_groups``,
each a list of the admin protocol's messages (StorageConfig, InstanceGroup) as JSON has them.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor

from kvcm._pb import admin_pb2
from kvcm.core.errors import ConfigError, KvcmError
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.registry import defaults
from kvcm.server import jsonwire, pb_entities
from kvcm.server.settings import nearest
from kvcm.storage_backends.factory import validate_config

Contents = tuple[list[StorageConfig], list[InstanceGroup]]

_SECTIONS = ("storages", "instance_groups")


def startup_defaults() -> Contents:
    """Storage ``nfs_01`` and group ``default`` (wire.md §7)."""
    return [defaults.default_storage()], [defaults.default_group()]


def read(path: Path) -> Contents:
    """The contents of a bootstrap file.

    Raises:
        ConfigError: it cannot be read or parsed, or describes something that is refused; the
            message names the file and the field.
    """
    document = _document(path)
    _check_names(document, list(_SECTIONS), str(path))
    try:
        storages = [
            pb_entities.storage_of(message, f"storages[{i}]")
            for i, message in enumerate(_messages(document, "storages", admin_pb2.StorageConfig))
        ]
        for storage in storages:
            validate_config(storage)
        groups = [
            pb_entities.group_of(message, f"instance_groups[{i}]")
            for i, message in enumerate(
                _messages(document, "instance_groups", admin_pb2.InstanceGroup)
            )
        ]
    except KvcmError as error:
        raise ConfigError(f"{path}: {error}") from None
    # A first version is implied.
    return storages, [g if g.version else g.model_copy(update={"version": 1}) for g in groups]


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read bootstrap file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"bootstrap file {path} is not UTF-8: byte {error.start}") from None
    try:
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"bootstrap file {path} is not {kind}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"bootstrap file {path} is not an object")
    return document


def _messages(document: dict[str, Any], section: str, kind: Any) -> list[Any]:
    items = document.get(section, [])
    if not isinstance(items, list):
        raise ConfigError(f"{section} is not a list")
    messages = []
    for i, item in enumerate(items):
        where = f"{section}[{i}]"
        _check_known(item, kind.DESCRIPTOR, where)
        try:
            messages.append(jsonwire.parse(json.dumps(item).encode(), kind))
        except KvcmError as error:
            raise ConfigError(f"{where}.{error}") from None
    return messages


def _check_known(value: Any, message: Descriptor, where: str) -> None:
    """The protocol ignores unknown fields; configuration must not."""
    if not isinstance(value, dict):
        return
    fields = message.fields_by_name
    by_camel = {field.camelcase_name: field for field in message.fields}
    _check_names(value, list(fields), where, also=by_camel)
    for name, item in value.items():
        field = fields.get(name) or by_camel[name]
        if field.message_type is not None:
            for child in item if isinstance(item, list) else [item]:
                _check_known(child, field.message_type, f"{where}.{name}")


def _check_names(value: dict[str, Any], known: list[str], where: str, also: Any = ()) -> None:
    for name in value:
        if name not in known and name not in also:
            raise ConfigError(f"{where}: unknown key {name!r}{nearest(name, known)}")
