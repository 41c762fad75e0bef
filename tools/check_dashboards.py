"""Are the dashboards what tools/dashboards.py says? Run by `make drift`."""

from __future__ import annotations

import sys

import gen_dashboards

if __name__ == "__main__":
    sys.exit(gen_dashboards.main(["--check"]))
