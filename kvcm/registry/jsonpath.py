"""Paths inside documents, for messages."""

from __future__ import annotations

from collections.abc import Iterable


def json_path(root: str, loc: Iterable[str | int]) -> str:
    """``root`` followed by ``.key`` and ``[index]`` steps."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return root + "".join(steps)
