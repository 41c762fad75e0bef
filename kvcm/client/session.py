"""Write sessions: ask for places, write, and finish with what really succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvcm.client import calls
from kvcm.client.call import Call
from kvcm.client.types import Location, WriteGrant
from kvcm.core.errors import InvalidArgument, KvcmError, SessionNotExist
from kvcm.core.mask import BlockMask

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcm.client.aio import AsyncCaller
    from kvcm.client.sync import SyncCaller

FINISH_ATTEMPTS = 3
"""How many time-outs a session's finish may take: a lost reply is asked for again."""


class PutSdk(Protocol):
    """What `put` needs of an SDK; `kvcm.client.file_sdk.FileSdk` is one."""

    def put_many(self, items: Sequence[tuple[str, Buffer]]) -> Sequence[KvcmError | None]:
        """Write (URI, bytes) pairs; one answer each, None = written."""


class SessionState:
    """What both kinds of session share: the grant, and what succeeded so far.

    Blocks are named by their index among the keys asked for. A block nobody reports counts as
    failed. Marking may be done from several threads.
    """

    def __init__(self, start: Call[WriteGrant]) -> None:
        self._start = start
        # The call's own message type is not known to `Call`.
        self._request: Any = start.request
        self._grant: WriteGrant | None = None
        self._positions: dict[int, int] = {}
        self._done: set[int] = set()

    @property
    def grant(self) -> WriteGrant:
        """What the manager granted.

        Raises:
            InvalidArgument: the session was not entered.
        """
        if self._grant is None:
            raise InvalidArgument("the write session has not begun: use it in a with statement")
        return self._grant

    def __len__(self) -> int:
        """Number of granted blocks."""
        return len(self.grant.locations)

    def __iter__(self) -> Iterator[tuple[int, Location]]:
        """(index among the keys, location) of every granted block, in order."""
        return zip(self.grant.granted, self.grant.locations, strict=True)

    def done(self, index: int) -> None:
        """All of this block's bytes are in place.

        Raises:
            InvalidArgument: the block was not granted.
        """
        self._check(index)
        self._done.add(index)

    def fail(self, index: int) -> None:
        """This block was not written, or not wholly; raises as `done` does."""
        self._check(index)
        self._done.discard(index)

    @property
    def succeeded(self) -> tuple[int, ...]:
        """Indexes marked done, in order."""
        return tuple(i for i in self.grant.granted if i in self._done)

    def _check(self, index: int) -> None:
        if index not in self._positions:
            # Also where the session has not begun.
            granted = len(self.grant.granted)
            raise InvalidArgument(f"block {index} is none of the {granted} granted blocks")

    def _begin(self, grant: WriteGrant) -> None:
        self._grant = grant
        self._positions = {index: j for j, index in enumerate(grant.granted)}

    def _finish_call(self) -> Call[None]:
        return calls.finish_write_cache(
            self._request.instance_id,
            self.grant.session_id,
            self._success(),
            trace_id=self._request.trace_id,
            timeout=self._start.timeout,
            attempts_of_timeout=FINISH_ATTEMPTS,
        )

    def _success(self) -> BlockMask | None:
        if not self._positions:
            return None
        flags = tuple(index in self._done for index in self.grant.granted)
        leading = BlockMask(values=flags).leading(len(flags))
        return BlockMask(values=flags) if leading is None else BlockMask(offset=leading)

    def _explain(self, failure: KvcmError) -> None:
        if isinstance(failure, SessionNotExist | InvalidArgument):
            failure.add_note(
                f"Nothing of write session {self.grant.session_id} of instance "
                f"{self._request.instance_id!r} was published. Did writing take longer than "
                "write_timeout_s?"
            )

    def _items(
        self,
        buffers: Mapping[int, Any] | Sequence[Any],
        spec_names: Sequence[str] | None,
    ) -> tuple[list[tuple[str, Buffer]], list[int]]:
        """(URI, buffer) of every spec to write, and the block each belongs to."""
        items: list[tuple[str, Buffer]] = []
        owners: list[int] = []
        for index, location in self:
            block = buffers[index]
            names = list(location.specs) if spec_names is None else spec_names
            if not isinstance(block, Mapping):
                if len(names) != 1:
                    raise InvalidArgument(
                        f"block {index} has specs {names}: its buffers must be a mapping by spec"
                    )
                block = {names[0]: block}
            for name in names:
                if name not in location.specs or name not in block:
                    raise InvalidArgument(f"block {index}: no place or no buffer for spec {name!r}")
                items.append((location.specs[name], block[name]))
                owners.append(index)
        return items, owners

    def _record(
        self, owners: Sequence[int], answers: Sequence[KvcmError | None]
    ) -> dict[int, KvcmError]:
        errors: dict[int, KvcmError] = {}
        for index, answer in zip(owners, answers, strict=True):
            if answer is not None:
                errors.setdefault(index, answer)
        for index in owners:
            if index in errors:
                self.fail(index)
            else:
                self.done(index)
        return errors


class WriteSession(SessionState):
    """A write session as a context manager; made by `Client.write`.

    Leaving the block finishes the session with the blocks marked done, also after an exception,
    which then goes on. Raises on leaving: SessionNotExist when the session had ended before
    (nothing is published), OutcomeUnknown when no reply came.
    """

    def __init__(self, client: SyncCaller, start: Call[WriteGrant]) -> None:
        super().__init__(start)
        self._client = client

    def __enter__(self) -> Self:
        self._begin(self._client.call(self._start))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._client.call(self._finish_call())
        except KvcmError as failure:
            self._explain(failure)
            if error is None:
                raise
            error.add_note(f"Finishing the write session failed as well: {failure}")

    def put(
        self,
        sdk: PutSdk,
        buffers: Mapping[int, Any] | Sequence[Any],
        *,
        spec_names: Sequence[str] | None = None,
    ) -> dict[int, KvcmError]:
        """Write all granted blocks with an SDK and mark each done or failed.

        Args:
            buffers: by index among the keys: the block's bytes, or a mapping spec name → bytes
                when it has several specs. Only granted blocks are looked up.
            spec_names: write only these specs; None = all. A block is marked done when all that
                was asked for here is written.

        Returns:
            The first error of every block that failed; empty when all went well.
        """
        items, owners = self._items(buffers, spec_names)
        return self._record(owners, sdk.put_many(items))


class AsyncWriteSession(SessionState):
    """`WriteSession` for asyncio; made by `AsyncClient.write`.

    A cancelled block finishes its session too.
    """

    def __init__(self, client: AsyncCaller, start: Call[WriteGrant]) -> None:
        super().__init__(start)
        self._client = client

    async def __aenter__(self) -> Self:
        self._begin(await self._client.call(self._start))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        finish = self._client.keep(self._client.call(self._finish_call()))
        try:
            # A second cancellation must not undo what was written.
            await asyncio.shield(finish)
        except KvcmError as failure:
            self._explain(failure)
            if error is None:
                raise
            error.add_note(f"Finishing the write session failed as well: {failure}")

    async def put(
        self,
        sdk: PutSdk,
        buffers: Mapping[int, Any] | Sequence[Any],
        *,
        spec_names: Sequence[str] | None = None,
    ) -> dict[int, KvcmError]:
        """`WriteSession.put` in a worker thread."""
        items, owners = self._items(buffers, spec_names)
        return self._record(owners, await asyncio.to_thread(sdk.put_many, items))
