"""What an install contains."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return zipfile.ZipFile(out / built.stdout.split()[-1])


def test_a_wheel_carries_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvcm").rglob("*.py")}
    assert modules <= names
    assert "kvcm/py.typed" in names


def test_a_wheel_carries_the_migrations_of_the_registry(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    scripts = [path for path in (ROOT / "migrations").rglob("*.py") if path.is_file()]
    assert scripts
    for path in scripts:
        inside = f"kvcm/registry/migrations/{path.relative_to(ROOT / 'migrations').as_posix()}"
        assert inside in names


def test_a_wheel_carries_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvcm"}


CLIENT_ONLY = """
import sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"sqlalchemy", "alembic", "fastapi", "uvicorn", "rocksdict",
                                  "redis", "argon2", "pydantic_settings", "prometheus_client"}:
            raise ModuleNotFoundError(name, name=name)
        # What ties a module that protoc wrote to the version of protoc (decision 0012).
        if name in {"google.protobuf.runtime_version", "kvcm._pb.meta_pb2_grpc"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
import kvcm.client
"""


def test_the_client_needs_nothing_of_the_server_and_no_one_version_of_protobuf() -> None:
    subprocess.run([sys.executable, "-c", CLIENT_ONLY], check=True, cwd=ROOT)
