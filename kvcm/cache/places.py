"""Where single blocks of an extent lie: their URIs, and the part of an object each one fills."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from kvcm.core.storage import ExtentName, ObjectRef
from kvcm.metaindex import bits
from kvcm.metaindex.layout import spec_positions, spec_slots
from kvcm.metaindex.ports import Addresses
from kvcm.metaindex.records import Extent

_SLOTS_AT_ONCE = 64
"""URIs that are made together; most reports are about neighbours."""


class Part(NamedTuple):
    """An object, and how many bytes it must have for a block in it to be there."""

    name: str
    size: int


class Places:
    """Places of the blocks of one extent."""

    def __init__(self, extent: Extent, owner: ExtentName, storage: Addresses) -> None:
        self._extent = extent
        self._owner = owner
        self._storage = storage
        self._specs = spec_slots(extent)
        self._positions = spec_positions(extent)
        self._by_name = {spec.name: s for s, spec in enumerate(self._specs)}
        self._dense = bits.ones(extent.count)
        self._uris: dict[tuple[int, int], list[str]] = {}
        self._objects: list[list[ObjectRef]] | None = None
        self._firsts: list[list[int]] = []

    def lies_at(self, position: int, uris: Mapping[str, str]) -> bool:
        """Whether the block at ``position`` has all these URIs, given by spec name."""
        return all(self._uri(name, position) == uri for name, uri in uris.items())

    def parts(self, position: int, spec_names: Mapping[str, str]) -> list[Part]:
        """What must be there of these specs of a block, each of which it carries.

        Raises:
            CorruptRecord: the extent's descriptor does not parse.
        """
        if self._objects is None:
            found = self._storage.objects(self._extent.descriptor, self._owner, self._specs)
            self._objects = [[o for o in found if o.spec == s] for s in range(len(self._specs))]
            self._firsts = [[o.first for o in objects] for objects in self._objects]
        parts = []
        for name in spec_names:
            s = self._by_name[name]
            slot = self._slot(s, position)
            held = self._objects[s][bisect_right(self._firsts[s], slot) - 1]
            parts.append(Part(held.name, (slot - held.first + 1) * (held.size // held.count)))
        return parts

    def _uri(self, spec_name: str, position: int) -> str | None:
        """None when the block does not carry the spec."""
        s = self._by_name.get(spec_name)
        if s is None or not self._positions[s] >> position & 1:
            return None
        slot = self._slot(s, position)
        chunk, at = divmod(slot, _SLOTS_AT_ONCE)
        uris = self._uris.get((s, chunk))
        if uris is None:
            spec, first = self._specs[s], chunk * _SLOTS_AT_ONCE
            count = min(_SLOTS_AT_ONCE, spec.slots - first)
            uris = self._storage.uris(self._extent.descriptor, self._owner, spec, first, count)
            self._uris[s, chunk] = uris
        return uris[at]

    def _slot(self, s: int, position: int) -> int:
        """Slot i of a spec is its i-th block that carries the spec."""
        carried = self._positions[s]
        return position if carried == self._dense else (carried & bits.ones(position)).bit_count()
