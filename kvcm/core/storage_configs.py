"""``storage_configs`` of RegisterInstanceResponse: what clients open SDKs with (wire.md §6)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvcm.core.errors import Unsupported
from kvcm.core.types import PLUGIN_NAME, StorageConfig, StorageType

_THREEFS: dict[str, tuple[str, object]] = {
    "cluster_name": ("cluster_name", ""),
    "mountpoint": ("mountpoint", ""),
    "root_dir": ("root_dir", ""),
    "key_count_per_file": ("key_count_per_file", 0),
}

SPEC_KEYS: dict[StorageType, dict[str, tuple[str, object]]] = {
    StorageType.NFS: {
        "root_path": ("root_path", ""),
        "key_count_per_file": ("key_count_per_file", 0),
    },
    StorageType.HF3FS: _THREEFS,
    StorageType.VCNS_HF3FS: {
        **_THREEFS,
        "remote_host": ("remote_host", ""),
        "remote_port": ("remote_port", 0),
        "meta_storage_uri": ("meta_storage_uri", ""),
    },
    StorageType.MOONCAKE: {
        "local_hostname": ("local_hostname", ""),
        "metadata_connstring": ("metadata_connstring", ""),
        "protocol": ("protocol", ""),
        "rdma_device": ("rdma_device", ""),
        "master_server_entry": ("master_service_entry", ""),
    },
    StorageType.TAIRMEMPOOL: {
        "enable_vipserver": ("enable_vipserver", False),
        "domain": ("domain", ""),
        "timeout": ("timeout", 0),
    },
}
"""Per type: JSON key of ``storage_spec`` → (field of the wire's spec message, its default)."""


def storage_config_element(config: StorageConfig, available: bool) -> dict[str, Any]:
    """One element of ``storage_configs``, keys in the order that clients have always been given.

    Raises:
        Unsupported: a type that has no form here.
    """
    keys = SPEC_KEYS.get(config.type)
    if config.type is StorageType.PLUGIN:
        keys = {name: (name, "") for name in sorted(config.spec) if name != PLUGIN_NAME}
    if keys is None:
        raise Unsupported(f"storage {config.global_unique_name!r} has no type that clients know")
    return {
        "type": config.type_name,
        "is_available": available,
        "global_unique_name": config.global_unique_name,
        "storage_spec": {
            key: config.spec.get(field, default) for key, (field, default) in keys.items()
        },
    }


def storage_configs_json(configs: Sequence[tuple[StorageConfig, bool]]) -> str:
    """A compact JSON array of (config, available), sorted by name; ``[]`` for none."""
    ordered = sorted(configs, key=lambda pair: pair[0].global_unique_name)
    elements = [storage_config_element(config, available) for config, available in ordered]
    return json.dumps(elements, ensure_ascii=False, separators=(",", ":"))
