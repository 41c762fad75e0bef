"""The quota ledger: bytes and blocks by instance, group, type and storage (design.md §5).

It follows the commits of the index and never runs ahead of them, except for a StartWrite's
reservation, which is added before its commit is sent and taken back when that fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from kvcm.core.types import StorageType

_K = TypeVar("_K")


class Delta(NamedTuple):
    """A change of one cell: bytes open, serving, dead, in the trash; blocks open, serving."""

    open_bytes: int = 0
    serving_bytes: int = 0
    dead_bytes: int = 0
    trash_bytes: int = 0
    open_blocks: int = 0
    serving_blocks: int = 0

    def __add__(self, other: object) -> Delta:
        if not isinstance(other, Delta):
            return NotImplemented
        return Delta._make(map(int.__add__, self, other))

    def __neg__(self) -> Delta:
        return Delta._make(map(int.__neg__, self))

    @property
    def counted(self) -> int:
        """Bytes that quotas and watermarks count: open + serving + dead."""
        return self.open_bytes + self.serving_bytes + self.dead_bytes

    @property
    def blocks(self) -> int:
        """Locations that hold a place: open + serving."""
        return self.open_blocks + self.serving_blocks


ZERO = Delta()
_LETTERS = b"osdtOS"


def to_counters(storage: str, delta: Delta) -> dict[bytes, int]:
    """The shard counters that a commit changes."""
    name = storage.encode()
    return {bytes([_LETTERS[i]]) + name: v for i, v in enumerate(delta) if v}


def from_counters(counters: Mapping[bytes, int]) -> dict[str, Delta]:
    """Shard counters by storage name; counters of other kinds are left out."""
    cells: dict[str, list[int]] = {}
    for key, value in counters.items():
        column = _LETTERS.find(key[:1]) if key else -1
        if column >= 0:
            cells.setdefault(key[1:].decode(errors="replace"), [0] * 6)[column] += value
    return {storage: Delta(*cell) for storage, cell in cells.items()}


class Ledger:
    """Totals in memory. ``uid`` is an instance's; cells that return to zero disappear."""

    def __init__(self) -> None:
        self.instances: dict[str, dict[str, Delta]] = {}
        self.groups: dict[str, Delta] = {}
        self.group_types: dict[tuple[str, StorageType], Delta] = {}
        self.group_storages: dict[tuple[str, str], Delta] = {}
        self.storages: dict[str, Delta] = {}

    def apply(
        self, group: str, uid: str, storage: str, storage_type: StorageType, delta: Delta
    ) -> None:
        """Add one change to every total it belongs to."""
        if delta == ZERO:
            return
        _add(self.instances.setdefault(uid, {}), storage, delta)
        if not self.instances[uid]:
            del self.instances[uid]
        _add(self.groups, group, delta)
        _add(self.group_types, (group, storage_type), delta)
        _add(self.group_storages, (group, storage), delta)
        _add(self.storages, storage, delta)

    def instance(self, uid: str) -> Delta:
        """Sum over an instance's storages."""
        total = ZERO
        for cell in self.instances.get(uid, {}).values():
            total = total + cell
        return total

    def group(self, name: str) -> Delta:
        """Total of a group."""
        return self.groups.get(name, ZERO)

    def group_type(self, name: str, storage_type: StorageType) -> Delta:
        """Total of a group on one storage type."""
        return self.group_types.get((name, storage_type), ZERO)

    def group_storage(self, name: str, storage: str) -> Delta:
        """Total of a group on one storage."""
        return self.group_storages.get((name, storage), ZERO)

    def storage(self, name: str) -> Delta:
        """Total of a storage over all groups."""
        return self.storages.get(name, ZERO)


def _add(cells: dict[_K, Delta], key: _K, delta: Delta) -> None:
    total = cells.get(key, ZERO) + delta
    if total == ZERO:
        cells.pop(key, None)
    else:
        cells[key] = total
