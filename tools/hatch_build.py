"""Hatch hook: wheels carry the registry's migrations.

A plain `force-include` would also copy them into editable installs, where the copy goes
stale at the first edit; there the repository's own folder is used.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class MigrationsHook(BuildHookInterface[BuilderConfig]):
    """Adds `migrations/` as `kvcm/registry/migrations` to standard wheels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["migrations"] = "kvcm/registry/migrations"
