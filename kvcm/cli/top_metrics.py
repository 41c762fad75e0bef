"""Samples out of Prometheus' text format, as far as ``kvcm top`` needs it. Pure.

A manager writes this form more cheaply than GetMetrics' answer, and prometheus-client is not in a
base install.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from kvcm.client.types import Metric

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)(?: \S+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def samples(text: str, names: Container[str]) -> Iterator[Metric]:
    """Those of these names; lines that are none are left out."""
    for line in text.split("\n"):
        # Most lines are of histograms nobody asked for.
        if line.partition("{")[0].partition(" ")[0] not in names:
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        labels = _LABEL.findall(match["labels"] or "")
        tags = {name: _ESCAPED.sub(_unescaped, value) for name, value in labels}
        try:
            yield Metric(match["name"], float(match["value"]), tags)
        except ValueError:
            continue


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
