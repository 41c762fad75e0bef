"""The registry as one JSON document (GenConfigSnapshot, LoadConfigSnapshot).

::

    {"format": 1, "cluster_uid": "…",
     "storages": [StorageConfig…], "instance_groups": [InstanceGroup…],
     "instances": [Instance with uid, shard_count, trim…],
     "accounts": [{"user_name", "role", "password_hash"}…]}

Entities have the fields of ``kvcm.core.types``, enums as numbers, additions included. Instances
being freed are not in it, nor is the cluster's secret. ``cluster_uid`` tells where it came from
and is not taken over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from kvcm.core import limits
from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import AccountRole, Entity, Instance, InstanceGroup, StorageConfig
from kvcm.registry import accounts, compare, rules, validate
from kvcm.registry.documents import distinct_keys, json_path, no_constant
from kvcm.registry.state import Draft, StoredAccount

FORMAT = 1
ROOT = "config_snapshot"

E = TypeVar("E", bound=Entity)

_DEPTH_MAX = 32
"""Of one entity; what is deeper could be taken in here and fail to be written."""
_KEYS = ("format", "cluster_uid", "storages", "instance_groups", "instances", "accounts")
_ACCOUNT_KEYS = {"user_name", "role", "password_hash"}


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed snapshot whose parts are right one by one. An account without hash has ""."""

    storages: tuple[StorageConfig, ...]
    groups: tuple[InstanceGroup, ...]
    instances: tuple[Instance, ...]
    accounts: tuple[StoredAccount, ...]


