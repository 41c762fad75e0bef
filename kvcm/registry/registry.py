"""The registry: groups, instances, storages and accounts in SQL, published as immutable views."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, SQLAlchemyError

from kvcm.core import limits
from kvcm.core.clock import Clock
from kvcm.core.errors import (
    ConfigError,
    InternalError,
    NotReady,
    OutcomeUnknown,
    Unavailable,
)
from kvcm.core.types import Account, AccountRole, Instance, InstanceGroup, StorageConfig
from kvcm.registry import accounts, database, migrate, rules, snapshot, validate
from kvcm.registry.state import Draft, RegistryState, load_state
from kvcm.registry.tables import STATE
from kvcm.registry.view import RegistryView
from kvcm.registry.worker import SqlWorker

T = TypeVar("T")
R = TypeVar("R")
Subscriber = Callable[[RegistryView], None]

_LOG = logging.getLogger(__name__)
_SECRET_BYTES = 32
_CLUSTER_UID_CHARS = 8
_OUR_FAULT = (DataError, IntegrityError, ProgrammingError)
"""Refused for what we sent, or for rights that we lack; anything else is an outage."""


class _Transaction:
    """An open transaction that knows whether its commit was begun."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.committing = False

    def commit(self) -> None:
        self.committing = True
        self.connection.commit()


