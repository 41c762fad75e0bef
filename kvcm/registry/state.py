"""The registry in memory: an immutable state, and a draft that turns one change into statements.

Rules work on a draft and are pure; the statements a draft collected are then run in the very
transaction in which the state was found to be current.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from sqlalchemy import Connection, Executable, delete, insert, select, update

from kvcm.core.errors import CorruptRecord
from kvcm.core.types import Account, AccountRole, Entity, Instance, InstanceGroup, StorageConfig
from kvcm.registry.tables import ACCOUNTS, GROUPS, INSTANCES, STATE, STORAGES
from kvcm.registry.view import RegistryView

E = TypeVar("E", bound=Entity)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredAccount:
    """An account with its password's hash, which never shows in a log."""

    user_name: str
    role: AccountRole
    password_hash: str = field(repr=False)

    def shown(self) -> Account:
        """Without the hash."""
        return Account(user_name=self.user_name, role=self.role)


@dataclass(frozen=True, slots=True)
class RegistryState:
    """Everything at one revision. ``instances`` are the live ones by id, ``closing`` by uid."""

    revision: int
    cluster_uid: str
    secret: bytes = field(repr=False)
    defaults_created: bool
    next_instance_number: int
    storages: Mapping[str, StorageConfig]
    groups: Mapping[str, InstanceGroup]
    instances: Mapping[str, Instance]
    closing: Mapping[str, Instance]
    accounts: Mapping[str, StoredAccount]

    def view(self) -> RegistryView:
        """The snapshot that the rest of the manager sees."""
        return RegistryView(
            revision=self.revision,
            cluster_uid=self.cluster_uid,
            secret=self.secret,
            storages=_frozen(self.storages),
            groups=_frozen(self.groups),
            instances=_frozen(self.instances),
            closing=tuple(self.closing.values()),
            next_instance_number=self.next_instance_number,
        )


class Draft:
    """A state being changed. Nothing else sees it before its transaction has committed."""

    def __init__(self, base: RegistryState) -> None:
        self._base = base
        self.storages = dict(base.storages)
        self.groups = dict(base.groups)
        self.instances = dict(base.instances)
        self.closing = dict(base.closing)
        self.accounts = dict(base.accounts)
        self.defaults_created = base.defaults_created
        self.next_instance_number = base.next_instance_number
        self._statements: list[Executable] = []

    @property
    def cluster_uid(self) -> str:
        """Of the whole registry; never changes."""
        return self._base.cluster_uid

    @property
    def dirty(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._statements) or self.defaults_created != self._base.defaults_created

    def group_instances(self, group: str) -> list[Instance]:
        """The live instances of a group."""
        return [i for i in self.instances.values() if i.instance_group == group]

    def put_storage(self, config: StorageConfig) -> None:
        """Adds or replaces by name."""
        name = config.global_unique_name
        values = {"body": _body(config)}
        if name in self.storages:
            self._add(update(STORAGES).where(STORAGES.c.name == name).values(values))
        else:
            self._add(insert(STORAGES).values(name=name, **values))
        self.storages[name] = config

    def delete_storage(self, name: str) -> None:
        """Removes one that is there."""
        del self.storages[name]
        self._add(delete(STORAGES).where(STORAGES.c.name == name))

    def put_group(self, group: InstanceGroup) -> None:
        """Adds or replaces by name."""
        values = {"version": group.version, "body": _body(group)}
        if group.name in self.groups:
            self._add(update(GROUPS).where(GROUPS.c.name == group.name).values(values))
        else:
            self._add(insert(GROUPS).values(name=group.name, **values))
        self.groups[group.name] = group

    def delete_group(self, name: str) -> None:
        """Removes one that has no live instances."""
        del self.groups[name]
        self._add(delete(GROUPS).where(GROUPS.c.name == name))

    def add_instance(self, instance: Instance) -> None:
        """Adds a live instance under a uid never used before."""
        self.instances[instance.instance_id] = instance
        self._add(insert(INSTANCES).values(uid=instance.uid, **_instance_row(instance)))

    def replace_instance(self, instance: Instance) -> None:
        """Replaces the record of ``instance.uid``, moving it to ``closing`` when it says so."""
        if instance.closing:
            self.instances.pop(instance.instance_id, None)
            self.closing[instance.uid] = instance
        else:
            self.instances[instance.instance_id] = instance
        row = _instance_row(instance)
        self._add(update(INSTANCES).where(INSTANCES.c.uid == instance.uid).values(row))

    def delete_closing(self, uid: str) -> None:
        """Removes a closing instance's record."""
        del self.closing[uid]
        self._add(delete(INSTANCES).where(INSTANCES.c.uid == uid))

    def put_account(self, account: StoredAccount) -> None:
        """Adds or replaces by name."""
        values = {"role": int(account.role), "password_hash": account.password_hash}
        if account.user_name in self.accounts:
            where = ACCOUNTS.c.user_name == account.user_name
            self._add(update(ACCOUNTS).where(where).values(values))
        else:
            self._add(insert(ACCOUNTS).values(user_name=account.user_name, **values))
        self.accounts[account.user_name] = account

    def delete_account(self, user_name: str) -> None:
        """Removes one that is there."""
        del self.accounts[user_name]
        self._add(delete(ACCOUNTS).where(ACCOUNTS.c.user_name == user_name))

    def flush(self, connection: Connection) -> RegistryState:
        """Writes the change; returns the state it leads to once committed."""
        state = replace(
            self._base,
            revision=self._base.revision + 1,
            storages=self.storages,
            groups=self.groups,
            instances=self.instances,
            closing=self.closing,
            accounts=self.accounts,
            defaults_created=self.defaults_created,
            next_instance_number=self.next_instance_number,
        )
        connection.execute(
            update(STATE).values(
                revision=state.revision,
                defaults_created=state.defaults_created,
                next_instance_number=state.next_instance_number,
            )
        )
        for statement in self._statements:
            connection.execute(statement)
        return state

    def _add(self, statement: Executable) -> None:
        self._statements.append(statement)


