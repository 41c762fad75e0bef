from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.server import openapi

ROOT = Path(__file__).resolve().parents[2]


def exporter() -> Any:
    spec = importlib.util.spec_from_file_location(
        "export_openapi", ROOT / "tools/export_openapi.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_documents_are_what_the_code_says() -> None:
    assert exporter().main(["--check"]) == 0


def test_a_stale_document_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = exporter()
    monkeypatch.setattr(module, "API_DIR", tmp_path)
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0
    (tmp_path / "openapi.json").write_text("{}")
    assert module.main(["--check"]) == 1
    assert "openapi.json" in capsys.readouterr().out


@pytest.mark.parametrize("module", [meta_pb2, admin_pb2])
def test_every_reference_has_a_schema(module: Any) -> None:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    document = openapi.with_methods({}, service)
    schemas = document["components"]["schemas"]
    for part in json.dumps(document).split('"#/components/schemas/')[1:]:
        assert part[: part.index('"')] in schemas
    assert len(document["paths"]) == len(service.methods)
