"""Mooncake when things go wrong: masters that die or hang, memory that is gone, leases."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import pytest

from kvcm.client.mooncake_sdk import MooncakeSdk, parse_key, storages_of
from kvcm.core.clock import SystemClock
from kvcm.core.errors import InvalidArgument, StorageError, Unavailable
from kvcm.core.mooncake import check_spec
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends.base import ExtentName, SpecSlots
from kvcm.storage_backends.mooncake import LEASED, PROBE_BYTES, MooncakeBackend
from kvcm.testing.eventually import eventually
from kvcm.testing.servers_mooncake import (
    MooncakeLender,
    MooncakeMaster,
    mooncake_store,
    needs_mooncake,
)

EXTENT = ExtentName("c", "i", "e")
SPEC = SpecSlots("tp0", 4096, 88)
Store = tuple[MooncakeMaster, MooncakeLender]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    # Short leases, so that deletes soon succeed; a parameter is another time.
    lease_ms = getattr(request, "param", 200)
    with mooncake_store(f"-default_kv_lease_ttl={lease_ms}", "-client_ttl=2") as running:
        yield running


def backend_of(entry: str) -> MooncakeBackend:
    config = StorageConfig(
        global_unique_name="mc", type=StorageType.MOONCAKE, spec={"master_service_entry": entry}
    )
    return MooncakeBackend(config, SystemClock())


@pytest.fixture
async def backend(store: Store) -> AsyncIterator[MooncakeBackend]:
    backend = backend_of(store[0].entry)
    await backend.open()
    yield backend
    await backend.close()


@pytest.fixture
def sdk(store: Store) -> Iterator[MooncakeSdk]:
    with closing(MooncakeSdk({"mc": check_spec({"master_service_entry": store[0].entry})})) as sdk:
        yield sdk


def uris(backend: MooncakeBackend, count: int = 88) -> list[str]:
    return backend.uris(backend.place(EXTENT, [SPEC]), EXTENT, SPEC, 0, count)


def names(backend: MooncakeBackend, count: int = 88) -> list[str]:
    return [o.name for o in backend.objects(backend.place(EXTENT, [SPEC]), EXTENT, [SPEC])][:count]


async def takes_writes(backend: MooncakeBackend) -> bool:
    result = await backend.probe()
    return result.available and not result.unwritable


@needs_mooncake
async def test_a_master_that_dies_is_unavailable_and_one_that_is_back_has_lost_its_blocks(
    store: Store, backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    master, _ = store
    await eventually(lambda: takes_writes(backend))
    data = bytes(range(256)) * 16
    items = [(uri, data) for uri in uris(backend)]
    assert await sdk.put_many_async(items) == [None] * 88
    assert await backend.exists(names(backend), [4096] * 88) == [True] * 88
    master.kill()
    assert not await takes_writes(backend)
    (answer,) = await backend.delete(names(backend, 1))
    assert isinstance(answer, StorageError)
    with pytest.raises(StorageError):
        await backend.exists(names(backend, 1), [1])
    master.start()
    await eventually(lambda: takes_writes(backend), timeout=30)
    assert await backend.exists(names(backend), [4096] * 88) == [False] * 88
    got = await sdk.get_many_async([(uri, None) for uri in uris(backend)])
    assert {getattr(answer, "reason", "") for answer in got} == {"MISSING"}

    async def written() -> bool:
        return await sdk.put_many_async(items[:1]) == [None]

    await eventually(written, timeout=30)
    assert await sdk.get_many_async([(items[0][0], None)]) == [data]


@needs_mooncake
async def test_a_master_that_hangs_blocks_neither_the_loop_nor_close(
    store: Store, backend: MooncakeBackend
) -> None:
    master, _ = store
    master.pause()
    try:
        calls = [asyncio.ensure_future(backend.exists(names(backend), [1] * 88)) for _ in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await backend.probe()
        async with asyncio.timeout(5):
            await backend.close()
        for failed in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(failed, StorageError)
    finally:
        master.resume()


@needs_mooncake
async def test_a_worker_that_ends_is_started_again(backend: MooncakeBackend) -> None:

    assert backend._worker is not None
    first = backend._worker.pid
    os.kill(first, signal.SIGKILL)

    async def answers() -> bool:
        try:
            return await backend.exists(names(backend, 1), [1]) == [False]
        except StorageError:
            return False

    await eventually(answers)
    assert backend._worker.pid not in (0, first)


@needs_mooncake
async def test_blocks_whose_lender_died_are_errors_at_once_and_missing_in_the_end(
    store: Store, backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    _, lender = store
    await eventually(lambda: takes_writes(backend))
    (uri,) = uris(backend, 1)
    assert await sdk.put_many_async([(uri, bytes(4096))]) == [None]
    lender.kill()

    async def is_missing() -> bool:
        (answer,) = await sdk.get_many_async([(uri, None)])
        assert isinstance(answer, StorageError)
        return answer.reason == "MISSING"

    await eventually(is_missing, timeout=30)
    assert await backend.exists(names(backend, 1), [1]) == [False]
    assert "none is mounted" in (await backend.probe()).unwritable


@needs_mooncake
async def test_a_key_that_was_just_read_is_deleted_after_its_lease(
    backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    await eventually(lambda: takes_writes(backend))
    (uri,) = uris(backend, 1)
    assert await sdk.put_many_async([(uri, bytes(4096))]) == [None]
    assert await sdk.get_many_async([(uri, None)]) == [bytes(4096)]
    (answer,) = await backend.delete(names(backend, 1))
    assert isinstance(answer, StorageError)
    assert answer.reason == LEASED

    async def is_gone() -> bool:
        return await backend.delete(names(backend, 1)) == [None]

    await eventually(is_gone)
    (got,) = await sdk.get_many_async([(uri, None)])
    assert isinstance(got, StorageError)
    assert got.reason == "MISSING"


@needs_mooncake
async def test_a_full_store_is_read_and_not_written_until_there_is_room(
    backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    await eventually(lambda: takes_writes(backend))
    size = 1 << 20
    spec = SpecSlots("tp0", size, 88)
    place = backend.place(EXTENT, [spec])
    items = [(uri, b"x" * size) for uri in backend.uris(place, EXTENT, spec, 0, 88)]
    keys = [o.name for o in backend.objects(place, EXTENT, [spec])]
    answers = await sdk.put_many_async(items)
    written = [i for i, answer in enumerate(answers) if answer is None]
    assert 0 < len(written) < 88
    result = await backend.probe()
    if not result.unwritable:
        # The allocator may keep room for the probe's few bytes.
        small = SpecSlots("tp1", PROBE_BYTES, 4096)
        rest = backend.uris(backend.place(EXTENT, [small]), EXTENT, small, 0, 4096)
        await sdk.put_many_async([(uri, b"y" * PROBE_BYTES) for uri in rest])
        result = await backend.probe()
    assert (result.available, "no segment has room" in result.unwritable) == (True, True)
    assert await backend.exists(keys, [size] * 88) == [answer is None for answer in answers]
    assert await sdk.get_many_async([(items[written[0]][0], None)]) == [b"x" * size]

    async def has_room() -> bool:
        # The reader above holds a lease on one for a while.
        refused = await backend.delete([keys[i] for i in written])
        return not any(refused) and not (await backend.probe()).unwritable

    await eventually(has_room)
    assert not any(await backend.exists([keys[i] for i in written], [1] * len(written)))


@needs_mooncake
async def test_what_others_put_unpinned_vanishes_and_is_missing_and_ours_stays(
    store: Store, backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    await eventually(lambda: takes_writes(backend))
    size = 1 << 20
    ours = [(uri, b"x" * 4096) for uri in uris(backend, 8)]
    assert await sdk.put_many_async(ours) == [None] * 8
    other = SpecSlots("other", size, 88)
    place = backend.place(EXTENT, [other])
    theirs = [o.name for o in backend.objects(place, EXTENT, [other])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PUTS_UNPINNED, store[0].entry, *theirs),
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    assert await process.wait() == 0
    gone = (await backend.exists(theirs, [size] * 88)).index(False)
    (uri,) = backend.uris(place, EXTENT, other, gone, 1)
    (answer,) = await sdk.get_many_async([(uri, None)])
    assert isinstance(answer, StorageError)
    assert answer.reason == "MISSING"
    assert await sdk.get_many_async([(uri, None) for uri, _ in ours]) == [b"x" * 4096] * 8


PUTS_UNPINNED = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
for key in sys.argv[2:]:
    give_up = time.monotonic() + 10
    while store.put(key, b"y" * (1 << 20)) and time.monotonic() < give_up:
        time.sleep(0.05)
"""


