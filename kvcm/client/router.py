"""One SDK for all storages: each block goes to the SDK of the storage that its URI names.

A manager answers with locations on whatever storages it chose. `Transfers` takes them all: it
groups the blocks of a call by storage, moves the groups at the same time, and answers position by
position. SDKs are made when a storage is first met. Blocks are never copied here: SDKs get the
caller's own buffers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvcm.client.file_sdk import SCHEMES as FILE_SCHEMES
from kvcm.client.file_sdk import FileSdk
from kvcm.client.memory_sdk import MemorySdk
from kvcm.client.transfer import (
    DEADLINE,
    GetResult,
    PutResult,
    StorageSpec,
    TransferSdk,
    storage_specs,
)
from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import (
    InternalError,
    InvalidArgument,
    KvcmError,
    StorageError,
    Unavailable,
    Unsupported,
)
from kvcm.core.uri import parse_uri

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcm.client.types import StorageInfo

SdkFactory: TypeAlias = Callable[[str, Mapping[str, Any] | None], TransferSdk]
"""Makes the SDK of one storage from its name and its fields, None when they are not known here.
Raises KvcmError; then the blocks get that error, and the next call tries again."""

_PLACE = re.compile(r"([a-z][a-z0-9_]*)://([A-Za-z0-9_.-]+)/", re.ASCII)
_NO_URI = "\0"
_GRACE_S = 0.5
"""Past the deadline, for transfers under way to end."""
_STUCK_MAX = 4
"""Calls left behind in one storage, until others are no longer tried."""


class Place(NamedTuple):
    """Where a group of blocks lies: ``scheme://storage``."""

    scheme: str
    storage: str


class Moved(NamedTuple):
    """What became of the blocks that one call moved to or from one storage."""

    place: Place
    is_put: bool
    blocks: int
    failed: int
    seconds: float


def place_of(uri: str) -> Place:
    """Scheme and storage that a location URI names.

    Raises:
        InvalidArgument: it names none.
    """
    match = _PLACE.match(uri)
    if match is not None:
        return Place(match[1], match[2])
    parsed = parse_uri(uri)
    return Place(parsed.scheme, parsed.storage)


