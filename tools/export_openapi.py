"""Exports the HTTP interface of both ports to api/.

    python tools/export_openapi.py           write the documents
    python tools/export_openapi.py --check   exit 1, naming the files, when they differ

Two documents, since the two services share method names: api/openapi.json is the meta port's,
api/openapi.admin.json the admin port's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import cast

from kvcm.cache.api import UsageReport
from kvcm.observability.ceiling import Ceilings
from kvcm.observability.trace_events import TraceEvents
from kvcm.reclaimer.repair import Repair
from kvcm.reclaimer.repair_scope import RepairPorts
from kvcm.reclaimer.space import SpaceControl
from kvcm.server.http_routes import Sources, build_app
from kvcm.server.lifecycle import ADMIN, ADMIN_TITLE, META, META_TITLE

API_DIR = Path(__file__).resolve().parent.parent / "api"


def documents() -> dict[Path, str]:
    """The documents by path."""
    plain = Sources(ready=lambda: True, error_body=str.encode)
    admin = Sources(
        ready=lambda: True,
        error_body=str.encode,
        usage=UsageReport,
        metrics=_nothing,
        # Never run: only their routes are described.
        repair=Repair(cast(RepairPorts, None)),
        space=cast(SpaceControl, object()),
        ceilings=cast(Ceilings, object()),
        events=cast(TraceEvents, object()),
    )
    return {
        API_DIR / "openapi.json": _text(build_app(META_TITLE, META, plain).openapi()),
        API_DIR / "openapi.admin.json": _text(build_app(ADMIN_TITLE, ADMIN, admin).openapi()),
    }


async def _nothing() -> bytes:
    return b""


def _text(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check: bool = parser.parse_args(arguments).check
    stale = []
    for path, text in documents().items():
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(f"api/ is not what the code says: {', '.join(stale)}; run tools/export_openapi.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
