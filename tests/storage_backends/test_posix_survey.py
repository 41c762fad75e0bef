"""What lies on a file storage, whoever knows of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcm.core.clock import SystemClock
from kvcm.core.errors import StorageError
from kvcm.core.storage import MARKER
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends.base import FoundObject
from kvcm.storage_backends.posix import PosixBackend

NAME = "a" * 20


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[PosixBackend]:
    spec = {
        "root_path": str(tmp_path / "now"),
        "former_roots": [str(tmp_path / "then"), str(tmp_path / "gone")],
    }
    config = StorageConfig(global_unique_name="s1", type=StorageType.NFS, spec=spec)
    made = PosixBackend(config, SystemClock())
    await made.create()
    (tmp_path / "then").mkdir()
    (tmp_path / "then" / MARKER).touch()
    await made.open()
    yield made
    await made.close()


def put(root: Path, *parts: str) -> str:
    path = root.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"12345")
    return str(path)


async def survey(backend: PosixBackend, cluster: str, instance: str) -> list[FoundObject]:
    return [found async for page in backend.survey(cluster, instance) for found in page]


async def test_all_block_files_of_an_instance_are_found_and_nothing_else(
    backend: PosixBackend, tmp_path: Path
) -> None:
    now = tmp_path / "now"
    mine = {
        put(now, "c1", "i1", f"{i:02x}", f"{NAME}_tp0_{n}") for i in range(40) for n in range(20)
    }
    mine.add(put(tmp_path / "then", "c1", "i1", "0a", f"{NAME}_tp1_0"))
    put(now, "c2", "i1", "0a", f"{NAME}_tp0_0")
    put(now, "c1", "i2", "0a", f"{NAME}_tp0_0")
    put(now, "c1", "i1", "zz", f"{NAME}_tp0_0")
    put(now, "c1", "i1", "0a", ".nfs0001")
    os.symlink(now, now / "c1" / "i1" / "0a" / f"{NAME}_tp0_999")
    found = await survey(backend, "c1", "i1")
    assert {f.name for f in found} == mine
    assert len(found) == len(mine)
    assert {f.size for f in found} == {5}
    assert await survey(backend, "c1", "i3") == []
    assert sorted(await backend.instances("c1")) == ["i1", "i2"]
    assert await backend.instances("c3") == []


async def test_an_age_is_since_the_last_write_or_change_whichever_is_later(
    backend: PosixBackend, tmp_path: Path
) -> None:
    path = put(tmp_path / "now", "c1", "i1", "0a", f"{NAME}_tp0_0")
    os.utime(path, (0, 0))
    (found,) = await survey(backend, "c1", "i1")
    assert -1 <= found.age_s < 60
    later = os.stat(path).st_ctime + 500
    os.utime(path, (later, later))
    (found,) = await survey(backend, "c1", "i1")
    assert found.age_s < -400


async def test_only_files_of_probes_count_as_their_leftovers(
    backend: PosixBackend, tmp_path: Path
) -> None:
    now = tmp_path / "now"
    left = put(now, f".kvcm-probe-{'0' * 24}")
    others = [
        put(now, ".kvcm-probe-me"),
        put(now, "file"),
        put(now, "c1", f".kvcm-probe-{'0' * 24}"),
    ]
    assert [f.name for f in await backend.leftovers()] == [left]
    answers = await backend.delete_leftovers([left, *others, left])
    assert answers[0] is None
    assert answers[-1] is None
    assert all(isinstance(answer, StorageError) for answer in answers[1:-1])
    assert not os.path.exists(left)
    assert all(map(os.path.exists, others))
    assert await backend.leftovers() == []


async def test_a_vanished_root_is_an_error_and_not_an_empty_storage(
    backend: PosixBackend, tmp_path: Path
) -> None:
    (tmp_path / "now").rename(tmp_path / "elsewhere")
    for look in (survey(backend, "c1", "i1"), backend.instances("c1"), backend.leftovers()):
        with pytest.raises(StorageError, match="now"):
            await look