@needs_mooncake
@pytest.mark.parametrize("store", [30_000], indirect=True)
async def test_batches_answer_position_by_position_and_bytes_stay_where_they_are(
    backend: MooncakeBackend, sdk: MooncakeSdk
) -> None:
    await eventually(lambda: takes_writes(backend))
    count = 1500
    spec = SpecSlots("tp0", 512, count)
    where = backend.uris(backend.place(EXTENT, [spec]), EXTENT, spec, 0, count)
    source = bytearray(b"".join(i.to_bytes(4, "big") * 128 for i in range(count)))
    put = [(uri, memoryview(source)[512 * i : 512 * (i + 1)]) for i, uri in enumerate(where)]
    assert sdk.put_many(put) == [None] * count
    other = where[0].replace("size=512", "size=256")
    longer = where[1].replace("size=512", "size=1024")
    # What is there already stays as it is: only the right size counts as written.
    same, shorter = sdk.put_many([put[0], (other, bytes(256))])
    assert same is None
    assert isinstance(shorter, StorageError)
    target = bytearray(512 * count)
    get = [(uri, memoryview(target)[512 * i : 512 * (i + 1)]) for i, uri in enumerate(where)]
    assert sdk.get_many(get) == [None] * count
    assert target == source
    answers = sdk.get_many(
        [
            (where[5], None),
            ("file://mc/x?size=1", None),
            (where[3], bytearray(511)),
            (other, None),
            (longer, None),
            (where[0].replace("//mc/", "//unknown/"), None),
            (where[0].replace("key=", "key=no-"), None),
        ]
    )
    assert answers[0] == source[512 * 5 : 512 * 6]
    assert [type(a) for a in answers[1:3]] == [InvalidArgument] * 2
    assert [getattr(a, "reason", "") for a in answers[3:5]] == ["TRUNCATED"] * 2
    assert isinstance(answers[5], InvalidArgument)
    assert getattr(answers[6], "reason", "") == "MISSING"
    (late,) = sdk.get_many([(where[0], None)], deadline_s=0)
    assert isinstance(late, Unavailable)
    assert late.reason == "DEADLINE"


