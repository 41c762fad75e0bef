"""A manager and a block store in a few dicts, for the engine's own rules."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.core.errors import CapacityReached, KvcmError, StorageError, Unsupported
from kvcm.core.types import ReportKind
from kvcm.optimizer.engine import Grant, Location


class DictManager:
    """Serves one instance; ``capacity`` bounds its blocks. ``forgets``: what is reported."""

    def __init__(self, specs: Sequence[str] = ("tp0",), capacity: int = 10**9) -> None:
        self.specs = tuple(specs)
        self.capacity = capacity
        self.serving: set[int] = set()
        self.open: dict[str, list[int]] = {}
        self.fail_next: list[KvcmError] = []
        self.finished: list[tuple[str, list[bool]]] = []
        self.reported: list[tuple[int, ReportKind]] = []
        self.report_error: KvcmError | None = None
        self.forgets = False

    def _maybe_fail(self) -> None:
        if self.fail_next:
            raise self.fail_next.pop(0)

    def location(self, key: int) -> Location:
        return {spec: f"file://s/{key}_{spec}?size=64" for spec in self.specs}

    async def lookup(self, keys: Sequence[int]) -> Sequence[Location]:
        self._maybe_fail()
        found = []
        for key in keys:
            if key not in self.serving:
                break
            found.append(self.location(key))
        return found

    async def start(self, keys: Sequence[int]) -> Grant:
        self._maybe_fail()
        taken = self.serving.union(*self.open.values()) if self.open else set(self.serving)
        missing = [i for i, key in enumerate(keys) if key not in taken]
        room = self.capacity - len(taken)
        granted = missing[: max(0, room)]
        if missing and not granted:
            raise CapacityReached("full", reason="QUOTA_GROUP")
        session = f"s{len(self.open) + len(self.finished)}"
        self.open[session] = [keys[i] for i in granted]
        reason = "QUOTA_GROUP" if len(granted) < len(missing) else ""
        return Grant(session, granted, [self.location(keys[i]) for i in granted], reason)

    async def finish(self, session_id: str, success: Sequence[bool]) -> None:
        self._maybe_fail()
        keys = self.open.pop(session_id)
        self.finished.append((session_id, list(success)))
        self.serving.update(key for key, ok in zip(keys, success, strict=True) if ok)

    async def report(
        self, keys: Sequence[int], locations: Sequence[Location], kinds: Sequence[ReportKind]
    ) -> int:
        if self.report_error is not None:
            raise self.report_error
        assert [self.location(key) for key in keys] == list(locations)
        self.reported += zip(keys, kinds, strict=True)
        if self.forgets:
            self.serving.difference_update(keys)
        return len(keys)


class DictStore:
    """Blocks by URI; ``refuse`` names URIs that cannot be reached, ``foreign``
    those that this engine has no SDK for."""

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        self.refuse: set[str] = set()
        self.foreign: set[str] = set()
        self.deadlines: list[float | None] = []

    def put_many(
        self, items: Sequence[tuple[str, bytes]], *, deadline_s: float | None = None
    ) -> Sequence[KvcmError | None]:
        self.deadlines.append(deadline_s)
        return [self._put(uri, data) for uri, data in items]

    def _put(self, uri: str, data: bytes) -> KvcmError | None:
        if uri in self.refuse:
            return StorageError("disk full")
        self.blocks[uri] = data
        return None

    def get_many(
        self, items: Sequence[tuple[str, None]], *, deadline_s: float | None = None
    ) -> Sequence[bytes | KvcmError | None]:
        self.deadlines.append(deadline_s)
        return [self._get(uri) for uri, _ in items]

    def _get(self, uri: str) -> bytes | KvcmError:
        if uri in self.refuse:
            return StorageError("input/output error")
        if uri in self.foreign:
            return Unsupported("no SDK")
        return self.blocks.get(uri) or StorageError("no file", reason="MISSING")
