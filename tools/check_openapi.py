"""Are the exported OpenAPI documents what the code says? Run by `make drift`."""

from __future__ import annotations

import sys

import export_openapi

if __name__ == "__main__":
    sys.exit(export_openapi.main(["--check"]))
