"""What a client sees across a restart of the manager (wire.md §5, §9)."""

from __future__ import annotations

from pathlib import Path

import pytest
from wire_harness import Instance, Wire, code_of, registration, running_server, succeeded

from kvcm.testing.eventually import eventually_sync


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_blocks_sessions_and_deletions_outlive_a_restart(transport: str, tmp_path: Path):
    with running_server(folder=tmp_path) as server:
        wire = Wire(server, transport)
        succeeded(wire.call("RegisterInstance", registration("i")))
        instance = Instance(wire, "i")
        locations = instance.write(range(20))
        done = instance.start([50])["write_session_id"]
        succeeded(instance.finish(done, {"offset": 1}))
        started = instance.start([100, 101], write_timeout_seconds=600)
        nothing = instance.start([1, 2])["write_session_id"]
        succeeded(wire.call("RegisterInstance", registration("removed")))
        Instance(wire, "removed").write([1])
        wire.admin_ok("RemoveInstance", instance_id="removed")

    with running_server(folder=tmp_path) as server:
        wire = Wire(server, transport)
        instance = Instance(wire, "i")
        assert instance.prefix(range(20)) == locations
        # A lost reply is asked for again; an open session is finished; an empty one too.
        eventually_sync(lambda: code_of(instance.finish(done, {"offset": 1})) == "OK")
        succeeded(instance.finish(nothing, {"bool_masks": {}}))
        succeeded(instance.finish(started["write_session_id"], {"offset": 2}))
        assert instance.batch([100, 101]) == started["locations"]
        assert instance.start(range(20))["block_mask"] == {"offset": 20}
        assert code_of(wire.call("GetInstanceInfo", instance_id="removed")) == "INSTANCE_NOT_EXIST"
        succeeded(wire.call("RegisterInstance", registration("i")))


def test_a_deleted_default_group_does_not_come_back(tmp_path: Path):
    for start in range(2):
        with running_server(folder=tmp_path) as server:
            wire = Wire(server, "http")
            if not start:
                wire.admin_ok("RemoveInstanceGroup", name="default")
                wire.admin_ok("RemoveStorage", storage_unique_name="nfs_01")
            assert code_of(wire.admin("GetInstanceGroup", name="default")) == "INVALID_ARGUMENT"
            assert wire.admin_ok("ListStorage")["storage"] == []
