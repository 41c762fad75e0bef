"""ValkeyStore: the KVStore contract over Valkey (or Redis 7), single, cluster or by sentinels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import (
    ConfigError,
    CorruptRecord,
    InvalidArgument,
    KvcmError,
    OutcomeUnknown,
    Unavailable,
)
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Fence,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Values,
)
from kvcm.metaindex.stores.common import Turn, stale
from kvcm.metaindex.stores.valkey_routes import Request, Router, make_router
from kvcm.metaindex.stores.valkey_scripts import (
    CLAIM,
    NAMES,
    TOUCH,
    decode_claim,
    decode_fence,
    encode_commit,
    encode_fence,
    meta_key,
    shard_tag,
    space_of,
    table_key,
)
from kvcm.metaindex.stores.valkey_server import check_servers, speaks_plainly
from kvcm.metaindex.stores.valkey_url import ValkeyConfig, parse_url
from kvcm.metaindex.stores.valkey_wire import Command, is_final

_LIST_TAG = b"kvcm:shards"
_LIST_KEY = b"kvcm{kvcm:shards}"
"""The set of all shards' tags."""
_SCAN_COUNT_MIN = 128
_OUTCOMES = {ord("A"): Outcome.APPLIED, ord("C"): Outcome.CONFLICT}


class ValkeyStore:
    """A KVStore in Valkey: one script per shard commit, all shards of a call in one round trip.

    Args:
        config: a URL (see `valkey_url`), or what `parse_url` made of one.

    Raises:
        ConfigError: the URL.
    """

    read_ahead: int = 64

    def __init__(self, config: ValkeyConfig | str, *, clock: Clock | None = None) -> None:
        self._config = parse_url(config) if isinstance(config, str) else config
        self._clock: Clock = clock or SystemClock()
        self._router: Router = make_router(self._config, self._clock)
        self._closed = True
        self._listed: set[bytes] = set()

    def __repr__(self) -> str:
        return f"ValkeyStore({', '.join(map(str, self._config.addresses))})"

    async def open(self) -> None:
        """Find the servers and log in; may be called again after a failure.

        Raises:
            Unavailable: no server answers now.
            ConfigError: one refuses what will not change by itself: a password, the kind of URL.
        """
        try:
            await self._router.open()
            await check_servers(self._router.nodes, self._config)
        except KvcmError as error:
            await self.close()
            if isinstance(error, Unavailable):
                await self._raise_if_final(error)
            raise
        self._closed = False

    async def _raise_if_final(self, error: Unavailable) -> None:
        if is_final(str(error)):
            raise ConfigError(str(error)) from None
        if self._config.tls:
            # A server without TLS waits for the end of what it takes for a command.
            timeout_s = self._config.link().connect_timeout_s
            for address in self._config.addresses:
                if await speaks_plainly(address, timeout_s):
                    raise ConfigError(
                        f"index store at {address}: it speaks without TLS; the URL begins with "
                        "valkey:// then"
                    ) from None

    async def close(self) -> None:
        self._closed = True
        self._router.close()

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        self._check_open()
        requests: list[Request] = []
        for shard, keys in shard_keys:
            if keys:
                tag = shard_tag(shard)
                requests.append(Request(tag, (b"HMGET", table_key(tag, table), *keys)))
        answers = await self._router.run(requests, repeatable=True)
        self._raise_if_all_failed(answers)
        got = iter(answers)
        return [next(got) if keys else [] for _, keys in shard_keys]

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        self._check_open()
        results: list[CommitResult | None] = [None] * len(commits)
        turn = Turn(self._clock)
        waves: list[list[tuple[int, Request]]] = []
        seen: dict[ShardId, int] = {}
        for at, (shard, fence, mutations) in enumerate(
            (c.shard, c.fence, c.mutations) for c in commits
        ):
            try:
                tag = shard_tag(shard)
                request = Request(tag, encode_commit(tag, fence, mutations))
            except InvalidArgument as error:
                results[at] = CommitResult(error=error)
                continue
            # A second commit to a shard is sent when the first one has its answer: redirections
            # and repetitions could put it before the first otherwise.
            wave = seen[shard] = seen.get(shard, -1) + 1
            if wave == len(waves):
                waves.append([])
            waves[wave].append((at, request))
            if turn.is_over():
                await turn.give()
        unknown: set[bytes] = set()
        for wave_requests in waves:
            await self._commit_wave(commits, wave_requests, unknown, results)
        return [result for result in results if result is not None]

    async def _commit_wave(
        self,
        commits: Sequence[ShardCommit],
        wave: Sequence[tuple[int, Request]],
        unknown: set[bytes],
        results: list[CommitResult | None],
    ) -> None:
        sent = [(at, request) for at, request in wave if request.tag not in unknown]
        for at, request in wave:
            if request.tag in unknown:
                error = Unavailable("not sent: what became of the commit before it is unknown")
                results[at] = CommitResult(error=error)
        answers = await self._router.run([r for _, r in sent], repeatable=False)
        for (at, request), answer in zip(sent, answers, strict=True):
            result = results[at] = _commit_result(commits[at], answer)
            if isinstance(result.error, OutcomeUnknown):
                unknown.add(request.tag)

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        self._check_open()
        encoded = encode_fence(fence)
        answers: list[Claim | Exception] = []
        waves: list[list[tuple[int, bytes]]] = []
        seen: dict[ShardId, int] = {}
        for at, shard in enumerate(shards):
            try:
                tag = shard_tag(shard)
            except InvalidArgument as error:
                answers.append(error)
                continue
            answers.append(Unavailable("not claimed"))
            wave = seen[shard] = seen.get(shard, -1) + 1
            if wave == len(waves):
                waves.append([])
            waves[wave].append((at, tag))
        sizes: dict[int, dict[int, int]] = {}
        for tags in waves:
            requests = [
                Request(tag, (b"EVALSHA", NAMES[CLAIM], b"1", meta_key(tag), encoded))
                for _, tag in tags
            ]
            for (at, _), reply in zip(tags, await self._run_listed(requests), strict=True):
                answers[at], sizes[at] = _claimed(shards[at], fence, reply)
        await self._check_sizes(shards, sizes, answers)
        return answers

    async def _run_listed(self, requests: list[Request]) -> list[Any]:
        """Run claims, and put the shards on the list in the same round trip.

        A claim does not fail for the list's sake: a shard that is missing there is only invisible
        to `spaces`, and put on it by the next claim.
        """
        tags = sorted({request.tag for request in requests} - self._listed)
        listing = [Request(_LIST_TAG, (b"SADD", _LIST_KEY, *tags))] if tags else []
        answers = await self._router.run([*listing, *requests], repeatable=False)
        if tags and not isinstance(answers.pop(0), Exception):
            self._listed.update(tags)
        return answers

    async def _check_sizes(
        self,
        shards: Sequence[ShardId],
        sizes: dict[int, dict[int, int]],
        answers: list[Claim | Exception],
    ) -> None:
        """A table that the server dropped by itself (eviction) makes the claim a CorruptRecord."""
        wanted = [(at, t, n) for at, tables in sizes.items() for t, n in tables.items()]
        tags = {at: shard_tag(shards[at]) for at, _, _ in wanted}
        requests = [Request(tags[at], (b"HLEN", table_key(tags[at], t))) for at, t, _ in wanted]
        for (at, table, size), found in zip(
            wanted, await self._router.run(requests, repeatable=True), strict=True
        ):
            if isinstance(found, Exception):
                answers[at] = found
            elif found != size:
                answers[at] = _dropped(shards[at], table)

    async def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        page = max(page, 1)
        tag = shard_tag(shard)
        seen: set[bytes] = set()
        cursor = b"0"
        while True:
            self._check_open()
            count = b"%d" % max(page, _SCAN_COUNT_MIN)
            cursor, flat = await self._one(
                tag, (b"HSCAN", table_key(tag, table), cursor, b"COUNT", count)
            )
            # While a hash grows or shrinks, a record can come twice.
            fresh = [r for r in zip(flat[::2], flat[1::2], strict=True) if r[0] not in seen]
            seen.update(key for key, _ in fresh)
            for start in range(0, len(fresh), page):
                yield fresh[start : start + page]
            if cursor == b"0":
                return

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        self._check_open()
        if count <= 0:
            return []
        tag = shard_tag(shard)
        command = (b"HRANDFIELD", table_key(tag, table), b"%d" % count, b"WITHVALUES")
        flat = await self._one(tag, command)
        return list(zip(flat[::2], flat[1::2], strict=True))

    async def count(self, shard: ShardId, table: Table) -> int:
        self._check_open()
        tag = shard_tag(shard)
        return int(await self._one(tag, (b"HLEN", table_key(tag, table))))

    async def drop(self, shard: ShardId) -> None:
        self._check_open()
        tag = shard_tag(shard)
        # The fence goes last: cut short, the shard is still known and dropped again.
        keys = [*(table_key(tag, table) for table in Table), meta_key(tag)]
        for part in (keys[:-1], keys[-1:]):
            answers = await self._router.run(
                [Request(tag, (b"UNLINK", key)) for key in part], repeatable=True
            )
            _raise_first(answers)
        self._listed.discard(tag)
        await self._one(_LIST_TAG, (b"SREM", _LIST_KEY, tag))

    async def spaces(self) -> list[bytes]:
        self._check_open()
        tags: set[bytes] = set()
        cursor = b"0"
        while True:
            command = (b"SSCAN", _LIST_KEY, cursor, b"COUNT", b"1000")
            cursor, found = await self._one(_LIST_TAG, command)
            tags.update(found)
            if cursor == b"0":
                break
        # A drop that was cut short may have left a name on the list.
        by_space: dict[bytes, list[bytes]] = {}
        for tag in sorted(tags):
            by_space.setdefault(space_of(tag), []).append(tag)
        held: set[bytes] = set()
        while by_space:
            asked = [(space, tags.pop()) for space, tags in by_space.items()]
            requests = [Request(tag, (b"EXISTS", meta_key(tag))) for _, tag in asked]
            answers = await self._router.run(requests, repeatable=True)
            _raise_first(answers)
            held |= {space for (space, _), there in zip(asked, answers, strict=True) if there}
            by_space = {s: rest for s, rest in by_space.items() if rest and s not in held}
        return sorted(held)

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        self._check_open()
        replicas, timeout_ms = self._config.wait_replicas, self._config.wait_timeout_ms
        wait = (b"WAIT", b"%d" % replicas, b"%d" % timeout_ms) if replicas else None
        requests = []
        for shard in shards:
            tag = shard_tag(shard)
            command: Command
            if wait:
                command = (b"EVALSHA", NAMES[TOUCH], b"1", meta_key(tag))
            else:
                command = (b"HGET", meta_key(tag), b"n")
            requests.append(Request(tag, command, wait))
        answers = await self._router.run(requests, repeatable=True)
        return [_acknowledged(answer, replicas) for answer in answers]

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the index store in Valkey is not open")

    async def _one(self, tag: bytes, command: tuple[bytes, ...]) -> Any:
        answers = await self._router.run([Request(tag, command)], repeatable=True)
        _raise_first(answers)
        return answers[0]

    def _raise_if_all_failed(self, answers: Sequence[Any]) -> None:
        failed = [answer for answer in answers if isinstance(answer, KvcmError)]
        if failed and len(failed) == len(answers) and not self._router.is_partly_well:
            raise failed[0]


