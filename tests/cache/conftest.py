"""Fixtures of the tests of the cache service in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cache.harness import Harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A manager with a group ``default`` without limits and instance ``i1`` (specs tp0, tp1)."""
    made = await Harness(root=tmp_path).open()
    await made.register()
    yield made
    await made.close()
