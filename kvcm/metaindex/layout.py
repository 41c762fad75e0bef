"""Where an extent's blocks lie on its storage, and what that costs in each state (design.md §5).

An *object* is what the storage frees as one (a file of up to N slots). A slot whose block is gone
while its object still holds a live block is *dead*: neither usable nor free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.core.storage import ObjectRef, SpecSlots
from kvcm.metaindex import bits
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.records import Extent, Phase, State


def spec_slots(extent: Extent) -> list[SpecSlots]:
    """Each spec of the extent with the number of blocks that carry it."""
    return [
        SpecSlots(name, size, positions.bit_count())
        for (name, size), positions in zip(extent.specs, spec_positions(extent), strict=True)
    ]


def spec_positions(extent: Extent) -> list[int]:
    """For each spec the bit set of positions that carry it."""
    everything = bits.ones(extent.count)
    if not extent.subset_of:
        return [everything if extent.spec_sets[0] >> s & 1 else 0 for s in range(len(extent.specs))]
    by_subset = [
        bits.from_flags([b == i for b in extent.subset_of]) for i in range(len(extent.spec_sets))
    ]
    out = []
    for s in range(len(extent.specs)):
        positions = 0
        for subset, members in zip(extent.spec_sets, by_subset, strict=True):
            if subset >> s & 1:
                positions |= members
        out.append(positions)
    return out


def block_sizes(extent: Extent) -> list[int]:
    """Bytes of a block for each distinct spec subset."""
    return [
        sum(size for s, (_, size) in enumerate(extent.specs) if subset >> s & 1)
        for subset in extent.spec_sets
    ]


def live_bytes(extent: Extent, live: int) -> int:
    """Bytes of the blocks in ``live``."""
    if not extent.subset_of:
        return live.bit_count() * block_sizes(extent)[0]
    return sum(
        (live & positions).bit_count() * size
        for positions, (_, size) in zip(spec_positions(extent), extent.specs, strict=True)
    )


Shape = tuple[str, bytes, int, tuple[tuple[str, int], ...], tuple[int, ...], bytes]


def shape_of(extent: Extent) -> Shape:
    """Equal for extents whose slots are spread over objects in the same way."""
    e = extent
    return e.storage, e.descriptor, e.count, e.specs, e.spec_sets, e.subset_of


class Objects(NamedTuple):
    """How many objects, and their bytes."""

    number: int
    size: int


class Waste(NamedTuple):
    """What a set of live blocks leaves behind: dead bytes, and objects without a live block."""

    dead: int
    gone: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The objects of an extent and, for each, the positions whose blocks it holds."""

    objects: Sequence[ObjectRef]
    members: Sequence[int]

    @classmethod
    def of(cls, extent: Extent, objects: Sequence[ObjectRef]) -> Layout:
        """Map slots to positions: slot i of a spec is its i-th block that carries the spec."""
        per_spec = spec_positions(extent)
        dense = [p == bits.ones(extent.count) for p in per_spec]
        ordered = [
            [] if is_dense else list(bits.positions(p))
            for p, is_dense in zip(per_spec, dense, strict=True)
        ]
        members = []
        for obj in objects:
            if dense[obj.spec]:
                members.append(bits.ones(obj.count) << obj.first)
            else:
                positions = ordered[obj.spec][obj.first : obj.first + obj.count]
                members.append(sum(1 << p for p in positions))
        return cls(objects, members)

    def waste(self, live: int) -> Waste:
        """Dead bytes and gone objects (a bit set over ``objects``) when ``live`` blocks live."""
        if not live:
            return Waste(0, bits.ones(len(self.objects)))
        dead = 0
        gone = 0
        for i, (obj, members) in enumerate(zip(self.objects, self.members, strict=True)):
            alive = (members & live).bit_count()
            if not alive:
                gone |= 1 << i
            elif alive < obj.count:
                dead += (obj.count - alive) * (obj.size // obj.count)
        return Waste(dead, gone)

    def size_of(self, objects: int) -> int:
        """Bytes of a set of objects."""
        return sum(self.objects[i].size for i in bits.positions(objects))


def live_blocks(extent: Extent, state: State) -> int:
    """Blocks that hold their place: being written, or serving."""
    if state.phase is Phase.OPEN:
        return bits.ones(extent.count) & ~state.cancelled
    return state.serving if state.phase is Phase.SETTLED else 0


def held_by(extent: Extent, state: State) -> Delta:
    """An extent's share of the ledger in a state, without trash."""
    live = live_blocks(extent, state)
    size, count = live_bytes(extent, live), live.bit_count()
    if state.phase is Phase.OPEN:
        return Delta(open_bytes=size, dead_bytes=state.dead, open_blocks=count)
    if state.phase is Phase.SETTLED:
        return Delta(serving_bytes=size, dead_bytes=state.dead, serving_blocks=count)
    return Delta()
