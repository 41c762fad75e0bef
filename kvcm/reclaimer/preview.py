"""What the next eviction for a limit would take, without taking it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcm.core import quota
from kvcm.core.quota import Marks
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.pressure import Scope
from kvcm.metaindex.shared import Shared
from kvcm.reclaimer.watermark import over, shares

EXTENTS_MAX = 256
"""Extents that one preview looks at."""


@dataclass(slots=True)
class Preview:
    """``planned``: bytes that must go now, or once the mark is crossed (blocks, for a key count).
    The rest describes who is first in line for it; ``complete``: these are all. ``by_uid``: bytes
    by instance."""

    planned: int
    bytes: int = 0
    blocks: int = 0
    extents: int = 0
    complete: bool = False
    by_uid: Counter[str] = field(default_factory=Counter)


def of_scope(shared: Shared, scope: Scope, marks: Marks, held: Delta) -> Preview | None:
    """For a limit of one group; None when nothing would be evicted for it.

    Args:
        held: what the scope holds.
    """
    in_blocks = scope.uid is not None
    used = held.blocks if in_blocks else held.counted
    being_written = held.open_blocks if in_blocks else held.open_bytes
    planned = over(marks, used, being_written=being_written)
    if not planned and marks.high is not None:
        planned = marks.high - marks.low
    if planned <= 0:
        return None
    preview = Preview(planned)
    _add_victims(shared, scope, planned, preview)
    preview.complete = (preview.blocks if in_blocks else preview.bytes) >= planned
    return preview


def of_storage(
    shared: Shared, config: StorageConfig, groups: Iterable[InstanceGroup]
) -> Preview | None:
    """For a storage, over the groups that would give back."""
    marks = quota.storage_marks(config)
    held = shared.ledger.storage(config.global_unique_name)
    planned = over(marks, held.counted, being_written=held.open_bytes)
    if not planned and marks.high is not None:
        planned = marks.high - marks.low
    if planned <= 0:
        return None
    preview = Preview(planned)
    for excess in shares(config, min(planned, held.counted), groups, shared.ledger):
        _add_victims(shared, excess.scope, excess.amount, preview)
    preview.complete = preview.bytes >= planned
    return preview


def _add_victims(shared: Shared, scope: Scope, planned: int, preview: Preview) -> None:
    """The leaves that are next; what they stand on follows only once they have gone."""
    order = shared.order_of(scope.group)
    found = order.coldest(
        EXTENTS_MAX, uid=scope.uid, storage_type=scope.storage_type, storage=scope.storage
    )
    for entry in found:
        if planned <= 0:
            break
        planned -= entry.held.blocks if scope.uid is not None else entry.held.counted
        preview.bytes += entry.held.counted
        preview.blocks += entry.held.blocks
        preview.extents += 1
        preview.by_uid[entry.uid] += entry.held.counted
