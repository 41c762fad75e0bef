"""The client against a running manager: write, read, and every example of docs/client.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.client import AdminClient, AsyncClient, Client, RetryPolicy, block_keys
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import (
    DuplicateEntity,
    EntityNotExist,
    InstanceNotExist,
    InvalidArgument,
    SessionNotExist,
    VersionConflict,
)
from kvcm.core.types import ModelDeployment, QueryType
from kvcm.testing.eventually import eventually_sync

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "client.md"
SIZE = 64
PATIENT = RetryPolicy(rounds_max=99)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalManager]:
    folder = tmp_path_factory.mktemp("manager")
    blocks = folder / "blocks"
    blocks.mkdir()
    bootstrap = folder / "bootstrap.json"
    nfs = {"root_path": f"{blocks}/", "key_count_per_file": 8}
    group = {
        "name": "default",
        "storage_candidates": ["nfs_01"],
        "global_quota_group_name": "q",
        "quota": {"capacity": 1 << 30},
    }
    bootstrap.write_text(
        json.dumps(
            {
                "storages": [{"global_unique_name": "nfs_01", "nfs": nfs}],
                "instance_groups": [group],
            }
        )
    )
    with running_manager(folder, bootstrap=bootstrap, log=folder / "log") as manager:
        yield manager


@pytest.fixture
def meta(real: LocalManager, transport: str) -> str:
    port = real.rpc_port if transport == "grpc" else real.http_port
    return f"{transport}://{real.host}:{port}"


@pytest.fixture
def admin(real: LocalManager, transport: str) -> Iterator[AdminClient]:
    port = real.admin_rpc_port if transport == "grpc" else real.admin_http_port
    with AdminClient(f"{transport}://{real.host}:{port}", timeout=10) as client:
        yield client


@pytest.fixture
def instance(transport: str, request: pytest.FixtureRequest) -> str:
    return f"{request.function.__name__}-{transport}"


@pytest.fixture
def client(meta: str, instance: str) -> Iterator[Client]:
    # A manager may still be loading what was registered just now.
    with Client(meta, timeout=10, retry=PATIENT) as client:
        client.register_instance("default", instance, 4, {"tp0": SIZE})
        yield client


def test_what_a_session_writes_is_found_and_read_back(client: Client, instance: str) -> None:
    keys = block_keys(range(40), 4)
    blocks = [bytes([i]) * SIZE for i in range(10)]
    with client.write(instance, keys[:6]) as session:
        assert session.put(FileSdk(), blocks) == {}
    with client.write(instance, keys) as session:
        assert [i for i, _ in session] == [6, 7, 8, 9]
        granted = [place for _, place in session]
        session.put(FileSdk(), blocks)
        session.fail(8)
    found = client.get_cache_location(instance, keys)
    assert len(found) == 8
    assert found.locations[6:] == granted[:2]
    uris = found.locations.uris("tp0")
    assert FileSdk().get_many([(uri, None) for uri in uris]) == blocks[:8]
    every = client.get_cache_location(instance, np.array(keys), query=QueryType.BATCH_GET)
    assert [place.found for place in every.locations] == [True] * 8 + [False, True]
    metas = client.get_cache_meta(instance, keys[7:9])
    assert [meta.status for meta in metas] == ["CLS_SERVING", "CLS_NOT_FOUND"]

    client.remove_cache(instance, keys[4:])
    assert len(client.get_cache_location(instance, keys)) == 4
    client.trim_cache(instance)
    assert len(client.get_cache_location(instance, keys)) == 0


def test_an_asyncio_session_publishes_too(meta: str, client: Client, instance: str) -> None:
    keys = [5, 6, 7]

    async def write() -> int:
        async with AsyncClient(meta, timeout=10, retry=PATIENT) as other:
            async with other.write(instance, keys) as session:
                assert await session.put(FileSdk(), [b"x" * SIZE] * 3) == {}
            async with other.write(instance, keys) as again:
                assert len(again) == 0
            return len(await other.get_cache_location(instance, keys))

    assert asyncio.run(write()) == 3


def test_a_session_that_took_too_long_publishes_nothing_and_says_so(
    client: Client, instance: str
) -> None:
    def expired() -> bool:
        # The key can be granted again once the session is over.
        return client.get_cache_meta(instance, [1])[0].status == "CLS_NOT_FOUND"

    session = client.write(instance, [1], write_timeout_s=1)
    session.__enter__()
    session.done(0)
    eventually_sync(expired)
    with pytest.raises(SessionNotExist) as caught:
        session.__exit__(None, None, None)
    assert any("published" in note for note in caught.value.__notes__)
    assert len(client.get_cache_location(instance, [1])) == 0


def test_a_repeated_finish_is_ok_and_another_mask_is_not(client: Client, instance: str) -> None:
    grant = client.start_write_cache(instance, [1, 2])
    client.finish_write_cache(instance, grant.session_id, [True, False])
    client.finish_write_cache(instance, grant.session_id, [True, False])
    with pytest.raises(InvalidArgument):
        client.finish_write_cache(instance, grant.session_id, [True, True])


def test_errors_of_a_manager_are_told_apart(
    client: Client, admin: AdminClient, instance: str
) -> None:
    with pytest.raises(InstanceNotExist, match="nobody"):
        client.get_cache_location("nobody", [1])
    with pytest.raises(SessionNotExist):
        client.finish_write_cache(instance, "a" * 32, 1)
    with pytest.raises(DuplicateEntity, match="block_size"):
        client.register_instance("default", instance, 8, {"tp0": SIZE})
    with pytest.raises(EntityNotExist, match="nothing"):
        admin.get_instance_group("nothing")
    group = admin.get_instance_group("default")
    with pytest.raises(VersionConflict):
        admin.update_instance_group(
            group.model_copy(update={"version": group.version + 9}), group.version + 8
        )


def test_what_is_registered_comes_back(client: Client, admin: AdminClient, instance: str) -> None:
    model = ModelDeployment(model_name="m", dtype="fp8", use_mla=True, tp_size=2, lora_name="x")
    other = f"{instance}-2"
    registration = client.register_instance(
        "default",
        other,
        16,
        {"tp1": 2**33, "tp0": 5},
        model_deployment=model,
        location_spec_groups={"one": ["tp1"]},
    )
    assert [s.global_unique_name for s in registration.storage_configs] == ["nfs_01"]
    info = client.get_instance_info(other)
    assert info == admin.get_instance_info(other)
    assert info in admin.list_instance_info("default")
    assert info.model_deployment == model
    assert {spec.name: spec.size for spec in info.location_spec_infos} == {"tp1": 2**33, "tp0": 5}
    admin.remove_instance(other)
    with pytest.raises(InstanceNotExist):
        client.get_instance_info(other)


def test_the_registry_survives_a_round_through_the_admin_client(admin: AdminClient) -> None:
    (storage,) = admin.list_storage()
    admin.update_storage(storage)
    assert admin.list_storage() == (storage,)
    group = admin.get_instance_group("default")
    changed = group.model_copy(update={"user_data": "u", "version": group.version + 1})
    admin.update_instance_group(changed, group.version)
    assert admin.get_instance_group("default") == changed
    admin.load_config_snapshot(admin.gen_config_snapshot())
    assert admin.get_instance_group("default") == changed
    assert admin.check_health().is_leader


def test_every_example_of_the_documentation_runs(
    real: LocalManager, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) >= 5
    code = "\n".join(examples)
    for default, port in (
        (6381, real.rpc_port),
        (6382, real.http_port),
        (6491, real.admin_rpc_port),
    ):
        code = code.replace(f"127.0.0.1:{default}", f"127.0.0.1:{port}")
    exec(compile(code, str(DOCUMENT), "exec"), {"__name__": "example"})  # noqa: S102
    assert "nobody" in capsys.readouterr().out
