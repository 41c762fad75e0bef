"""The contract on ``vcns_hf3fs``, several keys a file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcm.core.types import StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.testing.contracts.storage_backend import StorageBackendContract


class TestVcnsHf3fs(StorageBackendContract):
    @pytest.fixture
    async def backend(self, make_backend: Callable[..., DataStorageBackend]) -> DataStorageBackend:
        backend = make_backend(StorageType.VCNS_HF3FS, remote_host="vcns", remote_port=9000)
        await backend.create()
        await backend.open()
        return backend