class Transfers(TransferSdk):
    """Reads and writes blocks on every storage. Safe to share between threads.

    The groups of a call run at the same time, each under the call's whole deadline. A storage that
    hangs is left behind half a second after it: its blocks are answered with Unavailable, whatever
    becomes of them. Only a read into the caller's buffers is always waited for, since they are in
    use; and without a deadline everything is.
    """

    def __init__(
        self,
        storages: str | Sequence[StorageInfo] = "",
        *,
        mooncake: Mapping[str, Mapping[str, Any]] | None = None,
        segment_bytes: int = 0,
        fsync: bool = False,
        clock: Clock | None = None,
        observe: Callable[[Moved], None] = lambda moved: None,
    ) -> None:
        """
        Args:
            storages: ``storage_configs`` of the answer to RegisterInstance, parsed or as JSON: all
                that the SDKs need to know.
            mooncake: fields of Mooncake storages by storage name, such as
                ``{"mc_01": {"master_service_entry": "10.0.0.1:50051"}}``; they come before those of
                ``storages``.
            segment_bytes: memory that this process lends to each Mooncake store.
            fsync: file storages: a put answers only after its bytes reached the disk.
            observe: called once a storage and call, by the caller's thread.

        Raises:
            InvalidArgument: ``storages`` does not parse.
        """
        self._clock = clock or SystemClock()
        self._observe = observe
        self._specs: dict[str, StorageSpec] = {}
        self._sdks: dict[Place, TransferSdk] = {}
        self._replaced: list[TransferSdk] = []
        self._announced: list[Buffer] = []
        self._stuck: dict[Place, int] = {}
        self._is_closed = False
        self._lock = threading.Lock()
        self._factories: dict[str, SdkFactory] = {}
        for scheme in FILE_SCHEMES:
            self.register(scheme, lambda name, fields: FileSdk(fsync=fsync, clock=self._clock))
        self.register("memory", lambda name, fields: MemorySdk())
        self.register("mooncake", _mooncake_factory(segment_bytes, self._clock))
        self.configure(storages)
        for name, fields in (mooncake or {}).items():
            self._specs[name] = StorageSpec("mooncake", dict(fields))

    def register(self, scheme: str, factory: SdkFactory) -> None:
        """Use ``factory`` for the storages of a scheme that are met from now on.

        An SDK gets all blocks of its storage in one call, with the buffers that the caller gave;
        with `TransferSdk.announce` it learns of memory in advance, as one-sided reads need it.
        """
        with self._lock:
            self._factories[scheme] = factory

    def configure(self, storages: str | Sequence[StorageInfo]) -> None:
        """Take over what another answer to RegisterInstance says of the storages.

        Raises:
            InvalidArgument: it does not parse; nothing has changed.
        """
        specs = storage_specs(storages)
        with self._lock:
            changed = {name for name, spec in specs.items() if self._specs.get(name, spec) != spec}
            # Calls may be under way: what is replaced is closed with all the others.
            for place in [place for place in self._sdks if place.storage in changed]:
                self._replaced.append(self._sdks.pop(place))
            self._specs.update(specs)

    def put_many(
        self, items: Sequence[tuple[str, Buffer]], *, deadline_s: float | None = None
    ) -> list[PutResult]:
        """Write blocks.

        Args:
            items: (location URI, contiguous buffer of exactly the URI's ``size`` bytes).
            deadline_s: seconds from now after which no further transfer is begun, and a storage
                that hangs is left behind. What was left may still read the buffers.

        Returns:
            One answer an item: None = written; otherwise its SDK's error, InvalidArgument (no
            URI, or a storage without configuration) or Unsupported (a scheme without SDK).
        """
        return self._route(
            items, deadline_s, True, lambda sdk, part: sdk.put_many(part, deadline_s=deadline_s)
        )

    def get_many(
        self, items: Sequence[tuple[str, Buffer | None]], *, deadline_s: float | None = None
    ) -> list[GetResult]:
        """Read blocks.

        Args:
            items: (location URI, writable contiguous buffer of exactly the URI's ``size`` bytes,
                or None to get new ``bytes``).
            deadline_s: as in ``put_many``.

        Returns:
            One answer an item: the bytes, or None when they are in the buffer given; otherwise an
            error as in ``put_many``. After an error the content of the buffer is undefined.
        """
        return self._route(
            items, deadline_s, False, lambda sdk, part: sdk.get_many(part, deadline_s=deadline_s)
        )

    def announce(self, buffer: Buffer) -> None:
        """See `TransferSdk.announce`; SDKs that are made later learn of it too."""
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise InvalidArgument("memory to announce must be writable and contiguous")
        with self._lock:
            self._announced.append(buffer)
            sdks = list(self._sdks.values())
        for sdk in sdks:
            sdk.announce(buffer)

    def close(self) -> None:
        """Close all SDKs; later calls answer Unavailable. Idempotent."""
        with self._lock:
            self._is_closed = True
            sdks = list(self._replaced)
            # Where a call hangs, closing would hang as well.
            sdks += [sdk for place, sdk in self._sdks.items() if not self._stuck.get(place)]
            self._sdks.clear()
            self._replaced.clear()
        for sdk in sdks:
            sdk.close()

    def _route(
        self,
        items: Sequence[Any],
        deadline_s: float | None,
        is_put: bool,
        call: Callable[[TransferSdk, Any], list[Any]],
    ) -> list[Any]:
        answers: list[Any] = [None] * len(items)
        end = None if deadline_s is None else self._clock.monotonic() + deadline_s
        moves = [
            _Move(place, positions, _picked(items, positions))
            for place, positions in _grouped(items, answers).items()
        ]
        threads: list[tuple[_Move, threading.Thread]] = []
        try:
            for move in moves:
                move.may_be_left = end is not None and (is_put or not move.has_buffers)
                if move is moves[-1] and not move.may_be_left:
                    self._run(move, call)
                elif not (move.may_be_left and self._is_stuck(move)):
                    thread = threading.Thread(target=self._run, args=(move, call), daemon=True)
                    thread.start()
                    threads.append((move, thread))
        finally:
            for move, thread in threads:
                self._wait(move, thread, end)
        for move in moves:
            failed = 0
            for position, answer in zip(move.positions, move.answers, strict=True):
                answers[position] = answer
                failed += isinstance(answer, KvcmError)
            self._observe(Moved(move.place, is_put, len(move.items), failed, move.seconds))
        return answers

    def _run(self, move: _Move, call: Callable[[TransferSdk, Any], list[Any]]) -> None:
        begun = self._clock.monotonic()
        try:
            answers = call(self._sdk(move.place), move.items)
            if len(answers) != len(move.items):
                raise InternalError(
                    f"the SDK of {move.place.scheme!r} gave {len(answers)} answers for "
                    f"{len(move.items)} blocks"
                )
        except KvcmError as error:
            answers = [error] * len(move.items)
        except Exception as error:  # a registered SDK's fault must not lose the others' answers
            text = f"storage {move.place.storage}: {type(error).__name__}: {error}"
            answers = [StorageError(text)] * len(move.items)
        with self._lock:
            if move.was_left:
                self._stuck[move.place] -= 1
            else:
                move.answers = answers
                move.seconds = self._clock.monotonic() - begun

    def _wait(self, move: _Move, thread: threading.Thread, end: float | None) -> None:
        """Until it has ended; one that may be left, until somewhat past the deadline."""
        if end is None or not move.may_be_left:
            thread.join()
            return
        begun = self._clock.monotonic()
        thread.join(max(0.0, end - begun) + _GRACE_S)
        with self._lock:
            if not move.answers:
                move.was_left = True
                self._stuck[move.place] = self._stuck.get(move.place, 0) + 1
                move.give_up("has not answered by the deadline")
                move.seconds = self._clock.monotonic() - begun

    def _is_stuck(self, move: _Move) -> bool:
        """Whether so many calls were left there that another one would only be one more."""
        with self._lock:
            if self._stuck.get(move.place, 0) < _STUCK_MAX:
                return False
        move.give_up(f"holds {_STUCK_MAX} calls that have not come back")
        return True

    def _sdk(self, place: Place) -> TransferSdk:
        sdk = self._sdks.get(place)
        if sdk is not None:
            return sdk
        with self._lock:
            if self._is_closed:
                raise Unavailable(f"storage {place.storage}: the SDK is closed")
            sdk = self._sdks.get(place)
            if sdk is None:
                sdk = self._made(place)
                self._sdks[place] = sdk
            return sdk

    def _made(self, place: Place) -> TransferSdk:
        factory = self._factories.get(place.scheme)
        if factory is None:
            raise Unsupported(
                f"storage {place.storage!r}: there is no SDK for the scheme {place.scheme!r}, "
                f"only for {', '.join(sorted(self._factories))}"
            )
        spec = self._specs.get(place.storage)
        is_known = spec is not None and spec.type == place.scheme
        sdk = factory(place.storage, spec.fields if is_known and spec is not None else None)
        for buffer in self._announced:
            sdk.announce(buffer)
        return sdk