def export(draft: Draft, *, with_hashes: bool) -> str:
    """The draft's registry as a document, everything sorted by name."""
    stored = [draft.accounts[name] for name in sorted(draft.accounts)]
    document = {
        "format": FORMAT,
        "cluster_uid": draft.cluster_uid,
        "storages": _dump(draft.storages),
        "instance_groups": _dump(draft.groups),
        "instances": _dump(draft.instances),
        "accounts": [
            {"user_name": a.user_name, "role": int(a.role)}
            | ({"password_hash": a.password_hash} if with_hashes else {})
            for a in stored
        ],
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def parse(text: str) -> Document:
    """Checks a document's form and each entity in it.

    Raises:
        InvalidArgument: naming the path in the document.
    """
    try:
        raw = json.loads(text, object_pairs_hook=distinct_keys, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"config_snapshot is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise InvalidArgument("config_snapshot is not a JSON object")
    if unknown := sorted(set(raw) - set(_KEYS)):
        raise InvalidArgument(f"config_snapshot.{unknown[0]} is unknown")
    if raw.get("format") != FORMAT or isinstance(raw["format"], bool):
        raise InvalidArgument(
            f"config_snapshot.format is {raw.get('format')!r}; this version reads {FORMAT}"
        )
    document = Document(
        storages=tuple(_entities(raw, "storages", StorageConfig)),
        groups=tuple(_entities(raw, "instance_groups", InstanceGroup)),
        instances=tuple(_entities(raw, "instances", Instance)),
        accounts=tuple(
            _account(item, f"config_snapshot.accounts[{i}]")
            for i, item in enumerate(_list(raw, "accounts"))
        ),
    )
    _check(document)
    return document


def replace_all(
    draft: Draft, document: Document, busy: frozenset[str], clock: Clock, shards_max: int
) -> None:
    """Makes the draft what the document says.

    An instance keeps its uid when it is live here under it with the same data, or when this
    registry never gave it away; otherwise it gets a fresh one, so that the records and files of a
    removed instance never come back to life. A trim number never goes down. Live instances that
    the document does not keep are closed.

    Raises:
        InvalidArgument: it would drop instances that hold blocks (named), or an account comes
            without hash and is not known here.
    """
    kept = {i.instance_id: i for i in document.instances if _keeps(draft, i)}
    dropped = [i for name, i in draft.instances.items() if name not in kept]
    if lost := [i.instance_id for i in dropped if i.uid in busy]:
        raise InvalidArgument(
            f"config_snapshot would drop instances that hold blocks: {rules.named(lost)}"
        )
    draft.defaults_created = True
    for instance in dropped:
        rules.close(draft, instance)
    for group in document.groups:
        draft.put_group(group)
    for wanted in kept.values():
        trim = max(draft.instances[wanted.instance_id].trim, wanted.trim)
        draft.replace_instance(wanted.model_copy(update={"trim": trim}))
    added = [i for i in document.instances if i.instance_id not in kept]
    _add_instances(draft, added, clock, shards_max)
    for name in set(draft.groups) - {group.name for group in document.groups}:
        draft.delete_group(name)
    _replace_storages(draft, document.storages)
    _replace_accounts(draft, document.accounts)


def _keeps(draft: Draft, wanted: Instance) -> bool:
    live = draft.instances.get(wanted.instance_id)
    return (
        live is not None
        and live.uid == wanted.uid
        and live.shard_count == wanted.shard_count
        and not compare.differing_fields(live, wanted)
    )


def _add_instances(draft: Draft, added: Iterable[Instance], clock: Clock, shards_max: int) -> None:
    first_free = draft.next_instance_number
    renamed = []
    for wanted in added:
        number = rules.uid_number(wanted.uid)
        if number < first_free:
            renamed.append(wanted)
            continue
        draft.next_instance_number = max(draft.next_instance_number, number + 1)
        draft.add_instance(wanted)
    for wanted in renamed:
        fresh = {
            "uid": rules.fresh_uid(draft, clock),
            "shard_count": compare.shard_count(draft.groups[wanted.instance_group], shards_max),
            "trim": 0,
        }
        draft.add_instance(wanted.model_copy(update=fresh))


def _replace_storages(draft: Draft, storages: Iterable[StorageConfig]) -> None:
    wanted = {config.global_unique_name: config for config in storages}
    for name in set(draft.storages) - set(wanted):
        draft.delete_storage(name)
    for config in wanted.values():
        draft.put_storage(config)


def _replace_accounts(draft: Draft, stored: Iterable[StoredAccount]) -> None:
    wanted = {account.user_name: account for account in stored}
    for name, account in wanted.items():
        known = draft.accounts.get(name)
        if not account.password_hash and known is None:
            raise InvalidArgument(
                f"config_snapshot.accounts has {name!r} without password_hash, "
                "and there is no such account here to take it from"
            )
        if not account.password_hash and known is not None:
            account = replace(account, password_hash=known.password_hash)
        draft.put_account(account)
    for name in set(draft.accounts) - set(wanted):
        draft.delete_account(name)


def _check(document: Document) -> None:
    """Each entity by its own rules, then what they say of each other."""
    for i, config in enumerate(document.storages):
        validate.check_storage(config, f"{ROOT}.storages[{i}]")
    for i, group in enumerate(document.groups):
        validate.check_group(group, f"{ROOT}.instance_groups[{i}]")
    _check_distinct((c.global_unique_name for c in document.storages), "storages")
    _check_distinct((g.name for g in document.groups), "instance_groups")
    _check_distinct((i.instance_id for i in document.instances), "instances")
    _check_distinct((i.uid for i in document.instances), "instances", what="uid")
    _check_distinct((a.user_name for a in document.accounts), "accounts")
    groups = {group.name for group in document.groups}
    for i, instance in enumerate(document.instances):
        path = f"{ROOT}.instances[{i}]"
        try:
            validate.check_instance(instance)
        except InvalidArgument as error:
            raise InvalidArgument(f"{path}: {error}") from None
        _check_stored_instance(instance, path)
        if instance.instance_group not in groups:
            raise InvalidArgument(
                f"{path}.instance_group {instance.instance_group!r} is not in the snapshot"
            )


def _check_stored_instance(instance: Instance, path: str) -> None:
    shards = instance.shard_count
    if not rules.is_uid(instance.uid):
        raise InvalidArgument(f"{path}.uid {instance.uid!r} is not an instance uid")
    if not limits.SHARDS_MIN <= shards <= limits.SHARDS_MAX or shards & (shards - 1):
        raise InvalidArgument(
            f"{path}.shard_count is {shards}, must be a power of two within "
            f"{limits.SHARDS_MIN}..{limits.SHARDS_MAX}"
        )
    if not 0 <= instance.trim <= validate.INT64_MAX:
        raise InvalidArgument(f"{path}.trim is {instance.trim}, must be 0 or more")
    if instance.closing:
        raise InvalidArgument(f"{path}.closing is set; a snapshot holds live instances only")


def _dump(entities: Mapping[str, Entity]) -> list[dict[str, Any]]:
    return [entities[name].model_dump(mode="json") for name in sorted(entities)]


def _list(raw: dict[str, Any], key: str) -> list[Any]:
    items = raw.get(key)
    if not isinstance(items, list):
        raise InvalidArgument(f"{ROOT}.{key} must be a list")
    return items


def _entities(raw: dict[str, Any], key: str, kind: type[E]) -> Iterator[E]:
    for i, item in enumerate(_list(raw, key)):
        if _is_deeper(item, _DEPTH_MAX):
            raise InvalidArgument(f"{ROOT}.{key}[{i}] is nested deeper than {_DEPTH_MAX} levels")
        try:
            yield kind.model_validate(item)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            path = json_path(f"{ROOT}.{key}[{i}]", first["loc"])
            raise InvalidArgument(f"{path}: {first['msg']}") from None


def _is_deeper(value: Any, depth: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    if depth == 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(_is_deeper(item, depth - 1) for item in items)


def _account(item: Any, path: str) -> StoredAccount:
    if not isinstance(item, dict):
        raise InvalidArgument(f"{path} must be an object")
    if unknown := sorted(set(item) - _ACCOUNT_KEYS):
        raise InvalidArgument(f"{path}.{unknown[0]} is unknown")
    name, role, hashed = item.get("user_name"), item.get("role"), item.get("password_hash", "")
    if not isinstance(name, str):
        raise InvalidArgument(f"{path}.user_name must be a text")
    validate.check_name(name, f"{path}.user_name")
    if isinstance(role, bool) or role not in tuple(AccountRole):
        raise InvalidArgument(f"{path}.role must be one of 0 (user) and 1 (admin)")
    if not isinstance(hashed, str) or (hashed and not accounts.is_hash(hashed)):
        raise InvalidArgument(f"{path}.password_hash is not an argon2id hash")
    return StoredAccount(name, AccountRole(role), hashed)


def _check_distinct(names: Iterable[str], key: str, *, what: str = "name") -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{ROOT}.{key} has {what} {name!r} twice")
        seen.add(name)
