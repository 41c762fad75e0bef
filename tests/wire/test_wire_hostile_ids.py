"""Instance ids that would be trouble in a path, a key or a URI (wire.md §6)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wire_harness import (
    Instance,
    Server,
    Wire,
    code_of,
    message_of,
    registration,
    running_server,
    succeeded,
    uris,
)

from kvcm.testing.eventually import eventually_sync

HOSTILE = [
    "../x",
    "../../../../etc/passwd",
    "..",
    ".",
    "/",
    "/etc/x",
    "a/b/c",
    "a\\b",
    "x" * 200,
    "é" * 100,
    "鍵" * 66 + "é",
    "😀" * 50,
    "a",
    "a:b",
    "a:b:c",
    ":a",
    "{a}",
    "line\nbreak\r\n",
    "\ttab ",
    " ",
    "%2F",
    "%2e%2e%2f",
    "%00",
    "+",
    "a+b c",
    "a b",
    "a@b?c=d&e#f",
    "*?[x]",
    "'; DROP TABLE instances; --",
    '"quoted"',
    "$(id)`id`",
    "-rf",
    "con",
    "A",
    "\u202etrap",
    "e\u0301",
    "é",
    "\x01\x7f",
]


@pytest.fixture(scope="module")
def apart() -> Iterator[Server]:
    """A manager of its own, whose folders are looked through."""
    with running_server() as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def hostile_wire(request: pytest.FixtureRequest, apart: Server) -> Wire:
    return Wire(apart, request.param)


def test_hostile_ids_round_trip_and_stay_apart(apart: Server):
    """All at once, each over the transport the other registered it with."""
    grpc_wire, http_wire = Wire(apart, "grpc"), Wire(apart, "http")
    wires = [(grpc_wire, http_wire), (http_wire, grpc_wire)]
    locations = {}
    for number, name in enumerate(HOSTILE):
        ours, theirs = wires[number % 2]
        succeeded(ours.call("RegisterInstance", registration(name)))
        info = succeeded(theirs.call("GetInstanceInfo", instance_id=name))["instance_info"]
        assert info["instance_id"] == name
        locations[name] = Instance(ours, name).write([1, 2])
        assert Instance(theirs, name).prefix([1, 2]) == locations[name]
    listed = succeeded(grpc_wire.admin("ListInstanceInfo"))["instance_info"]
    assert {info["instance_id"] for info in listed} >= set(HOSTILE)
    assert listed == succeeded(http_wire.admin("ListInstanceInfo"))["instance_info"]

    addresses = [
        uri for found in locations.values() for entry in found for uri in uris(entry).values()
    ]
    assert len(set(addresses)) == len(HOSTILE) * 4
    for uri in addresses:
        path = Path(uri.partition("?")[0].removeprefix("file://nfs_01"))
        assert path.resolve().is_relative_to(apart.root.resolve())
        assert "%" not in uri
        assert max(len(part.encode()) for part in path.parts) < 256

    # One after the other goes, and every other stays.
    left = list(HOSTILE)
    for number, name in enumerate(HOSTILE):
        ours, theirs = wires[number % 2]
        succeeded(ours.admin("RemoveInstance", instance_id=name))
        left.remove(name)
        assert code_of(theirs.call("GetInstanceInfo", instance_id=name)) == "INSTANCE_NOT_EXIST"
        for other in left[:3] + left[-3:]:
            assert Instance(theirs, other).prefix([1, 2]) == locations[other], (name, other)


def test_nothing_is_created_outside_the_folders_of_the_instances(apart: Server, hostile_wire: Wire):
    names = ["../escape", "/abs/escape", "..%2fescape", "esc\nape", "escape" * 30]
    for name in names:
        succeeded(hostile_wire.call("RegisterInstance", registration(name)))
        Instance(hostile_wire, name).write([1])

    def made() -> bool:
        clusters = [c for c in apart.root.iterdir() if c.is_dir()]
        return len(clusters) == 1 and len(list(clusters[0].iterdir())) >= len(names)

    eventually_sync(made, timeout=30)
    (cluster,) = [path for path in apart.root.iterdir() if path.is_dir()]
    for name in os.listdir(cluster):
        # Folders are named after uids, which are never a client's words.
        assert name.isalnum()
        assert name == name.lower()
    # Not rglob: folders of instances removed before this test may vanish meanwhile.
    found = [name for _, folders, files in os.walk(apart.folder) for name in folders + files]
    assert len(found) > 256
    assert not [name for name in found if "escape" in name.replace("\n", "")]
    assert not Path("/abs").exists()
    top = {path.name for path in apart.folder.iterdir()}
    assert top == {"blocks", "bootstrap.json", "data", "log", "ready.json"}
    for name in names:
        succeeded(hostile_wire.admin("RemoveInstance", instance_id=name))


def test_removing_an_instance_leaves_the_files_of_its_neighbours(
    apart: Server, hostile_wire: Wire, fresh_id: Callable[[], str]
):
    base = fresh_id()
    files = {}
    for name in (base, f"{base}:b", f"{base}/b", f"{base}*"):
        succeeded(hostile_wire.call("RegisterInstance", registration(name)))
        (location,) = Instance(hostile_wire, name).write([1])
        path = Path(uris(location)["tp0"].partition("?")[0].removeprefix("file://nfs_01"))
        eventually_sync(path.parent.is_dir, timeout=30)
        path.write_bytes(bytes(1000))
        files[name] = path
    succeeded(hostile_wire.admin("RemoveInstance", instance_id=base))
    for name in (f"{base}:b", f"{base}/b", f"{base}*"):
        assert Instance(hostile_wire, name).statuses([1]) == ["SERVING"]
        assert files[name].exists()
        succeeded(hostile_wire.admin("RemoveInstance", instance_id=name))


@pytest.mark.parametrize("name", ["a\0b", "\0"])
def test_a_nul_is_refused(hostile_wire: Wire, name):
    answer = hostile_wire.call("RegisterInstance", registration(name))
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "instance_id" in message_of(answer)


def test_the_length_of_an_id_is_bounded(hostile_wire: Wire):
    for name in ("i" * 1024, "é" * 512):
        succeeded(hostile_wire.call("RegisterInstance", registration(name)))
        succeeded(hostile_wire.admin("RemoveInstance", instance_id=name))
    for name in ("i" * 1025, "é" * 513, "i" * 1_000_000):
        answer = hostile_wire.call("RegisterInstance", registration(name))
        assert code_of(answer) == "INVALID_ARGUMENT"
        assert "instance_id" in message_of(answer)
        assert len(message_of(answer)) < 3000


def test_lookups_of_an_endless_id_answer_shortly(hostile_wire: Wire):
    for method in ("GetInstanceInfo", "GetCacheLocation", "StartWriteCache", "TrimCache"):
        answer = hostile_wire.call(method, instance_id="i" * 1_000_000)
        assert code_of(answer) in ("INSTANCE_NOT_EXIST", "INVALID_ARGUMENT")
        assert len(message_of(answer)) < 3000, method


def test_hostile_spec_and_group_names_stay_inside_too(
    apart: Server, hostile_wire: Wire, fresh_id: Callable[[], str]
):
    specs = ["../../up", "a/b", "é" * 100, "tp 0", "%2F", "a:b", "a\nb"]
    name = fresh_id()
    body = registration(
        name,
        location_spec_infos=[{"name": spec, "size": 10} for spec in specs],
        location_spec_groups=[{"name": "../g", "spec_names": specs[:2]}],
    )
    succeeded(hostile_wire.call("RegisterInstance", body))
    instance = Instance(hostile_wire, name)
    locations = instance.write([1, 2])
    assert list(uris(locations[0])) == specs
    assert instance.prefix([1, 2]) == locations
    for uri in uris(locations[0]).values():
        path = Path(uri.partition("?")[0].removeprefix("file://nfs_01"))
        assert path.resolve().is_relative_to(apart.root.resolve())
    (part,) = instance.write([3], location_spec_group_names=["../g"])
    assert list(uris(part)) == specs[:2]
    assert json.dumps(locations)