def _raise_first(answers: Sequence[Any]) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer


def _commit_result(commit: ShardCommit, answer: Any) -> CommitResult:
    if isinstance(answer, Exception):
        return CommitResult(error=answer)
    try:
        if answer[0] == 1:
            return CommitResult([_OUTCOMES[letter] for letter in answer[2]], answer[1])
        if answer[0] == 0:
            held = decode_fence(answer[1]) if answer[1] else None
            return CommitResult(error=stale(commit.shard, commit.fence, held))
    except CorruptRecord as error:
        return CommitResult(error=error)
    return CommitResult(error=_dropped(commit.shard, int(answer[1][1:])))


def _claimed(shard: ShardId, fence: Fence, answer: Any) -> tuple[Claim | Exception, dict[int, int]]:
    if isinstance(answer, Exception):
        return answer, {}
    try:
        if answer[0] == 1:
            return decode_claim(answer[1])
        if answer[0] == 0:
            return stale(shard, fence, decode_fence(answer[1])), {}
    except CorruptRecord as error:
        return error, {}
    return CorruptRecord(f"shard {shard.number} of {shard.space.hex()}: its fence is damaged"), {}


def _dropped(shard: ShardId, table: int) -> CorruptRecord:
    return CorruptRecord(
        f"shard {shard.number} of {shard.space.hex()}: records of its table "
        f"{Table(table).name} are gone; did the server evict them?"
    )


def _acknowledged(answer: Any, replicas: int) -> int | KvcmError:
    if isinstance(answer, KvcmError):
        return answer
    if not replicas:
        return int(answer or 0)
    number, copies = answer
    if not isinstance(copies, int) or copies < replicas:
        return Unavailable(f"{copies} of {replicas} replicas have the latest commits")
    return int(number)
