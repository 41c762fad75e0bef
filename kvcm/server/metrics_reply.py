"""Metrics of ``/metrics`` in the form of GetMetrics (wire.md §2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import Metric


async def fill(response: Any, families: Iterable[Metric]) -> None:
    """Add every sample under its name in ``/metrics``; whole numbers as ``int_value``."""
    for family in families:
        for name, labels, value, *_ in family.samples:
            added = response.metrics.add(metric_name=name)
            if float(value).is_integer():
                added.metric_value.int_value = int(value)
            else:
                added.metric_value.float_value = float(value)
            for key, text in labels.items():
                added.metric_tags.add(tag_key=key, tag_value=text)
        await asyncio.sleep(0)
