"""A manager, a client and a real Mooncake store."""

from __future__ import annotations

import json
from pathlib import Path

from kvcm.cli.local_manager import running_manager
from kvcm.client import Client, RetryPolicy, block_keys
from kvcm.client.router import Transfers
from kvcm.core.types import ReportKind
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.servers_mooncake import mooncake_store, needs_mooncake

SIZE = 4096
PATIENT = RetryPolicy(rounds_max=99)


@needs_mooncake
def test_blocks_are_written_found_read_lost_reported_and_written_again(tmp_path: Path) -> None:
    with mooncake_store() as (master, _):
        spec = {"master_service_entry": master.entry}
        group = {
            "name": "default",
            "storage_candidates": ["mc"],
            "global_quota_group_name": "q",
            "quota": {"capacity": 1 << 30},
        }
        storage = {"global_unique_name": "mc", "mooncake": spec}
        bootstrap = tmp_path / "bootstrap.json"
        bootstrap.write_text(json.dumps({"storages": [storage], "instance_groups": [group]}))
        with (
            running_manager(tmp_path, bootstrap=bootstrap, log=tmp_path / "log") as manager,
            Client(
                f"grpc://{manager.host}:{manager.rpc_port}", timeout=10, retry=PATIENT
            ) as client,
            Transfers() as sdk,
        ):
            known = client.register_instance("default", "i", 4, {"tp0": SIZE})
            sdk.configure(known.storage_configs)
            memory = bytearray(SIZE)
            sdk.announce(memory)
            keys = block_keys(range(40), 4)
            blocks = [bytes([i]) * SIZE for i in range(10)]

            def write() -> bool:
                with client.write("i", keys) as session:
                    return session.put(sdk, blocks) == {} and len(session) > 0

            eventually_sync(write, timeout=30)
            found = client.get_cache_location("i", keys)
            assert sdk.get_many([(u, None) for u in found.locations.uris("tp0")]) == blocks
            assert sdk.get_many([(found.locations[7].specs["tp0"], memory)]) == [None]
            assert memory == blocks[7]

            client.remove_cache("i", keys[9:])
            assert len(client.get_cache_location("i", keys)) == 9

            master.kill()
            master.start()
            places = found.locations[:9]

            def reported() -> bool:
                client.report_cache_error("i", keys[:9], places, ReportKind.MISSING)
                return len(client.get_cache_location("i", keys)) == 0

            eventually_sync(reported, timeout=30, interval=0.2)
            eventually_sync(write, timeout=30, interval=0.2)
            again = client.get_cache_location("i", keys)
            uris = again.locations.uris("tp0")
            assert set(uris).isdisjoint(found.locations.uris("tp0"))
            assert sdk.get_many([(u, None) for u in uris]) == blocks[: len(uris)]
