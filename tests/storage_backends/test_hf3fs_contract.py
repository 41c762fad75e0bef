"""The contract on ``hf3fs``, creating files ahead of the writer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcm.core.types import StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.testing.contracts.storage_backend import StorageBackendContract


class TestHf3fs(StorageBackendContract):
    @pytest.fixture
    async def backend(self, make_backend: Callable[..., DataStorageBackend]) -> DataStorageBackend:
        backend = make_backend(StorageType.HF3FS, touch_file_when_create=True)
        await backend.create()
        await backend.open()
        return backend