class Registry:
    """Entities of one cluster. Every method is one transaction; then ``view`` is replaced whole.

    All methods are called from one event loop; SQL runs in a thread of its own, one change after
    the other. A change that was begun takes effect and is published even when its caller is
    cancelled. Several managers may share a database: each change re-reads what others have
    changed, inside its transaction. Besides the errors each method names, all raise

    * NotReady: not open;
    * Unavailable: the database could not be reached or written; nothing was changed;
    * OutcomeUnknown: the commit failed half-way; look before you repeat.
    """

    def __init__(
        self,
        url: str,
        clock: Clock,
        *,
        auto_migrate: bool | None = None,
        shards_max: int = limits.SHARDS_MAX_DEFAULT,
    ) -> None:
        """
        Args:
            url: ``sqlite:///path``, or ``postgresql://…``.
            clock: source of time and randomness.
            auto_migrate: bring an older schema up to date on open; by default for SQLite only.
            shards_max: most shards of a new instance, a power of two, 16 to 1,024.

        Raises:
            ConfigError: a bad URL or ``shards_max``.
        """
        embedded = database.is_embedded(url)
        legal = limits.SHARDS_MIN <= shards_max <= limits.SHARDS_MAX
        if not legal or shards_max & (shards_max - 1):
            raise ConfigError(
                f"shards_max is {shards_max}, must be a power of two within "
                f"{limits.SHARDS_MIN}..{limits.SHARDS_MAX}"
            )
        self._url = url
        self._clock = clock
        self._auto_migrate = embedded if auto_migrate is None else auto_migrate
        self._shards_max = shards_max
        self._worker = SqlWorker()
        self._subscribers: list[Subscriber] = []
        self._view: RegistryView | None = None
        self._published: RegistryState | None = None
        self._is_open = False
        # Below: touched by the worker thread only.
        self._engine: Engine | None = None
        self._state: RegistryState | None = None
        self._decoy_hash = ""

    # -- life cycle

    async def open(self) -> None:
        """Creates, migrates or checks the schema, and loads the view.

        Raises:
            ConfigError: the database cannot be opened, or its schema is not ours.
            Unavailable: its server is away; call again.
            CorruptRecord: a stored entity does not parse.
        """
        self._worker.start()
        try:
            await self._worker.submit(self._open, self._publish)
        except BaseException:
            # Cancelled, too: the thread must not outlive a registry that did not open.
            await self.close()
            raise
        self._is_open = True

    async def close(self) -> None:
        """Waits for the changes begun and lets go of the database. The last view stays readable."""
        self._is_open = False
        if self._worker.running:
            done = self._worker.submit(self._dispose)
            self._worker.stop()
            await done

    @property
    def view(self) -> RegistryView:
        """The current snapshot; take one reference a request. Raises NotReady before ``open``."""
        if self._view is None:
            raise NotReady("the registry is not open")
        return self._view

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Calls ``callback`` on the loop with each view published from now on; returns its undo."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    async def refresh(self) -> RegistryView:
        """Publishes what other managers have changed meanwhile, if anything."""
        await self._read(lambda draft: None)
        return self.view

    async def next_epoch(self) -> int:
        """A number, 1 or more, greater than all given before; durable before it is returned."""
        self._check_open()
        return await self._submit(self._next_epoch)

    async def bootstrap(
        self, storages: Iterable[StorageConfig], groups: Iterable[InstanceGroup]
    ) -> bool:
        """First contents, unless the registry has or once had any; whether they were created.

        The first call leaves a marker: what is deleted later does not come back at a restart.

        Raises:
            InvalidArgument, DuplicateEntity: nothing is created, no marker is left.
        """
        wanted = (tuple(storages), tuple(groups))
        return await self._change(lambda draft: rules.bootstrap(draft, *wanted))

    # -- storages

    async def put_storage(self, config: StorageConfig, *, expect_new: bool) -> StorageConfig:
        """Adds a storage, or updates one; returns it as stored.

        An update leaves ``enabled`` and additions it does not mention as they are.

        Raises:
            InvalidArgument: a wrong field.
            DuplicateEntity: ``expect_new`` and the name is taken, whatever the data.
            EntityNotExist: not ``expect_new`` and there is none.
        """
        return await self._change(
            lambda draft: rules.put_storage(draft, config, expect_new=expect_new)
        )

    async def set_storage_enabled(self, name: str, enabled: bool) -> StorageConfig:
        """Raises EntityNotExist."""
        return await self._change(lambda draft: rules.set_storage_enabled(draft, name, enabled))

    async def remove_storage(self, name: str) -> StorageConfig:
        """Removes it; that no blocks live there is for the caller to see to.

        Raises:
            EntityNotExist.
        """
        return await self._change(lambda draft: rules.remove_storage(draft, name))

    # -- groups

    async def create_group(self, group: InstanceGroup) -> InstanceGroup:
        """Raises InvalidArgument, DuplicateEntity."""
        return await self._change(lambda draft: rules.create_group(draft, group))

    async def update_group(self, group: InstanceGroup, current_version: int) -> InstanceGroup:
        """Replaces a group; additions it does not mention are kept. Returns it as stored.

        Raises:
            VersionConflict: ``current_version`` is not the stored version.
            InvalidArgument: a wrong field, or a version that is not above the stored one.
            EntityNotExist.
        """
        return await self._change(lambda draft: rules.update_group(draft, group, current_version))

    async def remove_group(self, name: str, *, force: bool = False) -> tuple[Instance, ...]:
        """Removes a group; with ``force`` its instances too, which are returned, closing.

        Raises:
            InvalidArgument: it has instances, which are named.
            EntityNotExist.
        """
        return await self._change(lambda draft: rules.remove_group(draft, name, force=force))

    # -- instances

    async def register_instance(self, wanted: Instance) -> Instance:
        """The stored instance, new or present with equal data (wire.md §7).

        ``uid``, ``shard_count``, ``trim``, ``closing`` and ``registered_at`` of ``wanted`` do not
        matter.

        Raises:
            InvalidArgument: a wrong field, which is named.
            EntityNotExist: unknown group.
            DuplicateEntity: present with other data; names the instance and the differing fields.
            CapacityReached: the group has its max_instance_count.
        """
        return await self._change(
            lambda draft: rules.register_instance(draft, wanted, self._clock, self._shards_max)
        )

    async def raise_trim(self, instance_uid: str) -> int:
        """Declares all extents so far dead; the new trim number, published before it returns.

        Raises:
            InstanceNotExist: no live instance has this uid.
        """
        return await self._change(lambda draft: rules.raise_trim(draft, instance_uid))

    async def close_instance(self, instance_id: str, group: str | None = None) -> Instance:
        """Removes an instance: its id is free at once, its record stays until it is forgotten.

        Args:
            instance_id: which.
            group: when given and not empty, must be the instance's group.

        Raises:
            InstanceNotExist.
        """
        return await self._change(lambda draft: rules.close_instance(draft, instance_id, group))

    async def forget_instance(self, instance_uid: str) -> None:
        """Drops a closing instance after its space was freed; may be repeated.

        Raises:
            InvalidArgument: it is live.
        """
        await self._change(lambda draft: rules.forget_instance(draft, instance_uid))

    # -- accounts

    async def add_account(self, name: str, password: str, role: AccountRole) -> Account:
        """Raises InvalidArgument, DuplicateEntity."""
        validate.check_account(name, password)

        self._check_open()
        hashed = await self._worker.submit(lambda: accounts.hash_password(password, self._clock))
        await self._change(lambda draft: rules.add_account(draft, name, hashed, role))
        return Account(user_name=name, role=role)

    async def delete_account(self, name: str) -> None:
        """Raises EntityNotExist."""
        await self._change(lambda draft: rules.delete_account(draft, name))

    async def list_accounts(self) -> list[Account]:
        """All accounts, by name."""
        return await self._read(
            lambda draft: [draft.accounts[name].shown() for name in sorted(draft.accounts)]
        )

    async def verify_password(self, name: str, password: str) -> Account | None:
        """The account, when the password is right; an unknown name takes as long as a wrong one."""
        stored = await self._read(lambda draft: draft.accounts.get(name))

        def verify() -> bool:
            return accounts.matches(stored.password_hash if stored else self._decoy(), password)

        matched = await self._worker.submit(verify)
        return stored.shown() if stored is not None and matched else None

    # -- snapshots

    async def export_snapshot(self, *, with_hashes: bool = True) -> str:
        """The whole registry as JSON; see ``kvcm.registry.snapshot`` for its form.

        With ``with_hashes`` it holds the password hashes of the accounts: keep it as you keep
        those. It never holds the cluster's secret.
        """
        return await self._read(lambda draft: snapshot.export(draft, with_hashes=with_hashes))

    async def load_snapshot(self, text: str, busy_uids: Iterable[str] = ()) -> None:
        """Replaces the registry by a snapshot, wholly or not at all.

        Args:
            text: what ``export_snapshot`` gave.
            busy_uids: uids of the instances that hold blocks.

        Raises:
            InvalidArgument: a bad document (the path in it is named), or one that would drop
                an instance that holds blocks (named).
        """
        document = snapshot.parse(text)
        busy = frozenset(busy_uids)
        await self._change(
            lambda draft: snapshot.replace_all(draft, document, busy, self._clock, self._shards_max)
        )

    # -- on the loop

    def _check_open(self) -> None:
        if not self._is_open:
            raise NotReady("the registry is not open")

    async def _change(self, rule: Callable[[Draft], T]) -> T:
        return await self._run(rule, write=True)

    async def _read(self, rule: Callable[[Draft], T]) -> T:
        return await self._run(rule, write=False)

    async def _run(self, rule: Callable[[Draft], T], *, write: bool) -> T:
        self._check_open()
        result, _ = await self._submit(
            lambda: self._apply(rule, write), lambda outcome: self._publish(outcome[1])
        )
        return result

    def _submit(
        self, work: Callable[[], R], on_done: Callable[[R], None] | None = None
    ) -> asyncio.Future[R]:
        asked = self._clock.monotonic()

        def unless_too_late() -> R:
            if self._clock.monotonic() - asked > limits.REGISTRY_QUEUE_S_MAX:
                raise Unavailable("the registry database answers too slowly; nothing was changed")
            return work()

        return self._worker.submit(unless_too_late, on_done)

    def _publish(self, state: RegistryState) -> None:
        # Not by revision: a database that lost its latest changes gives their numbers again.
        if state is self._published:
            return
        self._published = state
        self._view = view = state.view()
        for callback in tuple(self._subscribers):
            try:
                callback(view)
            except Exception:
                # The commit stands, and the other subscribers must learn of it.
                _LOG.exception("a subscriber of the registry failed")

    # -- in the worker thread

    def _open(self) -> RegistryState:
        self._engine = engine = database.open_engine(self._url)
        try:
            with database.transaction(engine, write=True) as connection:
                migrate.ensure_schema(connection, auto_migrate=self._auto_migrate)
                if connection.execute(select(STATE.c.id)).first() is None:
                    connection.execute(insert(STATE).values(self._first_state()))
                self._state = load_state(connection)
                connection.commit()
        except SQLAlchemyError as error:
            kind = Unavailable if database.is_away(error) else ConfigError
            raise kind(
                f"cannot open the registry at {database.shown(self._url)}: {database.reason(error)}"
            ) from error
        return self._state

    def _first_state(self) -> dict[str, object]:
        return {
            "id": 1,
            "revision": 1,
            "epoch": 0,
            "cluster_uid": rules.random_token(self._clock, _CLUSTER_UID_CHARS),
            "secret_hex": self._clock.random_bytes(_SECRET_BYTES).hex(),
            "defaults_created": False,
            "next_instance_number": 1,
        }

    def _apply(self, rule: Callable[[Draft], T], write: bool) -> tuple[T, RegistryState]:
        """Runs one rule in one transaction, on the state as it is in the database."""
        with self._transaction(write) as transaction:
            current = select(STATE.c.revision)
            # The one row that every change takes first, so changes come one after the other.
            current = current.with_for_update() if write else current
            revision = transaction.connection.execute(current).scalar_one()
            if self._state is None or self._state.revision != revision:
                self._state = load_state(transaction.connection)
            state, draft = self._state, Draft(self._state)
            result = rule(draft)
            if draft.dirty:
                state = draft.flush(transaction.connection)
                transaction.commit()
        self._state = state
        return result, state

    def _next_epoch(self) -> int:
        with self._transaction(write=True) as transaction:
            transaction.connection.execute(update(STATE).values(epoch=STATE.c.epoch + 1))
            epoch = transaction.connection.execute(select(STATE.c.epoch)).scalar_one()
            transaction.commit()
        return int(epoch)

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[_Transaction]:
        """Rolls back what was not committed; a failure of the database forgets the state."""
        if self._engine is None:
            raise NotReady("the registry is not open")
        transaction: _Transaction | None = None
        try:
            with database.transaction(self._engine, write=write) as connection:
                transaction = _Transaction(connection)
                if database.is_new(connection):
                    self._state = None
                yield transaction
        except SQLAlchemyError as error:
            self._state = None
            text = f"the registry database failed: {database.reason(error)}"
            if transaction is not None and transaction.committing:
                raise OutcomeUnknown(text) from None
            # Without the cause: its text may repeat a row, with a password's hash.
            raise (InternalError if isinstance(error, _OUR_FAULT) else Unavailable)(text) from None

    def _decoy(self) -> str:
        if not self._decoy_hash:
            self._decoy_hash = accounts.hash_password("", self._clock)
        return self._decoy_hash

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
