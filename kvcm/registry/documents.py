"""Strict JSON documents: hooks for ``json.loads``, and paths for messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn


def json_path(root: str, loc: Iterable[str | int]) -> str:
    """``root`` followed by ``.key`` and ``[index]`` steps."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    return root + "".join(steps)


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``; raises ValueError for a key given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} twice in one object")
        found[key] = value
    return found


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant``; raises ValueError for NaN and the infinities."""
    raise ValueError(f"{name} is not a JSON number")