class _Move:
    """The blocks of a call that lie on one storage."""

    def __init__(self, place: Place, positions: Sequence[int], items: Sequence[Any]) -> None:
        self.place = place
        self.positions = positions
        self.items = items
        self.answers: list[Any] = []
        self.seconds = 0.0
        self.may_be_left = False
        self.was_left = False

    @property
    def has_buffers(self) -> bool:
        """Whether any block comes from or goes to the caller's memory."""
        return any(buffer is not None for _, buffer in self.items)

    def give_up(self, why: str) -> None:
        """Answer all blocks; a late answer of the SDK does not count any more."""
        error = Unavailable(f"storage {self.place.storage} {why}", reason=DEADLINE)
        self.answers = [error] * len(self.items)


def _picked(items: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    return items if len(positions) == len(items) else [items[i] for i in positions]


def _grouped(items: Sequence[tuple[str, Any]], answers: list[Any]) -> dict[Place, list[int]]:
    """Positions by place; those without one get their error."""
    groups: dict[Place, list[int]] = {}
    prefix, positions = _NO_URI, list[int]()
    for position, (uri, _) in enumerate(items):
        if not uri.startswith(prefix):
            try:
                place = place_of(uri)
            except InvalidArgument as error:
                answers[position] = error
                continue
            prefix = f"{place.scheme}://{place.storage}/"
            positions = groups.setdefault(place, [])
        positions.append(position)
    return groups


def _mooncake_factory(segment_bytes: int, clock: Clock) -> SdkFactory:
    def made(storage: str, fields: Mapping[str, Any] | None) -> TransferSdk:
        # Only here: engines without Mooncake storages do not load what it takes.
        from kvcm.client.mooncake_sdk import MooncakeSdk
        from kvcm.core.mooncake import check_spec

        if fields is None:
            raise InvalidArgument(f"storage {storage!r} has no Mooncake configuration here")
        spec = check_spec(fields)
        return MooncakeSdk({storage: spec}, segment_bytes=segment_bytes, clock=clock)

    return made
