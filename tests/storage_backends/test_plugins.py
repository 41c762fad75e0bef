"""Which plug-in serves a storage, and what is said when none does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcm.core.clock import SystemClock
from kvcm.core.errors import InvalidArgument, KvcmError, StorageError, Unsupported
from kvcm.core.types import StorageConfig, StorageType
from kvcm.storage_backends import plugins
from kvcm.storage_backends.base import DataStorageBackend
from kvcm.storage_backends.factory import build_backend
from kvcm.storage_backends.posix import PosixBackend
from kvcm.testing.plugins import install

MODULE = "kvcm_plugin_of_a_test"
SOURCE = """
from kvcm.storage_backends.memory import MemoryBackend

NO_FACTORY = 7


class Other(MemoryBackend):
    product = "other"

    async def exists(self, names, sizes):
        raise ZeroDivisionError("by zero")


def fails(config, clock):
    raise ZeroDivisionError("by zero")
"""

Install = Callable[[str, dict[str, str]], None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs packages whose adapters are in one module; counts as a start."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(package: str, points: dict[str, str]) -> None:
        targets = {name: f"{MODULE}:{target}" for name, target in points.items()}
        install(tmp_path, package, {plugins.GROUP: targets}, {f"{MODULE}.py": SOURCE})
        forget()

    yield put
    forget()


def forget() -> None:
    plugins._installed.cache_clear()
    plugins._outcome.cache_clear()


def build(kind: StorageType, **spec: str) -> DataStorageBackend:
    config = StorageConfig(global_unique_name="s", type=kind, spec=spec)
    return build_backend(config, SystemClock())


def test_a_plugin_serves_the_type_of_its_name(installed: Install) -> None:
    installed("one", {"one": "Other"})
    assert getattr(build(StorageType.PLUGIN, plugin="one"), "product", "") == "other"


def test_the_memory_pool_is_unsupported_unless_a_plugin_serves_it(installed: Install) -> None:
    with pytest.raises(Unsupported, match="'pace' is not built in"):
        build(StorageType.TAIRMEMPOOL)
    installed("pool", {"pace": "Other"})
    assert build(StorageType.TAIRMEMPOOL).type is StorageType.TAIRMEMPOOL


def test_no_plugin_is_asked_for_what_is_built_in(installed: Install) -> None:
    installed("thief", {"file": "Other", "plugin": "Other"})
    assert isinstance(build(StorageType.NFS, root_path="/x"), PosixBackend)
    for name in ("file", "plugin", "pace"):
        with pytest.raises(InvalidArgument, match="a type of its own"):
            build(StorageType.PLUGIN, plugin=name)


@pytest.mark.parametrize(
    ("target", "kind", "message"),
    [
        (
            "NO_FACTORY",
            Unsupported,
            r"plug-in 'bad' \(.*:NO_FACTORY, one 1.0\) is no factory but int",
        ),
        ("nothing", Unsupported, r"plug-in 'bad' .* cannot be loaded: AttributeError"),
        ("fails", StorageError, "plug-in 'bad' failed: ZeroDivisionError: by zero"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_said(
    installed: Install, target: str, kind: type[KvcmError], message: str
) -> None:
    installed("one", {"bad": target, "good": "Other"})
    for _ in range(2):
        with pytest.raises(kind, match=f"storage 's': {message}"):
            build(StorageType.PLUGIN, plugin="bad")
    assert build(StorageType.PLUGIN, plugin="good")


async def test_a_fault_of_a_plugin_is_an_error_of_its_storage(
    installed: Install, caplog: pytest.LogCaptureFixture
) -> None:
    installed("one", {"one": "Other"})
    backend = build(StorageType.PLUGIN, plugin="one")
    await backend.open()
    assert (await backend.probe()).available
    message = "storage 's': plug-in 'one' failed in exists: ZeroDivisionError: by zero"
    with pytest.raises(StorageError, match=message):
        await backend.exists(["x"], [1])
    assert "ZeroDivisionError" in caplog.text
    # An error of the right kind stays what it is.
    with pytest.raises(Unsupported, match="other cannot list objects"):
        await backend.list_objects("c", "i")
    await backend.close()


def test_two_packages_for_one_type_are_refused_by_name(installed: Install) -> None:
    installed("one", {"twice": "Other"})
    installed("two", {"twice": "fails"})
    with pytest.raises(Unsupported, match=r"several plug-ins: one 1\.0, two 1\.0"):
        build(StorageType.PLUGIN, plugin="twice")
