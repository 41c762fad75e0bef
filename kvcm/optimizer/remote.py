"""The engine's view of a manager, through the client library."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.client import AsyncClient
from kvcm.core.types import QueryType, ReportKind
from kvcm.optimizer.engine import Grant, Location


class RemoteManager:
    """Calls of one instance; see `kvcm.optimizer.engine.Manager`."""

    def __init__(self, client: AsyncClient, instance: str, write_timeout_s: int) -> None:
        """``write_timeout_s`` 0 = the manager's default."""
        self._client = client
        self._instance = instance
        self._write_timeout_s = write_timeout_s

    async def lookup(self, keys: Sequence[int]) -> Sequence[Location]:
        """Locations of the longest known prefix."""
        found = await self._client.get_cache_location(self._instance, keys)
        return [location.specs for location in found.locations]

    async def find(self, keys: Sequence[int]) -> Sequence[Location]:
        """One entry a key; all URIs of a miss are empty."""
        found = await self._client.get_cache_location(
            self._instance, keys, query=QueryType.BATCH_GET
        )
        return [location.specs for location in found.locations]

    async def start(self, keys: Sequence[int]) -> Grant:
        """Begin to write what is missing."""
        grant = await self._client.start_write_cache(
            self._instance, keys, write_timeout_s=self._write_timeout_s
        )
        locations = [location.specs for location in grant.locations]
        return Grant(grant.session_id, grant.granted, locations, grant.reason)

    async def finish(self, session_id: str, success: Sequence[bool]) -> None:
        """Tell what was written."""
        await self._client.finish_write_cache(
            self._instance, session_id, list(success) if success else None
        )

    async def report(
        self, keys: Sequence[int], locations: Sequence[Location], kinds: Sequence[ReportKind]
    ) -> int:
        """Tell what could not be read."""
        answer = await self._client.report_cache_error(self._instance, keys, locations, kinds)
        return answer.accepted
