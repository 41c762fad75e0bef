"""What the client's calls return: frozen values; nothing of protobuf shows.

Registry entities (InstanceGroup, StorageConfig, ModelDeployment, …) are those of
`kvcm.core.types`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from kvcm.core.mask import BlockMask
from kvcm.core.types import (
    LocationSpecGroup,
    LocationSpecInfo,
    ModelDeployment,
    ReportOutcome,
    StorageType,
)

_STORAGE_TYPES: dict[int | str, StorageType] = {
    **{kind.value: kind for kind in StorageType},
    "ST_UNSPECIFIED": StorageType.UNSPECIFIED,
    "ST_3FS": StorageType.HF3FS,
    "ST_MOONCAKE": StorageType.MOONCAKE,
    "ST_TAIRMEMPOOL": StorageType.TAIRMEMPOOL,
    "ST_NFS": StorageType.NFS,
    "ST_VCNS_3FS": StorageType.VCNS_HF3FS,
    "ST_PLUGIN": StorageType.PLUGIN,
}

_OUTCOMES = {int(outcome): outcome for outcome in ReportOutcome}


def storage_type(kind: int | str) -> StorageType | int:
    """The enum member of a number or a wire name.

    A number this client does not know stays as it is, an unknown name is UNSPECIFIED.
    """
    known = _STORAGE_TYPES.get(kind)
    if known is None:
        return kind if isinstance(kind, int) else StorageType.UNSPECIFIED
    return known


def report_outcome(number: int) -> ReportOutcome | int:
    """The enum member; a number this client does not know stays as it is."""
    return _OUTCOMES.get(number, number)


@dataclass(frozen=True, slots=True)
class Location:
    """Where one block lies.

    Attributes:
        type: kind of storage; a plain int when this client does not know it. UNSPECIFIED for a
            placeholder.
        specs: URI by spec name, in the instance's order; "" in a placeholder.
        spec_size: number of specs of the location, also when only some were asked for.
    """

    type: StorageType | int
    specs: Mapping[str, str]
    spec_size: int

    @property
    def found(self) -> bool:
        """False for the placeholder that stands for a miss (wire.md §4)."""
        return any(self.specs.values())


class Locations(Sequence[Location]):
    """The locations of a reply, made when looked at: replies hold thousands."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Sequence[Any]) -> None:
        """``raw``: CacheLocation messages, or objects with the same attributes."""
        self._raw = raw

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, index: int) -> Location: ...
    @overload
    def __getitem__(self, index: slice) -> Locations: ...
    def __getitem__(self, index: int | slice) -> Location | Locations:
        if isinstance(index, slice):
            return Locations(self._raw[index])
        return _location(self._raw[index])

    def __iter__(self) -> Iterator[Location]:
        return map(_location, self._raw)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return list(self) == list(other)

    # Python's own way to say that equal ones have no hash; typeshed declares a method.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Locations({list(self)!r})"

    def uris(self, spec_name: str) -> list[str]:
        """One URI of the named spec a location, "" where it is missing; quicker than a loop."""
        found: list[str] = []
        place = 0
        for raw in self._raw:
            specs = raw.location_specs
            # Specs stand at the same place in nearly every location.
            if place < len(specs) and specs[place].name == spec_name:
                found.append(specs[place].uri)
                continue
            for i, spec in enumerate(specs):
                if spec.name == spec_name:
                    place = i
                    found.append(spec.uri)
                    break
            else:
                found.append("")
        return found


def _location(raw: Any) -> Location:
    specs = {spec.name: spec.uri for spec in raw.location_specs}
    return Location(storage_type(raw.type), specs, raw.spec_size)


@dataclass(frozen=True)
class Lookup:
    """Answer of GetCacheLocation.

    For PREFIX_MATCH the locations of the matched keys that were not masked, in order; for the
    other queries one entry a key, misses being placeholders (``found`` is False).
    """

    locations: Locations

    def __len__(self) -> int:
        return len(self.locations)

    @cached_property
    def hits(self) -> int:
        """Entries that are no placeholders."""
        return sum(location.found for location in self.locations)


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """Answer of GetCacheMeta for one unmasked key; ``meta`` is the parsed JSON (wire.md §4)."""

    location: Location
    meta: Mapping[str, Any]

    @property
    def status(self) -> str:
        """CLS_SERVING, CLS_NOT_FOUND, …"""
        return str(self.meta.get("status", ""))


@dataclass(frozen=True)
class WriteGrant:
    """Answer of StartWriteCache: what this writer shall write.

    Attributes:
        session_id: write session, to be finished.
        mask: masked keys need not be written by the caller.
        locations: one a granted key, in order.
        key_count: keys asked for.
        reason: the limit that cut the grant short, or "".
    """

    session_id: str
    mask: BlockMask
    locations: Locations
    key_count: int
    reason: str = ""

    @cached_property
    def granted(self) -> tuple[int, ...]:
        """Index among the keys asked for of each location."""
        leading = self.mask.leading(self.key_count)
        if leading is not None:
            return tuple(range(leading, self.key_count))
        flags = self.mask.flags(self.key_count)
        return tuple(i for i, masked in enumerate(flags) if not masked)


@dataclass(frozen=True)
class ErrorReport:
    """Answer of ReportCacheError.

    Attributes:
        outcomes: one a reported key, in order; a plain int when this client does not know it.
    """

    outcomes: tuple[ReportOutcome | int, ...]

    def count(self, outcome: ReportOutcome) -> int:
        """Keys with that outcome."""
        return self.outcomes.count(outcome)

    @property
    def accepted(self) -> int:
        """Keys whose report had its effect."""
        return self.count(ReportOutcome.ACCEPTED)


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """One storage that an instance's blocks may lie on (wire.md §6 ``storage_configs``)."""

    type: str
    global_unique_name: str
    is_available: bool
    storage_spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer of RegisterInstance; pick the SDK by the host of a URI = ``global_unique_name``."""

    storage_configs: tuple[StorageInfo, ...]


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """A registered instance."""

    instance_id: str
    instance_group: str
    quota_group_name: str
    block_size: int
    location_spec_infos: tuple[LocationSpecInfo, ...]
    location_spec_groups: tuple[LocationSpecGroup, ...]
    model_deployment: ModelDeployment | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One value of GetMetrics."""

    name: str
    value: int | float | str | None
    tags: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Answer of GetMetrics."""

    timestamp_ms: int
    metrics: tuple[Metric, ...]
    extra_data: str


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of CheckHealth."""

    is_leader: bool
    is_health: bool
    elector_last_loop_time_ms: int


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Answer of GetManagerClusterInfo; times as the manager reports them."""

    info_updated_time: int
    self_leader_expiration_time: int
    self_node_id: str
    leader_node_id: str
