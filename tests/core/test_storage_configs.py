"""``storage_configs`` as existing clients parse it (wire.md §6)."""

from __future__ import annotations

import json

import pytest

from kvcm.core.errors import Unsupported
from kvcm.core.storage_configs import storage_configs_json
from kvcm.core.types import StorageConfig, StorageType


def test_the_example_of_the_contract_is_printed_byte_for_byte() -> None:
    config = StorageConfig(
        global_unique_name="nfs_01",
        type=StorageType.NFS,
        spec={"key_count_per_file": 8, "former_roots": ["/x"], "root_path": "/tmp/nfs/"},
    )
    assert storage_configs_json([(config, True)]) == (
        '[{"type":"file","is_available":true,"global_unique_name":"nfs_01",'
        '"storage_spec":{"root_path":"/tmp/nfs/","key_count_per_file":8}}]'
    )


def test_elements_are_sorted_by_name_and_none_is_an_empty_array() -> None:
    configs = [
        (StorageConfig(global_unique_name=name, type=StorageType.NFS), name == "b")
        for name in ("c", "a", "b")
    ]
    found = json.loads(storage_configs_json(configs))
    assert [(e["global_unique_name"], e["is_available"]) for e in found] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    assert storage_configs_json([]) == "[]"


@pytest.mark.parametrize(
    ("kind", "name", "spec"),
    [
        (StorageType.NFS, "file", {"root_path": "", "key_count_per_file": 0}),
        (
            StorageType.HF3FS,
            "hf3fs",
            {"cluster_name": "", "mountpoint": "", "root_dir": "", "key_count_per_file": 0},
        ),
        (
            StorageType.VCNS_HF3FS,
            "vcns_hf3fs",
            {
                "cluster_name": "",
                "mountpoint": "",
                "root_dir": "",
                "key_count_per_file": 0,
                "remote_host": "",
                "remote_port": 0,
                "meta_storage_uri": "",
            },
        ),
        (
            StorageType.MOONCAKE,
            "mooncake",
            {
                "local_hostname": "",
                "metadata_connstring": "",
                "protocol": "",
                "rdma_device": "",
                "master_server_entry": "",
            },
        ),
        (
            StorageType.TAIRMEMPOOL,
            "pace",
            {"enable_vipserver": False, "domain": "", "timeout": 0},
        ),
    ],
)
def test_each_type_has_its_spec_keys_in_order(
    kind: StorageType, name: str, spec: dict[str, object]
) -> None:
    (element,) = json.loads(
        storage_configs_json([(StorageConfig(global_unique_name="s", type=kind), True)])
    )
    assert list(element) == ["type", "is_available", "global_unique_name", "storage_spec"]
    assert element["type"] == name
    assert list(element["storage_spec"].items()) == list(spec.items())


def test_mooncakes_master_has_another_name_here_than_on_the_wire() -> None:
    config = StorageConfig(
        global_unique_name="m", type=StorageType.MOONCAKE, spec={"master_service_entry": "h:1"}
    )
    assert '"master_server_entry":"h:1"' in storage_configs_json([(config, False)])


def test_a_type_without_a_name_is_unsupported() -> None:
    config = StorageConfig(global_unique_name="l", type=StorageType.UNSPECIFIED)
    with pytest.raises(Unsupported, match="'l'"):
        storage_configs_json([(config, True)])
