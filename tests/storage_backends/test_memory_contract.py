"""The contract on ``memory``, which comes through its entry point like anybody's plug-in."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvcm.client.errors import is_reportable
from kvcm.client.memory_sdk import MemorySdk
from kvcm.client.transfer import MISSING, TRUNCATED
from kvcm.core.clock import SystemClock
from kvcm.core.errors import InvalidArgument, KvcmError, Unsupported
from kvcm.core.memory import pool_of
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend
from kvcm.testing.contracts.storage_backend import StorageBackendContract

NAME = "memory_01"


def config(**options: str) -> StorageConfig:
    spec = {"plugin": "memory", **options}
    return StorageConfig(global_unique_name=NAME, type=StorageType.PLUGIN, spec=spec)


class TestMemory(StorageBackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[DataStorageBackend]:
        backend = build_backend(config(), SystemClock())
        await backend.open()
        yield backend
        await backend.close()
        pool_of(NAME).clear()

    def sdk(self) -> MemorySdk:
        return MemorySdk()


def test_it_has_no_options() -> None:
    with pytest.raises(InvalidArgument, match="'size'"):
        build_backend(config(size="1"), SystemClock())


def test_the_sdk_answers_position_by_position() -> None:
    pool_of(NAME)
    sdk, uri = MemorySdk(), f"memory://{NAME}/?key=k&size=4"
    long = f"memory://{NAME}/?key=k&size=5"
    strange = ["file:///k?size=4", f"memory://{NAME}/?key=k", f"memory://{NAME}/?key=k&size=x"]
    puts = sdk.put_many([(uri, b"abcd"), (uri, b"abc"), *((each, b"abcd") for each in strange)])
    assert puts[0] is None
    assert all(isinstance(answer, InvalidArgument) for answer in puts[1:])
    buffer = bytearray(4)
    missing = f"memory://{NAME}/?key=other&size=4"
    gets = sdk.get_many([(uri, None), (uri, buffer), (missing, None), (long, None)])
    assert gets[:2] == [b"abcd", None]
    assert buffer == b"abcd"
    reasons = [answer.reason for answer in gets[2:] if isinstance(answer, KvcmError)]
    assert reasons == [MISSING, TRUNCATED]
    pool_of(NAME).clear()


def test_what_another_process_keeps_is_neither_acknowledged_nor_reported_missing() -> None:
    sdk, uri = MemorySdk(), "memory://of_another_process/?key=k&size=4"
    (put,), (got,) = sdk.put_many([(uri, b"abcd")]), sdk.get_many([(uri, None)])
    for answer in (put, got):
        assert isinstance(answer, Unsupported)
        assert "'of_another_process'" in str(answer)
        assert not is_reportable(answer)
