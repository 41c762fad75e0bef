from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.errors import ConfigError
from kvcm.core.types import CachePreferStrategy, StorageType
from kvcm.registry.bootstrap import load_bootstrap
from kvcm.registry.defaults import default_group, default_storage

WIRE = {
    "storages": [
        {
            "global_unique_name": "nfs_01",
            "nfs": {"root_path": "/tmp/nfs/", "key_count_per_file": 8},
            "check_storage_available_when_open": False,
        }
    ],
    "instance_groups": [
        {
            "name": "default",
            "storage_candidates": ["nfs_01"],
            "global_quota_group_name": "default_quota_group",
            "max_instance_count": "100",
            "quota": {
                "capacity": "30000000000",
                "quota_config": [
                    {"storage_type": "ST_NFS", "capacity": "10000000000"},
                    {"storage_type": "ST_3FS", "capacity": 10000000000},
                    {"storage_type": 3, "capacity": 10000000000},
                ],
            },
            "cache_config": {
                "reclaim_strategy": {
                    "storage_unique_name": "",
                    "reclaim_policy": "POLICY_LRU",
                    "trigger_strategy": {"used_size": "0", "used_percentage": 0.8},
                    "delay_before_delete_ms": 1000,
                },
                "data_storage_strategy": "CPS_PREFER_3FS",
                "meta_indexer_config": {"max_key_count": "1000000", "mutex_shard_num": "16"},
            },
            "version": "1",
        }
    ],
}

TOML = """
[[storages]]
global_unique_name = "fs"
threefs = { cluster_name = "c", mountpoint = "/3fs", root_dir = "kv" }

[[instance_groups]]
name = "team"
storage_candidates = ["fs"]
quota = { capacity = 30_000_000_000 }

[instance_groups.cache_config]
data_storage_strategy = "CPS_ALWAYS_VCNS_3FS"
meta_indexer_config.meta_storage_backend_config.storage_type = "redis"
"""


def written(tmp_path: Path, content: Any, name: str = "boot.json") -> Path:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_wire_json_of_the_defaults_loads_as_the_defaults(tmp_path: Path) -> None:
    storages, groups = load_bootstrap(written(tmp_path, WIRE))
    assert storages == [default_storage()]
    assert groups == [default_group()]


def test_toml_loads_and_absent_spec_fields_get_their_default(tmp_path: Path) -> None:
    (fs,), (team,) = load_bootstrap(written(tmp_path, TOML, "boot.toml"))
    assert fs.type is StorageType.HF3FS
    assert fs.spec == {
        "cluster_name": "c",
        "mountpoint": "/3fs",
        "root_dir": "kv",
        "key_count_per_file": 0,
        "touch_file_when_create": False,
    }
    assert team.cache_config is not None
    assert team.cache_config.data_storage_strategy is CachePreferStrategy.ALWAYS_VCNS_3FS
    assert team.cache_config.meta_indexer_config is not None
    backend = team.cache_config.meta_indexer_config.meta_storage_backend_config
    assert backend is not None
    assert backend.storage_type == "redis"


def nfs(**spec: Any) -> dict[str, Any]:
    return {"storages": [{"global_unique_name": "a", "nfs": spec}]}


def team(**fields: Any) -> dict[str, Any]:
    return {"instance_groups": [{"name": "team"} | fields]}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"storage": []}, "storage: unknown key"),
        ({"storages": {}}, "storages must be a list"),
        ({"storages": [5]}, "storages[0] must be an object"),
        ({"storages": [{"nfs": {}}]}, "storages[0].global_unique_name"),
        ({"storages": [{"global_unique_name": "a"}]}, "storages[0] must have exactly one of"),
        (
            {"storages": [{"global_unique_name": "a", "nfs": {}, "threefs": {}}]},
            "storages[0] must have exactly one of",
        ),
        ({"storages": [{"global_unique_name": "a", "s3": {}}]}, "storages[0].s3: unknown key"),
        (nfs(root="/x"), "storages[0].nfs.root: unknown key"),
        (nfs(root_path=5), "storages[0].nfs.root_path"),
        (nfs(key_count_per_file="many"), "storages[0].nfs.key_count_per_file"),
        (nfs(key_count_per_file=-1), "storages[0].storage_spec.key_count_per_file"),
        ({"storages": nfs()["storages"] * 2}, "storages[1]: the name 'a' is used twice"),
        ({"instance_groups": team()["instance_groups"] * 2}, "instance_groups[1]: the name"),
        (team(nam="x"), "instance_groups[0].nam: unknown key"),
        (team(quota={"capacity": 1, "x": 2}), "instance_groups[0].quota.x: unknown key"),
        (
            team(quota={"quota_config": [{"storage_type": "ST_NFS", "capacity": 1, "y": 2}]}),
            "instance_groups[0].quota.quota_config[0].y: unknown key",
        ),
        (
            team(quota={"quota_config": [{"storage_type": "ST_S3", "capacity": 1}]}),
            "instance_groups[0].quota.quota_config[0].storage_type: 'ST_S3' is none of",
        ),
        (team(quota={"capacity": "much"}), "instance_groups[0].quota.capacity"),
        (team(max_instance_count=-1), "instance_groups[0].max_instance_count"),
        ("{", "Expecting"),
        ("[]", "not a JSON object"),
        ('{"storages":[],"storages":[]}', "'storages' twice"),
    ],
)
def test_a_bad_file_is_refused_naming_file_and_field(
    tmp_path: Path, content: Any, named: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_bootstrap(file)
    assert str(file) in str(caught.value)
    assert named in str(caught.value)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_bootstrap(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"\.json or \.toml"):
        load_bootstrap(written(tmp_path, "", "boot.yaml"))
    with pytest.raises(ConfigError, match=r"boot\.toml"):
        load_bootstrap(written(tmp_path, "a = = b", "boot.toml"))
