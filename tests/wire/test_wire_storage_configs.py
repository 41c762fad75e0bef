"""storage_configs and location URIs (wire.md §6)."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from wire_harness import (
    KEYS_PER_FILE,
    Instance,
    Server,
    Wire,
    code_of,
    group_document,
    registration,
    succeeded,
    uris,
)

from kvcm.testing.eventually import eventually_sync


def register_with(wire: Wire, name: str, candidates: list[str]) -> str:
    """Register instance ``name`` in a new group of that name; its storage_configs."""
    group = group_document(name, storage_candidates=candidates)
    wire.admin_ok("CreateInstanceGroup", instance_group=group)
    answer = succeeded(wire.call("RegisterInstance", registration(name, instance_group=name)))
    configs: str = answer["storage_configs"]
    return configs


def nfs(root: Path) -> str:
    return (
        '{"type":"file","is_available":true,"global_unique_name":"nfs_01","storage_spec":'
        f'{{"root_path":"{root}/","key_count_per_file":8}}}}'
    )


def test_storage_configs_are_a_json_array_as_a_string(wire, server, fresh_id):
    assert register_with(wire, fresh_id(), ["nfs_01"]) == f"[{nfs(server.root)}]"


def test_elements_are_the_registered_candidates_sorted_by_name(wire, server: Server, fresh_id):
    name = fresh_id()
    first, last = f"a-{name}", f"z-{name}"
    wire.admin_ok(
        "AddStorage",
        storage={
            "global_unique_name": last,
            "threefs": {
                "cluster_name": "c",
                "mountpoint": f"{server.folder}/3fs",
                "root_dir": "r",
                "key_count_per_file": 5,
                "touch_file_when_create": True,
            },
        },
    )
    wire.admin_ok(
        "AddStorage",
        storage={"global_unique_name": first, "nfs": {"root_path": f"{server.folder}/{first}"}},
    )
    configs = register_with(wire, name, [last, "nobody", "nfs_01", first])
    assert configs == (
        '[{"type":"file","is_available":true,'
        f'"global_unique_name":"{first}","storage_spec":'
        f'{{"root_path":"{server.folder}/{first}","key_count_per_file":0}}}},'
        f"{nfs(server.root)},"
        '{"type":"hf3fs","is_available":true,'
        f'"global_unique_name":"{last}","storage_spec":{{"cluster_name":"c",'
        f'"mountpoint":"{server.folder}/3fs","root_dir":"r","key_count_per_file":5}}}}]'
    )


def test_a_disabled_storage_is_shown_as_not_available(wire, server, fresh_id):
    name = fresh_id()
    wire.admin_ok(
        "AddStorage",
        storage={"global_unique_name": name, "nfs": {"root_path": f"{server.folder}/{name}"}},
    )
    wire.admin_ok("DisableStorage", storage_unique_name=name)
    (element,) = json.loads(register_with(wire, name, [name]))
    assert element["is_available"] is False
    wire.admin_ok("EnableStorage", storage_unique_name=name)
    again = wire.ok("RegisterInstance", registration(name, instance_group=name))
    assert json.loads(again["storage_configs"])[0]["is_available"] is True


def test_without_a_known_candidate_the_array_is_empty(wire, fresh_id):
    assert register_with(wire, fresh_id(), ["nobody"]) == "[]"


def test_storage_configs_are_an_empty_string_on_failure(wire, fresh_id):
    answer = wire.call("RegisterInstance", registration(fresh_id(), instance_group="nobody"))
    assert code_of(answer) != "OK"
    assert answer["storage_configs"] == ""


def parsed(uri: str) -> tuple[str, str, str, dict[str, str]]:
    """Scheme, host, path as it stands, parameters; the way that existing clients read it."""
    parts = urlsplit(uri)
    return parts.scheme, parts.netloc, parts.path, dict(parse_qsl(parts.query, strict_parsing=True))


def test_the_path_is_the_file_below_the_root_and_the_host_the_storage(instance: Instance, server):
    for location in instance.write(range(20)):
        for uri in uris(location).values():
            scheme, host, path, params = parsed(uri)
            assert (scheme, host) == ("file", "nfs_01")
            assert path.startswith(f"{server.root}/")
            assert "%" not in uri
            assert "//" not in path
            assert "size" in params
            assert set(params) <= {"size", "blkid"}
            query = uri.partition("?")[2]
            assert query.split("&") == sorted(query.split("&"))


def test_slots_of_a_file_never_overlap_and_are_never_more_than_configured(instance: Instance):
    slots: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for location in instance.write(range(20)):
        for name, uri in uris(location).items():
            _, _, path, params = parsed(uri)
            size = int(params["size"])
            assert size == {"tp0": 1000, "tp1": 500}[name]
            start = int(params.get("blkid", "0")) * size
            slots[path].append((start, start + size))
    assert max(map(len, slots.values())) == KEYS_PER_FILE
    for ranges in slots.values():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))


def test_an_engine_can_write_and_read_by_the_addresses_alone(instance: Instance):
    """As the file SDKs do: open the path, seek to blkid × size, write size bytes."""
    started = instance.start([1, 2, 3])
    for number, location in enumerate(started["locations"]):
        for uri in uris(location).values():
            _, _, path, params = parsed(uri)
            size = int(params["size"])
            eventually_sync(Path(path).parent.is_dir, message="folders are made beforehand")
            with Path(path).open("r+b" if Path(path).exists() else "w+b") as file:
                file.seek(int(params.get("blkid", "0")) * size)
                file.write(bytes([number + 1]) * size)
    succeeded(instance.finish(started["write_session_id"], {"offset": 3}))
    for number, location in enumerate(instance.prefix([1, 2, 3])):
        for uri in uris(location).values():
            _, _, path, params = parsed(uri)
            size = int(params["size"])
            offset = int(params.get("blkid", "0")) * size
            assert Path(path).read_bytes()[offset : offset + size] == bytes([number + 1]) * size


@pytest.mark.parametrize("root_dir", ["", "a", "a/b"])
def test_an_hf3fs_path_holds_mountpoint_and_root_dir(wire, server, fresh_id, root_dir):
    name = fresh_id()
    mountpoint = f"{server.folder}/mnt-{name}"
    wire.admin_ok(
        "AddStorage",
        storage={
            "global_unique_name": name,
            "threefs": {"mountpoint": mountpoint, "root_dir": root_dir, "key_count_per_file": 2},
        },
    )
    register_with(wire, name, [name])
    (location,) = Instance(wire, name).write([1])
    assert location["type"] == "ST_3FS"
    for uri in uris(location).values():
        scheme, host, path, params = parsed(uri)
        assert (scheme, host) == ("hf3fs", name)
        assert path.startswith(f"{mountpoint}/{root_dir}/".replace("//", "/"))
        assert "size" in params


def test_key_count_per_file_0_is_one_block_a_file(wire, server, fresh_id):
    name = fresh_id()
    wire.admin_ok(
        "AddStorage",
        storage={"global_unique_name": name, "nfs": {"root_path": f"{server.folder}/{name}"}},
    )
    register_with(wire, name, [name])
    paths = [
        parsed(uri)[2]
        for location in Instance(wire, name).write(range(4))
        for uri in uris(location).values()
    ]
    assert len(set(paths)) == len(paths) == 8