async def test_a_master_that_is_not_there_is_named_at_once() -> None:
    sdk = MooncakeSdk({"mc": check_spec({"master_service_entry": "127.0.0.1:1"})})
    (answer,) = sdk.put_many([("mooncake://mc/?key=k&size=1", b"x")])
    assert isinstance(answer, StorageError)
    assert "127.0.0.1:1" in str(answer)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master_service_entry", ""),
        ("master_service_entry", "host"),
        ("master_service_entry", "host:0"),
        ("master_service_entry", "host:65536"),
        ("master_service_entry", 7),
        ("local_hostname", "a b"),
        ("protocol", "TCP;"),
        ("rdma_device", "a b"),
        ("metadata_connstring", "a\nb"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        check_spec({"master_service_entry": "h:1", field: value})


def test_the_answer_of_register_instance_configures_the_sdk() -> None:
    found = storages_of(
        '[{"type":"file","global_unique_name":"f","storage_spec":{}},'
        '{"type":"mooncake","global_unique_name":"m",'
        '"storage_spec":{"master_server_entry":"h:50051"}}]'
    )
    assert found == {"m": check_spec({"master_service_entry": "h:50051"})}
    assert found["m"].master_address == ("h", 50051)


@pytest.mark.parametrize(
    "uri",
    [
        "mooncake://m/?size=1",
        "mooncake://m/?key=k",
        "mooncake://m/?key=k&size=0",
        f"mooncake://m/?key=k&size={'9' * 5_000}",
        "mooncake://[m/?key=k&size=1",
        "x://m/?key=k&size=1",
    ],
)
def test_uris_without_a_key_or_a_size_are_refused(uri: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_key(uri)
