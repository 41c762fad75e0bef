"""Backends on a temporary folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.clock import SystemClock
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend


@pytest.fixture
async def make_backend(tmp_path: Path) -> AsyncIterator[Callable[..., DataStorageBackend]]:
    """Make backends, spec fields as keywords; closed at the end, opened by whoever uses them."""
    made: list[DataStorageBackend] = []
    roots = {
        StorageType.NFS: {"root_path": f"{tmp_path}/root"},
        StorageType.HF3FS: {"cluster_name": "c", "mountpoint": str(tmp_path), "root_dir": "/kv/"},
        StorageType.VCNS_HF3FS: {"cluster_name": "c", "mountpoint": str(tmp_path)},
    }

    def make(
        kind: StorageType = StorageType.NFS, *, check: bool = False, **spec: Any
    ) -> DataStorageBackend:
        config = StorageConfig(
            global_unique_name="store_01.a-b",
            type=kind,
            spec={**roots[kind], "key_count_per_file": 8, **spec},
            check_storage_available_when_open=check,
        )
        made.append(build_backend(config, SystemClock()))
        return made[-1]

    yield make
    for backend in made:
        await backend.close()
