"""The whole service against a plain model, in random order, with faults, crashes and jumps.

The model is exact where an outcome is determined and says "maybe" where it is not: after a call
that failed, or when the group's quota makes the reclaimer evict. Whatever it says, the invariants
of design.md §9 hold. Every granted block's bytes are really written, and every block that a lookup
answers is read back: it must hold what its own session wrote for that key and spec.

More examples: ``KVCM_MODEL_EXAMPLES=2000 KVCM_MODEL_STEPS=80 pytest tests/cache/test_model.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcm.cache.api import WireForm
from kvcm.core.errors import (
    CapacityReached,
    InstanceNotExist,
    InvalidArgument,
    NotReady,
    SessionNotExist,
    StaleFence,
)
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, ReportKind, ReportOutcome, TrimStrategy
from kvcm.metaindex.store import KVStore
from kvcm.testing.faults import Crash, Fault, Op, at_random, no_faults, script
from tests.cache.harness import (
    GRACE_S,
    SLOT,
    Grant,
    Harness,
    Location,
    file_of,
    group,
    payload,
    read_slot,
)

EXAMPLES = int(os.environ.get("KVCM_MODEL_EXAMPLES", "0"))
STEPS = int(os.environ.get("KVCM_MODEL_STEPS", "40"))
T = TypeVar("T")

FULL = frozenset({"tp0", "tp1"})
SPECS: dict[str, dict[str, frozenset[str]]] = {
    "plain": {},
    "grouped": {"one": frozenset({"tp0"}), "two": frozenset({"tp1"}), "all": FULL},
}
KEYS = st.integers(0, 15)
CHAINS = st.tuples(st.integers(0, 3), st.integers(1, 10)).map(
    lambda t: [t[0] * 4 + i for i in range(t[1])]
)
LISTS = st.one_of(CHAINS, CHAINS, st.lists(KEYS, max_size=8))
NAMES = st.sampled_from(["plain", "grouped"])
FAILED = (NotReady, StaleFence, Crash)


@dataclass
class Block:
    """One granted block: ``state`` is open, serving, gone, or maybe (any of them)."""

    key: int
    specs: frozenset[str]
    location: Location
    state: str = "open"
    finish_ms: int | None = None
    retired_at: float | None = None


@dataclass
class Session:
    """A write session as the model sees it; ``over``: open, finished, dead, maybe."""

    grant: Grant
    uid: str
    deadline: float
    timeout: int
    blocks: list[Block]
    over: str = "open"
    mask: list[bool] = field(default_factory=list)
    trimmed: bool = False
    late: bool = False
    """Past its time-out, but the store may not know yet: the next manager may give it more time."""


class Service(RuleBasedStateMachine):
    """Rules are calls and events; each is checked against the model at once."""

    store_kind = "memory"

    @initialize(evicting=st.booleans(), turns=st.sampled_from([0, 2]), small_cache=st.booleans())
    def begin(self, evicting: bool, turns: int, small_cache: bool) -> None:
        """Start a manager with two instances."""
        self.loop = asyncio.new_event_loop()
        self.evicting = evicting
        limits: dict[str, Any] = {"capacity": 40 * SLOT, "percentage": 0.7} if evicting else {}
        self.h = Harness(
            self.store_kind,
            store=self.store(),
            groups=[group(**limits)],
            timeout_max_s=60,
            turns=turns,
            cache_bytes=4000 if small_cache else 1 << 26,
            storages=("nfs_01",),
        )
        self.sessions: list[Session] = []
        self.uids: dict[str, str] = {}
        self.addresses: dict[str, tuple[str, int, str]] = {}
        self.promised: list[tuple[float, str, bytes]] = []
        self.unsure: dict[tuple[str, int], float] = {}
        self.faulty = False
        self.jumped = False
        self.run(self.h.open())
        for name in SPECS:
            self.register(name)

    def store(self) -> KVStore | None:
        """An empty store in place of ``store_kind``."""
        return None

    def run(self, work: Awaitable[T]) -> T:
        """Run one call to its end."""
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        """Simulated monotonic seconds."""
        return self.h.clock.monotonic()

    def teardown(self) -> None:
        """At the end: faults stop, everything pending ends, and nothing may be left over."""
        if not hasattr(self, "loop"):
            return
        try:
            self.calm()
            self.run(self.h.manager._writes.settled())
            self.run(self.h.drain())
            self.settle_model(drained=True)
            self.run(self.h.check_rest())
            if not self.evicting:
                for name in self.uids:
                    self.check_lookup(name, list(range(16)), QueryType.BATCH_GET)
            self.every_key_can_be_written()
            self.run(self.h.check_counters())
        finally:
            self.run(self.h.close())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def every_key_can_be_written(self) -> None:
        """No key is stuck: it is granted, or it exists and is answered."""
        for name in self.uids:
            for key in range(16):
                try:
                    grant = self.run(self.h.start([key], name))
                except CapacityReached:
                    assert self.evicting
                    return
                if not grant.granted:
                    assert self.run(self.h.hits([key], name)) == 1
                else:
                    self.h.fill(grant)
                    self.run(self.h.finish(grant))
                    assert self.run(self.h.hits([key], name)) == 1

    # ---- the model ---------------------------------------------------------------------------

    def live(self, name: str) -> list[Session]:
        """Sessions of an instance's present incarnation."""
        return [s for s in self.sessions if s.uid == self.uids.get(name)]

    def settle_model(self, *, drained: bool = False) -> None:
        """Sessions past their time-out are dead."""
        for session in self.sessions:
            late = session.deadline <= self.now
            if session.over == "open" and late:
                session.over = "dead"
                session.late = True
                self.retire(session.blocks, only="open")
            if session.over == "maybe" and (late or drained):
                # Open ones died; what was published stays, so blocks stay as they are.
                for block in session.blocks:
                    if block.state == "open":
                        block.state = "maybe"
        self.unsure = {k: t for k, t in self.unsure.items() if t > self.now}

    def retire(self, blocks: list[Block], *, only: str = "") -> None:
        """These blocks are gone now."""
        for block in blocks:
            if block.state != "gone" and (not only or block.state == only):
                block.state = "gone"
                block.retired_at = self.now

    def doubt(self, sessions: list[Session], keys: set[int] | None = None) -> None:
        """A call that touches these failed: it may have taken effect."""
        for session in sessions:
            for block in session.blocks:
                if block.state != "gone" and (keys is None or block.key in keys):
                    block.state = "maybe"

    def holders(self, name: str, key: int, wanted: frozenset[str]) -> list[Block]:
        """Blocks of a key that are not gone and carry the specs."""
        return [
            b
            for s in self.live(name)
            for b in s.blocks
            if b.key == key and b.state != "gone" and b.specs >= wanted
        ]

    # ---- events ------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1, 4, 9, 11, 30, 61]))
    def wait(self, seconds: float) -> None:
        """Time passes and the loops run."""
        self.guarded(self.h.wait(seconds), maybe=[])
        self.settle_model()
        self.looped()

    def looped(self) -> None:
        """The loops ran, and undisturbed: what is past its time-out is so in the store, too."""
        if not self.faulty:
            for session in self.sessions:
                session.late = False

    @rule(seconds=st.sampled_from([-100_000.0, -5.0, 7.0, 100_000.0]))
    def jump(self, seconds: float) -> None:
        """The wall clock is set."""
        self.h.clock.jump(seconds)
        self.jumped = True

    @rule()
    def round(self) -> None:
        """The loops run once."""
        self.settle_model()
        self.guarded(self.h.round(), maybe=[])
        self.looped()

    @rule(rate=st.sampled_from([0.02, 0.1, 0.4]), seed=st.integers(0, 1000))
    def trouble(self, rate: float, seed: int) -> None:
        """The index store begins to fail."""
        self.faulty = True
        self.h.store.plan = at_random(
            seed, rate, (Fault.UNAVAILABLE, Fault.UNKNOWN_LOST, Fault.UNKNOWN_DONE, Fault.STALE)
        )

    @rule(after=st.integers(1, 12), op=st.sampled_from([Op.COMMIT, Op.READ]), late=st.booleans())
    def doom(self, after: int, op: Op, late: bool) -> None:
        """The process will die at one of the next store calls."""
        self.faulty = True
        number = self.h.store.calls[op] + after
        fault = Fault.CRASH_AFTER if late else Fault.CRASH_BEFORE
        self.h.store.plan = script([(op, number, fault)])

    @precondition(lambda self: self.faulty)
    @rule()
    def calm(self) -> None:
        """The index store works again."""
        self.faulty = False
        self.h.store.plan = no_faults
        if self.h.store._crashed:
            # The process died under a background task, so no call of ours saw it.
            self.run(self.h.crash())
            self.reborn()
        self.settle_model()
        self.run(self.h.rounds(2))
        self.looped()

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        """Another manager takes over."""
        self.calm()
        self.run(self.h.restart() if graceful else self.h.crash())
        self.reborn()

    def reborn(self) -> None:
        """Time-outs begin anew for sessions that were still open when the manager went."""
        self.settle_model()
        for session in self.sessions:
            session.deadline = max(session.deadline, self.now + session.timeout)
            if session.late:
                session.over, session.late = "maybe", False
                for block in session.blocks:
                    block.state = "maybe"

    def expected(self, error: BaseException) -> None:
        """Only an injected fault may show."""
        assert self.faulty, f"failed without a fault: {error!r}"

    def guarded(self, work: Awaitable[T], maybe: list[Session], keys: Any = None) -> T | None:
        """A call that may meet a fault; None when it did."""
        try:
            return self.run(work)
        except FAILED as error:
            self.expected(error)
            self.doubt(maybe, keys)
            if isinstance(error, Crash):
                self.faulty = False
                self.run(self.h.crash())
                self.reborn()
            return None

    # ---- calls -------------------------------------------------------------------------------

    @rule(name=NAMES)
    def register(self, name: str) -> None:
        """Register, or register again: idempotent."""
        if self.faulty:
            return
        instance = self.run(
            self.h.register(name, groups=[(n, sorted(s)) for n, s in SPECS[name].items()])
        )
        if name in self.uids:
            assert self.uids[name] == instance.uid
        assert instance.uid not in {s.uid for s in self.sessions} or name in self.uids
        self.uids[name] = instance.uid

    @rule(name=NAMES)
    def remove_instance(self, name: str) -> None:
        """Remove; the old incarnation is never seen again."""
        if name not in self.uids:
            try:
                self.run(self.h.manager.remove_instance(name, None))
            except InstanceNotExist:
                return
            raise AssertionError("removed twice")
        self.run(self.h.manager.remove_instance(name, None))
        for session in self.live(name):
            self.retire(session.blocks)
            session.over = "dead"
        del self.uids[name]

    @rule(
        name=NAMES,
        keys=LISTS,
        timeout=st.sampled_from([0, 5, 20, 100]),
        names=st.lists(st.sampled_from(["one", "two", "all"]), min_size=16, max_size=16),
        grouped=st.booleans(),
        form=st.sampled_from(list(WireForm)),
        cancel=st.one_of(st.none(), st.integers(0, 25)),
    )
    def start(
        self,
        name: str,
        keys: list[int],
        timeout: int,
        names: list[str],
        grouped: bool,
        form: WireForm,
        cancel: int | None,
    ) -> None:
        """StartWrite, whole or cancelled after a few turns of the loop."""
        self.settle_model()
        grouped = grouped and name == "grouped"
        chosen = names[: len(keys)] if grouped else []
        wanted = [SPECS[name][n] for n in chosen] if grouped else [FULL] * len(keys)
        effective = min(timeout or 30, 60)
        call = self.h.start(keys, name, names=chosen, timeout=timeout, form=form)
        try:
            if cancel is None:
                grant = self.run(call)
            else:
                grant = self.run(_cancelled(call, cancel, self.h))
                if grant is None:
                    if self.faulty:
                        self.unsure_about(name, keys)
                    return
        except InstanceNotExist:
            assert name not in self.uids
            return
        except CapacityReached:
            assert self.evicting
            return
        except FAILED as error:
            assert self.faulty
            self.unsure_about(name, keys)
            if isinstance(error, Crash):
                self.faulty = False
                self.run(self.h.crash())
                self.reborn()
            return
        self.check_mask(name, grant, wanted)
        blocks = []
        places = iter(grant.locations)
        for key, existing, specs in zip(keys, grant.existing, wanted, strict=True):
            if existing:
                continue
            place = next(places)
            assert set(place.uris) == specs
            assert place.spec_size == len(specs)
            for spec, uri in place.uris.items():
                # Invariant 2, for ever.
                assert uri not in self.addresses
                self.addresses[uri] = (grant.session, key, spec)
            blocks.append(Block(key, specs, place))
        self.sessions.append(
            Session(grant, self.uids[name], self.now + effective, effective, blocks)
        )
        self.h.fill(grant)

    def unsure_about(self, name: str, keys: list[int]) -> None:
        """A start failed: its keys may look like being written for a while."""
        for key in keys:
            self.unsure[self.uids.get(name, ""), key] = self.now + 130

    def check_mask(self, name: str, grant: Grant, wanted: list[frozenset[str]]) -> None:
        """Masked keys exist; granted ones do not."""
        seen: set[int] = set()
        for key, existing, specs in zip(grant.keys, grant.existing, wanted, strict=True):
            sure = [b for b in self.holders(name, key, specs) if b.state in ("open", "serving")]
            possible = self.holders(name, key, specs)
            if key in seen:
                assert existing, "granted twice in one request"
            elif existing:
                unsure = (self.uids[name], key) in self.unsure
                assert possible or unsure or grant.reason, f"{key} masked, nobody has it"
            else:
                seen.add(key)
                if sure and not self.evicting and not self.faulty:
                    raise AssertionError(f"{key} granted, but it exists: {sure}")

    @rule(
        data=st.data(),
        outcome=st.sampled_from(["all", "none", "some", "short", "long", "again", "foreign"]),
    )
    def finish(self, data: st.DataObject, outcome: str) -> None:
        """FinishWrite of a random session, right or wrong, early or late."""
        if not self.sessions:
            return
        self.settle_model()
        session = data.draw(st.sampled_from(self.sessions[-8:]))
        grant, count = session.grant, len(session.blocks)
        gone = session.uid not in self.uids.values()
        mask = {
            "all": [True] * count,
            "none": [False] * count,
            "again": session.mask or [True] * count,
            "short": [True] * (count - 1),
            "long": [True] * (count + 1),
        }.get(outcome) or [bool(i % 2) for i in range(count)]
        if outcome == "foreign":
            others = [n for n, u in self.uids.items() if u != session.uid]
            if not others:
                return
            wrong = Grant(others[0], grant.keys, grant.session, grant.existing, grant.locations, "")
            try:
                self.run(self.h.finish(wrong, mask))
            except SessionNotExist:
                return
            except FAILED as error:
                # It never got to the store.
                raise AssertionError("a foreign session was looked for") from error
            raise AssertionError("another instance's session was accepted")
        right_length = len(mask) == count
        try:
            self.run(self.h.finish(grant, mask))
        except InvalidArgument:
            assert (
                not right_length
                or session.over == "maybe"
                or (session.over == "finished" and mask != session.mask)
            )
            return
        except (SessionNotExist, InstanceNotExist):
            finished_long_ago = session.over == "finished" and session.deadline <= self.now
            assert gone or session.over in ("dead", "maybe") or finished_long_ago or not count
            return
        except FAILED as error:
            self.expected(error)
            if session.over in ("open", "maybe"):
                session.over = "maybe"
                for block in session.blocks:
                    if block.state == "open":
                        block.state = "maybe"
            if isinstance(error, Crash):
                self.faulty = False
                self.run(self.h.crash())
                self.reborn()
            return
        assert not gone
        assert right_length
        if session.over == "finished":
            assert mask == session.mask or not count
            return
        if not count:
            return
        assert session.over in ("open", "maybe"), "a dead session was finished"
        session.over, session.mask = "finished", mask
        for block, good in zip(session.blocks, mask, strict=True):
            if not good or session.trimmed:
                self.retire([block])
            elif block.state in ("open", "maybe"):
                block.state = "serving" if block.state == "open" else "maybe"
                block.finish_ms = int(self.h.clock.now() * 1000)

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        """A client is gone."""
        live = [s for s in self.sessions[-8:] if s.uid in self.uids.values() and s.blocks]
        if not live:
            return
        self.settle_model()
        session = data.draw(st.sampled_from(live))
        was = session.over
        # Cancelled already, a session is over: it stays as it is, and its finish still answers OK.
        cancelled = session.trimmed or all(b.state == "gone" for b in session.blocks)
        done = self.guarded(
            self._done(self.h.manager.abandon(session.grant.instance_id, session.grant.session)),
            maybe=[session] if was != "finished" else [],
        )
        if was in ("open", "maybe"):
            if done and was == "open" and not cancelled:
                session.over = "dead"
                self.retire(session.blocks)
            else:
                session.over = "maybe"
                self.doubt([session])

    async def _done(self, work: Awaitable[Any]) -> bool:
        await work
        return True

    @rule(name=NAMES, keys=LISTS, flags=st.lists(st.booleans(), max_size=10))
    def remove(self, name: str, keys: list[int], flags: list[bool]) -> None:
        """RemoveCache; masked keys stay."""
        if name not in self.uids:
            return
        self.settle_model()
        named = {k for i, k in enumerate(keys) if i >= len(flags) or not flags[i]}
        done = self.guarded(
            self._done(self.h.remove(keys, name, BlockMask(values=flags))),
            maybe=self.live(name),
            keys=named,
        )
        if done:
            for session in self.live(name):
                self.retire([b for b in session.blocks if b.key in named])

    @rule(
        data=st.data(),
        name=NAMES,
        kind=st.sampled_from([ReportKind.CORRUPT, ReportKind.MISSING, ReportKind.UNREACHABLE]),
    )
    def report(self, data: st.DataObject, name: str, kind: ReportKind) -> None:
        """ReportCacheError about any blocks there ever were, of whatever instance."""
        self.settle_model()
        granted = [b for s in self.sessions for b in s.blocks]
        if name not in self.uids or not granted:
            return
        # The look takes a thread; what goes on beside it would meet other faults every time.
        self.run(self.h.manager._writes.settled())
        said = [granted[i] for i in data.draw(st.lists(st.integers(0, len(granted) - 1)))]
        keys, corrupt = [b.key for b in said], kind is ReportKind.CORRUPT
        outcomes = self.guarded(
            self.h.report(keys, [b.location.uris for b in said], kind, instance_id=name),
            maybe=self.live(name) if corrupt else [],
            keys=set(keys),
        )
        if outcomes is None:
            return
        mine = {id(b) for s in self.live(name) for b in s.blocks}
        # Every byte is where it was written.
        held = ReportOutcome.NOT_VERIFIED if kind is ReportKind.MISSING else ReportOutcome.ACCEPTED
        for block, outcome in zip(said, outcomes, strict=True):
            if outcome is held:
                assert id(block) in mine
                assert block.state in ("serving", "maybe"), f"{block.key} is {block.state}"
            else:
                assert outcome is ReportOutcome.STALE
                served = id(block) in mine and block.state == "serving"
                assert not served or self.evicting, f"{block.key} is served"
        if corrupt:
            self.retire([b for b, o in zip(said, outcomes, strict=True) if o is held])

    @rule(
        name=NAMES,
        strategy=st.sampled_from(
            [TrimStrategy.REMOVE_ALL_CACHE, TrimStrategy.REMOVE_ALL_CACHE, TrimStrategy.TIMESTAMP]
        ),
        span=st.tuples(st.integers(-60, 0), st.integers(1, 60)),
    )
    def trim(self, name: str, strategy: TrimStrategy, span: tuple[int, int]) -> None:
        """TrimCache."""
        if name not in self.uids:
            return
        self.settle_model()
        begin = int(self.h.clock.now()) + span[0]
        end = begin + span[1]
        live = self.live(name)
        if strategy is TrimStrategy.TIMESTAMP:
            hit = [
                b
                for s in live
                for b in s.blocks
                if b.finish_ms is not None and begin * 1000 <= b.finish_ms < end * 1000
            ]
            done = self.guarded(self._done(self.h.trim(strategy, name, begin, end)), maybe=live)
            if done:
                self.retire(hit)
            return
        done = self.guarded(self._done(self.h.trim(strategy, name)), maybe=live)
        if done:
            # Invariant 8: nothing granted before is served after.
            for session in live:
                self.retire(session.blocks)
                session.trimmed = True

    @rule(
        name=NAMES,
        keys=LISTS,
        query=st.sampled_from(
            [QueryType.PREFIX_MATCH, QueryType.BATCH_GET, QueryType.REVERSE_ROLL_SW_MATCH]
        ),
        form=st.sampled_from(list(WireForm)),
        packed=st.booleans(),
        flags=st.one_of(st.none(), st.integers(0, 6), st.lists(st.booleans(), max_size=8)),
        window=st.integers(0, 4),
        specs=st.sampled_from([(), (), ("tp0",), ("tp1",), ("tp1", "tp0")]),
    )
    def lookup(
        self,
        name: str,
        keys: list[int],
        query: QueryType,
        form: WireForm,
        packed: bool,
        flags: int | list[bool] | None,
        window: int,
        specs: tuple[str, ...],
    ) -> None:
        """GetCacheLocation in all its forms."""
        mask = None
        if isinstance(flags, int):
            mask = BlockMask(offset=flags)
        elif flags is not None:
            mask = BlockMask(values=flags)
        window = min(window, len(keys))
        self.check_lookup(
            name,
            keys,
            query,
            form=form,
            packed=packed and form is WireForm.PROTO,
            mask=mask,
            window=window,
            specs=specs,
        )

    def check_lookup(
        self,
        name: str,
        keys: list[int],
        query: QueryType,
        *,
        form: WireForm = WireForm.PROTO,
        packed: bool = False,
        mask: BlockMask | None = None,
        window: int = 0,
        specs: tuple[str, ...] = (),
    ) -> None:
        """One lookup against the model, its bytes read and compared."""
        self.settle_model()
        call = self.h.lookup(
            keys, name, query=query, form=form, packed=packed, mask=mask, sw=window, specs=specs
        )
        if name not in self.uids:
            try:
                self.run(call)
            except InstanceNotExist:
                return
            raise AssertionError("a removed instance answered")
        found = self.guarded(call, maybe=[])
        if found is None:
            return
        asked = frozenset(specs)
        if query is QueryType.PREFIX_MATCH:
            have = mask.flags(len(keys)) if mask is not None else [False] * len(keys)
            rest = [k for k, masked in zip(keys, have, strict=True) if not masked]
            assert len(found) <= len(rest)
            pairs = list(zip(rest, found, strict=False))
            assert all(x.hit for x in found)
            for key in rest[len(found) : len(found) + 1]:
                self.assert_may_miss(name, key, asked)
        else:
            assert len(found) == len(keys)
            pairs = list(zip(keys, found, strict=True))
            hits = [x.hit for x in found]
            if query is QueryType.BATCH_GET:
                for key, hit in zip(keys, hits, strict=True):
                    if not hit:
                        self.assert_may_miss(name, key, asked)
            elif any(hits):
                first = hits.index(True)
                assert hits == [first <= i < first + window for i in range(len(keys))]
                after = keys[first + window :]
                for at in range(len(after)):
                    self.assert_some_may_miss(name, keys[first + 1 + at :][:window], asked)
            elif window:
                for at in range(len(keys) - window + 1):
                    self.assert_some_may_miss(name, keys[at : at + window], asked)
        for key, place in pairs:
            if place.hit:
                self.check_hit(name, key, place, asked)

    def sure_hit(self, name: str, key: int, asked: frozenset[str]) -> bool:
        """Whether a lookup must find it."""
        if self.evicting or self.faulty:
            return False
        return any(b.state == "serving" for b in self.holders(name, key, asked))

    def assert_may_miss(self, name: str, key: int, asked: frozenset[str]) -> None:
        """A miss of this key is allowed."""
        assert not self.sure_hit(name, key, asked), f"{key} of {name} must be found"

    def assert_some_may_miss(self, name: str, keys: list[int], asked: frozenset[str]) -> None:
        """At least one of them may be missing."""
        assert not all(self.sure_hit(name, k, asked) for k in keys), f"{keys} of {name}"

    def check_hit(self, name: str, key: int, place: Location, asked: frozenset[str]) -> None:
        """Invariants 1 and 8: served by its own finished session, with its own bytes there."""
        shown = dict(place.uris)
        assert shown
        assert set(shown) >= asked
        owners = {self.addresses[u][0] for u in shown.values() if u in self.addresses}
        assert len(owners) == 1, f"{key}: addresses nobody was granted, or of several sessions"
        (owner,) = owners
        session = next(s for s in self.sessions if s.grant.session == owner)
        block = next(b for b in session.blocks if b.location.uris.items() >= shown.items())
        assert block.key == key, f"{key} was answered with the block of {block.key}"
        assert session.uid == self.uids[name], "another incarnation's block"
        assert block.state in ("serving", "maybe"), f"{key} is {block.state}, yet served"
        assert place.spec_size == len(block.specs)
        for spec, uri in shown.items():
            expected = payload(owner, key, spec, file_of(uri)[2])
            assert read_slot(uri) == expected, f"wrong bytes for {key}"
            self.promised.append((self.now + GRACE_S, uri, expected))

    @rule(name=NAMES, keys=LISTS, detail=st.integers(0, 1))
    def meta(self, name: str, keys: list[int], detail: int) -> None:
        """GetCacheMeta."""
        if name not in self.uids:
            return
        self.settle_model()
        found = self.guarded(self.h.meta(keys, name, detail=detail), maybe=[])
        if found is None:
            return
        for key, (place, meta) in zip(keys, found, strict=True):
            states = {b.state for b in self.holders(name, key, frozenset())}
            status = meta["status"].removeprefix("CLS_")
            assert place.hit == (status != "NOT_FOUND")
            if status == "SERVING":
                assert states & {"serving", "maybe"}
                self.check_hit(name, key, place, frozenset())
            elif status == "WRITING":
                lately = [
                    s
                    for s in self.live(name)
                    if s.over in ("open", "dead", "maybe") and any(b.key == key for b in s.blocks)
                ]
                assert lately or (self.uids[name], key) in self.unsure
            elif not (self.evicting or self.faulty):
                assert not states & {"serving", "open"}, f"{key} not found"

    # ---- always ------------------------------------------------------------------------------

    @invariant()
    def promised_bytes_stay_for_the_grace(self) -> None:
        """Invariant 1: who was told an address can read it for a while."""
        if not hasattr(self, "promised"):
            return
        self.promised = [p for p in self.promised if p[0] > self.now][-40:]
        for _, uri, expected in self.promised:
            assert read_slot(uri) == expected, f"{uri} changed under a reader"

    @invariant()
    def counters_are_exact_at_rest(self) -> None:
        """Invariant 3."""
        if not hasattr(self, "h") or self.faulty:
            return
        self.run(self.h.manager._writes.settled())
        if not self.h.manager.index.by_uid:
            return
        if all(i.loaded and not i.shards.doubted for i in self.h.manager.index.by_uid.values()):
            self.run(self.h.check_counters())


async def _cancelled(work: Any, turns: int, h: Harness) -> Grant | None:
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        grant: Grant = await task
    except asyncio.CancelledError:
        await h.manager._writes.settled()
        return None
    return grant


class RocksService(Service):
    """The same on RocksDB."""

    store_kind = "rocksdb"


def model_settings(examples: int) -> settings:
    """As many examples as asked for by the environment, or these."""
    return settings(
        max_examples=EXAMPLES or examples,
        stateful_step_count=STEPS,
        deadline=None,
        # To explain a failure it traces every line, and a test that runs out of time shows none.
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=list(HealthCheck),
    )


def test_service_against_the_model_in_memory() -> None:
    run_state_machine_as_test(Service, settings=model_settings(20))


def test_service_against_the_model_on_rocksdb() -> None:
    run_state_machine_as_test(RocksService, settings=model_settings(4))
