"""The trash of one instance in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping

from kvcm.metaindex.ids import EXTENT_ID_BYTES
from kvcm.metaindex.records import Trash


class TrashTable(MutableMapping[bytes, Trash]):
    """Trash by key, and which extents have any.

    ``freed`` collects the extents whose last trash went: their records may go now.
    """

    def __init__(self) -> None:
        self._all: dict[bytes, Trash] = {}
        self._per_extent: dict[bytes, int] = {}
        self.freed: deque[bytes] = deque()

    def __getitem__(self, key: bytes) -> Trash:
        return self._all[key]

    def __setitem__(self, key: bytes, trash: Trash) -> None:
        if key not in self._all:
            extent_id = trash.extent_id
            self._per_extent[extent_id] = self._per_extent.get(extent_id, 0) + 1
        self._all[key] = trash

    def __delitem__(self, key: bytes) -> None:
        del self._all[key]
        extent_id = key[:EXTENT_ID_BYTES]
        left = self._per_extent.pop(extent_id) - 1
        if left:
            self._per_extent[extent_id] = left
        else:
            self.freed.append(extent_id)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of_extent(self, extent_id: bytes) -> bool:
        """Whether bytes of the extent are still to be deleted."""
        return extent_id in self._per_extent