def load_state(connection: Connection) -> RegistryState:
    """Reads the whole registry within the open transaction.

    Raises:
        CorruptRecord: a stored body that does not parse; the text names its table and key.
    """
    row = connection.execute(select(STATE)).one()
    storages = connection.execute(select(STORAGES.c.name, STORAGES.c.body)).all()
    groups = connection.execute(select(GROUPS.c.name, GROUPS.c.body)).all()
    # By uid is by age.
    by_age = select(INSTANCES.c.uid, INSTANCES.c.body).order_by(INSTANCES.c.uid)
    instances = connection.execute(by_age).all()
    accounts = connection.execute(select(ACCOUNTS)).all()
    parsed = [_parse(Instance, "instances", uid, body) for uid, body in instances]
    return RegistryState(
        revision=row.revision,
        cluster_uid=row.cluster_uid,
        secret=bytes.fromhex(row.secret_hex),
        defaults_created=row.defaults_created,
        next_instance_number=row.next_instance_number,
        storages={name: _parse(StorageConfig, "storages", name, body) for name, body in storages},
        groups={
            name: _parse(InstanceGroup, "instance_groups", name, body) for name, body in groups
        },
        instances={i.instance_id: i for i in parsed if not i.closing},
        closing={i.uid: i for i in parsed if i.closing},
        accounts={
            a.user_name: StoredAccount(a.user_name, AccountRole(a.role), a.password_hash)
            for a in accounts
        },
    )


def _frozen(entities: Mapping[str, T]) -> Mapping[str, T]:
    return MappingProxyType(entities)


def _instance_row(instance: Instance) -> dict[str, object]:
    live = not instance.closing
    return {
        "instance_id": instance.instance_id,
        "live_instance_id": instance.instance_id if live else None,
        "live_group": instance.instance_group if live else None,
        "trim_number": instance.trim,
        "body": _body(instance),
    }


def _body(entity: Entity) -> str:
    return json.dumps(entity.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))


def _parse(kind: type[E], table: str, key: str, body: str) -> E:
    try:
        return kind.model_validate_json(body)
    except ValueError as error:
        raise CorruptRecord(f"registry table {table}, row {key!r}: {error}") from None
