"""Is docs/metrics.md what a manager exports? Run by `make drift`."""

from __future__ import annotations

import sys

import gen_metrics_docs

if __name__ == "__main__":
    sys.exit(gen_metrics_docs.main(["--check"]))
