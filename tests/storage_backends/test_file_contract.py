"""The contract on ``file``, with one and with several keys a file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcm.storage_backends.base import DataStorageBackend
from kvcm.testing.contracts.storage_backend import StorageBackendContract


@pytest.mark.parametrize("keys_per_file", [0, 1, 8])
class TestFile(StorageBackendContract):
    @pytest.fixture
    async def backend(
        self, make_backend: Callable[..., DataStorageBackend], keys_per_file: int
    ) -> DataStorageBackend:
        backend = make_backend(key_count_per_file=keys_per_file)
        await backend.create()
        await backend.open()
        return backend
