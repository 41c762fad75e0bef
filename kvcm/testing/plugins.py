"""Packages with entry points, as a package installer leaves them in a folder of `sys.path`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    package: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    *,
    version: str = "1.0",
) -> None:
    """Put a package into ``folder``.

    Args:
        entry_points: by group, then by name; values as ``module:object``.
        modules: source by file name.
    """
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    lines: list[str] = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, source in modules.items():
        (folder / name).write_text(source)
