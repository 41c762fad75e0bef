"""What operators see of the space that is being freed."""

from __future__ import annotations

from collections.abc import Iterable

from kvcm.reclaimer.base import Loop
from kvcm.reclaimer.lanes import StorageTrash
from kvcm.reclaimer.trash import TrashLoop
from kvcm.reclaimer.trim import Removal, TrimLoop


class SpaceControl:
    """Reports of the loops that free space, and their second chances."""

    def __init__(self, loops: Iterable[Loop]) -> None:
        by_type = {type(loop): loop for loop in loops}
        trash, trim = by_type[TrashLoop], by_type[TrimLoop]
        assert isinstance(trash, TrashLoop)
        assert isinstance(trim, TrimLoop)
        self._trash, self._trim = trash, trim

    def trash(self) -> list[StorageTrash]:
        """See ``TrashLoop.report``."""
        return self._trash.report()

    def retry(self, storage: str | None) -> int:
        """See ``TrashLoop.retry``."""
        return self._trash.retry(storage)

    def removals(self) -> list[Removal]:
        """See ``TrimLoop.removals``."""
        return self._trim.removals()
