"""Random operations on the whole service, with faults and crashes, and what must hold meanwhile.

Everything comes from one seed. After every operation no hard limit is exceeded; after every batch,
with faults stopped, the ledger equals a full scan and the files on the storages; now and then
everything pending is let end, and nothing may be left over.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvcm.cache.api import LookupRequest
from kvcm.core.errors import (
    CapacityReached,
    InstanceNotExist,
    InvalidArgument,
    NotReady,
    SessionNotExist,
    StaleFence,
    StorageError,
)
from kvcm.core.keys import KeyBatch
from kvcm.core.types import QueryType, TrimStrategy
from kvcm.metaindex.pressure import Scope, Want
from kvcm.metaindex.store import KVStore
from kvcm.reclaimer.trash import TrashLoop
from kvcm.testing.faults import Crash, Fault, Op, at_random, no_faults, script
from tests.cache.harness import GRACE_S, Grant, Harness, file_of, payload, read_slot
from tests.reclaimer import repair_damage, space_checks
from tests.reclaimer.space_model import (
    BLOCK,
    GROUPS,
    HF3FS,
    INSTANCES,
    NFS,
    PLAIN,
    SPLIT,
    STORAGES,
    SUBSETS,
    FaultyBackend,
    Session,
    StorageFaults,
    any_capacity,
    any_group,
    chains_of,
    extent_token,
    storage_fields,
)

T = TypeVar("T")
FAULTS = (Fault.UNAVAILABLE, Fault.UNKNOWN_LOST, Fault.UNKNOWN_DONE, Fault.STALE)
BATCH = 120
DRAIN_EVERY = 6
_WATCHED_TURNS = 150
HARMLESS = {"ownerless_file", "gone_instance", "stale_row", "missing_row", "probe_leftover"}
"""What a repair run may find though nothing was damaged: failed calls and trims leave it behind."""


class SpaceMachine:
    """One service under random operations.

    Attributes:
        done: operations and events so far, by kind.
    """

    def __init__(
        self, seed: int, root: Path, *, kind: str = "memory", store: KVStore | None = None
    ):
        self.seed = seed
        self.chance = random.Random(seed)
        self.faults = StorageFaults(seed)
        self.done: Counter[str] = Counter()
        self.log: deque[str] = deque(maxlen=40)
        self.h = Harness(
            kind,
            store=store,
            root=root,
            groups=[any_group(self.chance, name) for name in GROUPS],
            storages=tuple(STORAGES),
            space=storage_fields(root, keys_per_file=3),
            timeout_max_s=60,
            turns=seed % 3,
            cache_bytes=20_000 if seed % 2 else 1 << 26,
            wrap=lambda backend: FaultyBackend(backend, self.faults),
        )
        self.limits = space_checks.Limits(self.h)
        self.chains = {name: chains_of(self.chance, 1) for name in INSTANCES}
        self.sessions: dict[str, Session] = {}
        """By the token in their addresses."""
        self.holders: dict[tuple[str, int], list[Session]] = {}
        self.open: list[Session] = []
        self.over: deque[Session] = deque(maxlen=30)
        self.tokens: set[str] = set()
        self.trims: Counter[str] = Counter()
        self.written: set[bytes] = set()
        self.left: set[str] = set()
        self.promised: deque[tuple[float, str, bytes]] = deque(maxlen=60)
        self.one_off = 1_000_000
        self.is_side_by_side = False
        self.died = False

    # ---- running -----------------------------------------------------------------------------

    async def run(self, operations: int) -> None:
        """So many operations, and a drained rest at the end."""
        try:
            await self.h.open()
            for name in INSTANCES:
                await self._register(name)
            batches = 0
            while sum(self.done.values()) < operations:
                for _ in range(BATCH):
                    await self._operation()
                await self.rest()
                batches += 1
                if batches % DRAIN_EVERY == 0:
                    await self.drained()
            await self.drained()
        except BaseException as error:
            count = sum(self.done.values())
            error.add_note(f"seed {self.seed}, operation {count}; the last: {list(self.log)}")
            raise
        finally:
            self.faults.rate = 0.0
            await self.h.close()

    async def _operation(self) -> None:
        name = self.chance.choices(_NAMES, _WEIGHTS)[0]
        self.done[name] += 1
        self.log.append(name)
        await getattr(self, f"_{name}")()
        if self.h.store._crashed:
            # A background task met it, so no call of ours saw it.
            await self.crashed()
        self.limits.check()

    @property
    def now(self) -> float:
        return self.h.clock.monotonic()

    @property
    def is_calm(self) -> bool:
        """No store fault is planned."""
        return self.h.store.plan is no_faults

    async def guarded(self, work: Awaitable[T]) -> T | None:
        """A call that may meet a fault; None when it did."""
        try:
            return await work
        except Crash:
            if self.is_side_by_side:
                # Those beside it must end before the next manager starts.
                self.died = True
            else:
                await self.crashed()
        except (NotReady, StaleFence):
            if self.is_calm:
                raise
        except StorageError:
            if not self.faults.rate:
                raise
        return None

    async def crashed(self) -> None:
        """Another manager takes over."""
        self.done["crashed"] += 1
        await self.h.crash()
        self.reborn()

    def reborn(self) -> None:
        """Time-outs begin anew."""
        for session in self.open:
            session.deadline = self.now + 60

    async def calm(self) -> None:
        """Faults stop."""
        self.h.store.plan = no_faults
        self.faults.rate = 0.0
        if self.h.store._crashed:
            await self.crashed()

    # ---- rest --------------------------------------------------------------------------------

    async def rest(self) -> None:
        """Invariant 3, and that the files are what is counted."""
        await self.calm()
        for name in STORAGES:
            await self._enable(name, True)
        await self.h.manager._writes.settled()
        await self.h.manager._removal.settled()
        # What failed is tried again after a second or so.
        await self.h.wait(6, step=2)
        found = await self._scanned()
        self._prune(found)
        await self._check_chains()
        self._check_promises()

    async def _scanned(self) -> space_checks.Scanned:
        found = await space_checks.scan(self.h)
        await self.h.check_counters()
        space_checks.check_ledger(self.h, found)
        space_checks.check_files(self.h, found, self.written, self.faults, self.left)
        self.limits.check()
        return found

    def _prune(self, found: space_checks.Scanned) -> None:
        """Forget what no record names any more: were it answered, nobody would know it."""
        stored = {e for s in found.instances.values() for e in s.extents}
        self.sessions = {t: s for t, s in self.sessions.items() if s.extent_id in stored}
        self.written &= stored
        self.open = [s for s in self.open if s.extent_id in stored]
        self.holders = {}
        for session in self.sessions.values():
            for key in session.blocks:
                self.holders.setdefault((session.uid, key), []).append(session)
        self.faults.deleted &= found.extent_of.keys()
        self.left &= found.files.keys()

    async def drained(self) -> None:
        """Invariants 5 and 7, after everything pending has ended."""
        await self.calm()
        (trash,) = (loop for loop in self.h.manager.loops if isinstance(loop, TrashLoop))
        for _ in range(2):
            trash.retry()
            await self.h.drain()
        for _ in range(100):
            if not self.limits.below_marks():
                break
            await self.h.wait(1)
        assert self.limits.below_marks() == []
        for _ in range(20):
            await self.h.drain()
            found = await self._scanned()
            # What grows too old for policy TTL meanwhile is thrown away in the last of the waiting.
            if not any(stored.trash for stored in found.instances.values()):
                break
        space_checks.check_over(found, self.left)
        self._prune(found)
        self.open.clear()
        self.done["drained"] += 1

    async def _check_chains(self) -> None:
        """A lookup finds exactly the leading blocks that serve."""
        if not all(map(self.h.backends.available, STORAGES)):
            return
        for name in PLAIN:
            chain = self.chance.choice(self.chains[name])
            before = (await self._leading(name, chain))[0]
            request = LookupRequest(name, KeyBatch.from_ints(chain), multi_storage=True)
            assert (await self.h.manager.lookup(request)).hits == before

    async def _leading(self, name: str, chain: Sequence[int]) -> tuple[int, list[bool]]:
        """How many blocks at the head of a chain serve, and which serve at all."""
        serving = [status == "SERVING" for status in await self.h.statuses(chain, name)]
        return (serving.index(False) if False in serving else len(serving)), serving

    def _check_promises(self) -> None:
        """Invariant 1: who was told an address can read it for the grace."""
        for until, uri, expected in self.promised:
            if until > self.now:
                assert read_slot(uri) == expected, f"{uri} changed under a reader"

    # ---- writing -----------------------------------------------------------------------------

    def _some_keys(self, name: str) -> list[int]:
        chance = self.chance
        kind = chance.random()
        if kind < 0.8:
            chain = chance.choice(self.chains[name])
            return chain[: chance.randint(1, len(chain))]
        if kind < 0.9:
            self.one_off += 100
            return list(range(self.one_off, self.one_off + chance.randint(1, 20)))
        return chance.sample(range(500_000, 500_020), chance.randint(1, 6))

    async def _start(self) -> None:
        await self._start_one()

    async def _start_one(self, cancel_after: int | None = None) -> None:
        name = self.chance.choice(list(INSTANCES))
        keys = self._some_keys(name)
        names = [self.chance.choice(list(SUBSETS)) for _ in keys]
        if name not in SPLIT or self.chance.random() < 0.5:
            names = []
        timeout, uid = self.chance.choice([5, 20, 30]), self.h.index(name).uid
        trims = self.trims[uid]
        call = self.h.start(keys, name, names=names, timeout=timeout)
        try:
            grant = await self.guarded(_cancelled(call, cancel_after))
        except CapacityReached as error:
            self.done[f"refused {error.reason}"] += 1
            return
        if grant is None or not grant.granted:
            return
        if grant.reason:
            self.done[f"cut {grant.reason}"] += 1
        self._granted(grant, uid, timeout, trims)

    def _granted(self, grant: Grant, uid: str, timeout: int, trims: int) -> None:
        uris = {key: place.uris for key, place in grant.by_key.items()}
        flat = [uri for of in uris.values() for uri in of.values()]
        (token,) = set(map(extent_token, flat))
        # Invariant 2, for ever.
        assert token not in self.tokens
        assert len(set(flat)) == len(flat)
        self.tokens.add(token)
        extent_id = self.h.manager.index.by_uid[uid].sessions.read(grant.session).extent_id
        assert extent_id is not None
        session = Session(grant, uid, extent_id, self.now + timeout, trims, uris)
        session.blocks = dict.fromkeys(grant.granted, "open")
        self.sessions[token] = session
        self.open.append(session)
        for key in grant.granted:
            self.holders.setdefault((uid, key), []).append(session)
        self.h.fill(grant)
        self.written.add(extent_id)

    async def _finish(self) -> None:
        if not self.open:
            return
        session = self.open.pop(self.chance.randrange(len(self.open)))
        count = len(session.grant.granted)
        kind = self.chance.random()
        if kind < 0.7:
            mask = [True] * count
        elif kind < 0.8:
            mask = [False] * count
        else:
            mask = [self.chance.random() < 0.6 for _ in range(count)]
        await self._finish_with(session, mask)

    async def _finish_again(self) -> None:
        """A client that did not see the answer."""
        if self.over:
            session = self.chance.choice(self.over)
            await self._finish_with(session, session.mask or [])

    async def _finish_with(self, session: Session, mask: list[bool]) -> None:
        session.mask = mask
        self.over.append(session)
        now_ms = int(self.h.clock.now() * 1000)
        try:
            done = await self.guarded(_done(self.h.finish(session.grant, mask)))
        except (SessionNotExist, InstanceNotExist):
            self.done["finished too late"] += 1
            return
        except InvalidArgument:
            # Its records are gone, or an earlier try with another mask took effect.
            assert "maybe" in session.blocks.values()
            return
        session.finished_ms = session.finished_ms or now_ms
        for (key, state), good in zip(list(session.blocks.items()), mask, strict=True):
            if not done:
                session.blocks[key] = state if state == "gone" else "maybe"
            elif state == "open":
                session.blocks[key] = "serving" if good else "gone"

    async def _abandon(self) -> None:
        if not self.open:
            return
        session = self.open.pop(self.chance.randrange(len(self.open)))
        grant = session.grant
        try:
            done = await self.guarded(
                _done(self.h.manager.abandon(grant.instance_id, grant.session))
            )
        except (SessionNotExist, InstanceNotExist):
            return
        if done:
            session.blocks = dict.fromkeys(session.blocks, "gone")
        else:
            session.doubt()

    async def _late_write(self) -> None:
        """A writer whose session expired goes on writing for a while."""
        late = [s for s in self.open if s.promised < self.now < s.promised + 15]
        if late:
            self.h.fill(self.chance.choice(late).grant)

    async def _burst(self) -> None:
        """Several calls side by side, with eviction between them."""
        over = False

        async def watch() -> None:
            # No longer than that: deletes wait for threads meanwhile.
            for _ in range(_WATCHED_TURNS):
                if over:
                    break
                self.limits.check()
                await asyncio.sleep(0)

        chance = self.chance
        made = [self._round()] if chance.random() < 0.7 else []
        for _ in range(chance.randint(2, 5)):
            cancel = chance.randint(0, 25) if chance.random() < 0.15 else None
            made.append(self._finish() if chance.random() < 0.3 else self._start_one(cancel))
        self.is_side_by_side = True
        watcher = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*made)
        finally:
            self.is_side_by_side = False
            over = True
        await watcher
        self.done["side by side"] += len(made)
        if self.died:
            self.died = False
            await self.crashed()

    # ---- reading -----------------------------------------------------------------------------

    async def _lookup(self) -> None:
        name = self.chance.choice(list(INSTANCES))
        keys = self._some_keys(name)
        query = self.chance.choice([QueryType.PREFIX_MATCH] * 3 + [QueryType.BATCH_GET])
        found = await self.guarded(self.h.lookup(keys, name, query=query))
        if found is None:
            return
        uid = self.h.index(name).uid
        hits = [(key, place.uris) for key, place in zip(keys, found, strict=False) if place.hit]
        for key, uris in hits:
            self._check_hit(uid, key, uris)
        for key, uris in self.chance.sample(hits, min(3, len(hits))):
            self._check_bytes(key, uris)

    def _check_hit(self, uid: str, key: int, uris: dict[str, str]) -> None:
        (token,) = set(map(extent_token, uris.values()))
        session = self.sessions.get(token)
        assert session is not None, f"{key}: an address that nobody was granted, or long gone"
        assert session.uid == uid, f"{key}: another instance's block"
        assert uris.items() <= session.uris[key].items(), f"{key}: another key's block"
        state = session.blocks[key]
        assert state in ("serving", "maybe"), f"{key} of {uid} is {state}, and served"
        # Invariant 8.
        assert session.trims == self.trims[uid], f"{key} was granted before a trim"

    def _check_bytes(self, key: int, uris: dict[str, str]) -> None:
        for spec, uri in uris.items():
            session = self.sessions[extent_token(uri)]
            expected = payload(session.grant.session, key, spec, file_of(uri)[2])
            assert read_slot(uri) == expected, f"wrong bytes for {key}"
            self.promised.append((self.now + GRACE_S, uri, expected))

    # ---- removing ----------------------------------------------------------------------------

    async def _remove(self) -> None:
        name = self.chance.choice(list(INSTANCES))
        keys, uid = self._some_keys(name), self.h.index(name).uid
        done = await self.guarded(_done(self.h.remove(keys, name)))
        for key in keys:
            for session in self.holders.get((uid, key), ()):
                if session.blocks[key] != "gone":
                    session.blocks[key] = "gone" if done else "maybe"

    async def _trim(self) -> None:
        name = self.chance.choice(list(INSTANCES))
        uid = self.h.index(name).uid
        strategy = self.chance.choice(
            [TrimStrategy.REMOVE_ALL_CACHE, TrimStrategy.TIMESTAMP, TrimStrategy.REMOVE_ALL_META]
        )
        mine = [s for s in self.sessions.values() if s.uid == uid]
        begin = int(self.h.clock.now()) - self.chance.randint(0, 60)
        end = begin + self.chance.randint(1, 40)
        if strategy is TrimStrategy.REMOVE_ALL_META:
            found = await space_checks.scan(self.h)
            stored = found.instances[uid].extents
            self.left |= {o for o, extent in found.extent_of.items() if extent in stored}
        done = await self.guarded(_done(self.h.trim(strategy, name, begin, end)))
        if strategy is TrimStrategy.TIMESTAMP:
            for session in mine:
                if begin * 1000 <= session.finished_ms < end * 1000:
                    for key, state in session.blocks.items():
                        if state != "gone":
                            session.blocks[key] = "gone" if done else "maybe"
        elif done:
            self.trims[uid] += 1
        else:
            # Whether it counts shows with the next one.
            for session in mine:
                session.doubt()

    async def _remove_instance(self) -> None:
        """The old incarnation is never seen again; the name is free at once."""
        name = self.chance.choice(list(INSTANCES))
        if await self.guarded(_done(self.h.manager.remove_instance(name, None))):
            await self._register(name)

    async def _register(self, name: str) -> None:
        groups = list(SUBSETS.items()) if name in SPLIT else []
        await self.guarded(self.h.register(name, group_name=INSTANCES[name], groups=groups))

    # ---- eviction ----------------------------------------------------------------------------

    async def _evict(self) -> None:
        """Room is wanted somewhere. Invariant 6: what survives and was found before is found."""
        if not self.is_calm:
            return
        before = {}
        for name in PLAIN:
            for chain in self.chains[name]:
                # A read that began before the calm may still end with the process.
                found = await self.guarded(self._leading(name, chain))
                if found is None:
                    return
                before[name, tuple(chain)] = found
        name = self.chance.choice(list(INSTANCES))
        group, amount = INSTANCES[name], self.chance.randint(1, 30)
        want = self.chance.choice(
            [
                Want(Scope(group), amount * BLOCK),
                Want(Scope(group, storage_type=STORAGES[NFS]), amount * BLOCK),
                Want(Scope(group, storage_type=STORAGES[HF3FS]), amount * BLOCK),
                Want(Scope(group, uid=self.h.index(name).uid), amount),
                Want(Scope(storage=self.chance.choice(list(STORAGES))), amount * BLOCK),
            ]
        )
        self.h.manager.shared.pressure.want([want])
        await self.h.rounds(2)
        for (name, keys), (leading, served) in before.items():
            now, serves = await self._leading(name, keys)
            lost = [i for i in range(leading) if serves[i] and i >= now]
            assert not lost, f"{want}: {name} {keys} {served} -> {serves}: {lost} is cut off"
            self.done["chains shortened"] += now < leading

    async def _change_group(self) -> None:
        name = self.chance.choice(GROUPS)
        await self.h.change_group(lambda old: any_group(self.chance, name, old.version), name)

    async def _change_storage(self) -> None:
        name = self.chance.choice(list(STORAGES))
        if self.chance.random() < 0.5:
            await self._enable(name, self.chance.random() < 0.5)
        else:
            config = any_capacity(self.chance, self.h.registry.view.storages[name])
            await self.h.registry.put_storage(config, expect_new=False)
        self.h.backends.follow(self.h.registry.view)

    async def _enable(self, name: str, enabled: bool) -> None:
        registry = self.h.registry
        if registry.view.storages[name].enabled != enabled:
            await registry.set_storage_enabled(name, enabled)
            self.h.backends.follow(registry.view)

    # ---- time, faults, repair ----------------------------------------------------------------

    async def _wait(self) -> None:
        seconds = self.chance.choice([0.1, 1, 1, 4, 11, 31])
        await self.guarded(self.h.wait(seconds))
        self._check_promises()

    async def _round(self) -> None:
        await self.guarded(self.h.round())

    async def _trouble(self) -> None:
        """The index store begins to fail, or works again."""
        if not self.is_calm and self.chance.random() < 0.5:
            self.h.store.plan = no_faults
            return
        rate = self.chance.choice([0.02, 0.1, 0.4])
        self.h.store.plan = at_random(self.chance.randrange(1 << 30), rate, FAULTS)

    async def _storage_trouble(self) -> None:
        self.faults.rate = self.chance.choice([0.0, 0.05, 0.3, 1.0])

    async def _doom(self) -> None:
        """The process will die at one of the next calls to the store."""
        op = self.chance.choice([Op.COMMIT, Op.COMMIT, Op.COMMIT, Op.READ, Op.CLAIM, Op.DROP])
        number = self.h.store.calls[op] + self.chance.randint(1, 30)
        fault = self.chance.choice([Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
        self.h.store.plan = script([(op, number, fault)])

    async def _crash(self) -> None:
        await self.crashed()

    async def _restart(self) -> None:
        await self.calm()
        await self.h.manager._writes.settled()
        await self.h.restart()
        self.reborn()

    async def _fsck(self) -> None:
        """Repair, where nothing was damaged: it may find what failed calls leave, no more."""
        was_calm = self.is_calm
        report = await self.guarded(
            repair_damage.run(self.h, fix=True, force=self.chance.random() < 0.5)
        )
        if report is not None and was_calm and not self.faults.deleted:
            found = repair_damage.kinds(report)
            assert found.keys() <= HARMLESS, f"repair found {found}"


async def _done(work: Awaitable[Any]) -> bool:
    await work
    return True


async def _cancelled(work: Awaitable[T], turns: int | None) -> T | None:
    """A call, cancelled after some turns of the loop unless ``turns`` is None."""
    if turns is None:
        return await work
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


_OPERATIONS = {
    "start": 260,
    "finish": 200,
    "finish_again": 10,
    "abandon": 15,
    "late_write": 8,
    "burst": 40,
    "lookup": 150,
    "remove": 25,
    "trim": 4,
    "remove_instance": 2,
    "evict": 12,
    "change_group": 12,
    "change_storage": 8,
    "wait": 60,
    "round": 120,
    "trouble": 8,
    "storage_trouble": 8,
    "doom": 5,
    "crash": 2,
    "restart": 2,
    "fsck": 2,
}
_NAMES, _WEIGHTS = list(_OPERATIONS), list(_OPERATIONS.values())
