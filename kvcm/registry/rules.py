"""What a change may do to the registry as a whole (wire.md §7, §9). Functions over a draft."""

from __future__ import annotations

from collections.abc import Iterable

from kvcm.core.clock import Clock
from kvcm.core.errors import (
    CapacityReached,
    DuplicateEntity,
    EntityNotExist,
    InstanceNotExist,
    InvalidArgument,
    VersionConflict,
)
from kvcm.core.types import AccountRole, Instance, InstanceGroup, StorageConfig
from kvcm.registry import compare, validate
from kvcm.registry.state import Draft, StoredAccount

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_UID_COUNTER_CHARS = 6
_UID_RANDOM_CHARS = 4
_NAMES_SHOWN_MAX = 10

REASON_MAX_INSTANCE_COUNT = "MAX_INSTANCE_COUNT"


def put_storage(draft: Draft, config: StorageConfig, *, expect_new: bool) -> StorageConfig:
    """Adds (``expect_new``) or updates a storage; an update keeps ``enabled`` and additions.

    Raises:
        InvalidArgument, DuplicateEntity, EntityNotExist.
    """
    validate.check_storage(config)
    name = config.global_unique_name
    stored = draft.storages.get(name)
    if expect_new and stored is not None:
        raise DuplicateEntity(f"storage {name!r} exists already")
    if not expect_new:
        stored = get_storage(draft, name)
        config = compare.merge_unknown(stored, config).model_copy(
            update={"enabled": stored.enabled}
        )
        validate.check_storage(config)
    if config != stored:
        draft.put_storage(config)
    return config


def set_storage_enabled(draft: Draft, name: str, enabled: bool) -> StorageConfig:
    """Enables or disables; raises EntityNotExist."""
    stored = get_storage(draft, name)
    if stored.enabled == enabled:
        return stored
    changed = stored.model_copy(update={"enabled": enabled})
    draft.put_storage(changed)
    return changed


def remove_storage(draft: Draft, name: str) -> StorageConfig:
    """Removes; raises EntityNotExist. Whether blocks live there is the caller's question."""
    stored = get_storage(draft, name)
    draft.delete_storage(name)
    return stored


def get_storage(draft: Draft, name: str) -> StorageConfig:
    """Raises EntityNotExist naming it."""
    if (stored := draft.storages.get(name)) is None:
        raise EntityNotExist(f"storage {name!r} does not exist")
    return stored


def get_group(draft: Draft, name: str) -> InstanceGroup:
    """Raises EntityNotExist naming it."""
    if (stored := draft.groups.get(name)) is None:
        raise EntityNotExist(f"instance group {name!r} does not exist")
    return stored


def create_group(draft: Draft, group: InstanceGroup) -> InstanceGroup:
    """Raises InvalidArgument, DuplicateEntity."""
    validate.check_group(group)
    if group.name in draft.groups:
        raise DuplicateEntity(f"instance group {group.name!r} exists already")
    draft.put_group(group)
    return group


def update_group(draft: Draft, group: InstanceGroup, current_version: int) -> InstanceGroup:
    """Replaces a group; additions it does not mention are kept.

    Raises:
        VersionConflict: ``current_version`` is not the stored one.
        InvalidArgument, EntityNotExist.
    """
    validate.check_group(group)
    stored = get_group(draft, group.name)
    if current_version != stored.version:
        raise VersionConflict(
            f"current_version is {current_version}, but instance group {group.name!r} is at "
            f"version {stored.version}"
        )
    if group.version <= stored.version:
        raise InvalidArgument(
            f"instance_group.version {group.version} of {group.name!r} must be above the stored "
            f"version {stored.version}"
        )
    merged = compare.merge_unknown(stored, group)
    # What is kept must fit what is new: a low mark to a lowered high one.
    validate.check_group(merged)
    draft.put_group(merged)
    return merged


def remove_group(draft: Draft, name: str, *, force: bool) -> tuple[Instance, ...]:
    """Removes a group; with ``force`` its instances are closed too and returned.

    Raises:
        InvalidArgument: it has instances (named), and no ``force``.
        EntityNotExist.
    """
    get_group(draft, name)
    instances = draft.group_instances(name)
    if instances and not force:
        raise InvalidArgument(
            f"instance group {name!r} still has {len(instances)} instances: "
            f"{named(i.instance_id for i in instances)}"
        )
    closed = tuple(close(draft, instance) for instance in instances)
    draft.delete_group(name)
    return closed


def register_instance(draft: Draft, wanted: Instance, clock: Clock, shards_max: int) -> Instance:
    """The stored instance: a new one, or the present one when the data are equal.

    Raises:
        InvalidArgument: a wrong field.
        EntityNotExist: unknown group.
        DuplicateEntity: registered with other data; names the instance and the fields.
        CapacityReached: the group has its ``max_instance_count`` (0 = unlimited).
    """
    validate.check_instance(wanted)
    group = get_group(draft, wanted.instance_group)
    stored = draft.instances.get(wanted.instance_id)
    if stored is not None:
        if differing := compare.differing_fields(stored, wanted):
            raise DuplicateEntity(
                f"instance {wanted.instance_id!r} exists already with different "
                f"{', '.join(differing)}"
            )
        return stored
    check_instance_count(group, len(draft.group_instances(group.name)))
    instance = wanted.model_copy(
        update={
            "uid": fresh_uid(draft, clock),
            "shard_count": compare.shard_count(group, shards_max),
            "trim": 0,
            "closing": False,
            "registered_at": clock.now(),
        }
    )
    draft.add_instance(instance)
    return instance


def check_instance_count(group: InstanceGroup, count: int) -> None:
    """Room for one more than ``count``; raises CapacityReached."""
    if 0 < group.max_instance_count <= count:
        raise CapacityReached(
            f"instance group {group.name!r} has its {group.max_instance_count} instances "
            "(max_instance_count)",
            reason=REASON_MAX_INSTANCE_COUNT,
        )


def raise_trim(draft: Draft, uid: str) -> int:
    """The new trim number; raises InstanceNotExist for a uid that is not live."""
    for instance in draft.instances.values():
        if instance.uid == uid:
            trim = instance.trim + 1
            draft.replace_instance(instance.model_copy(update={"trim": trim}))
            return trim
    raise InstanceNotExist(f"no live instance has uid {uid!r}")


def close_instance(draft: Draft, instance_id: str, group: str | None) -> Instance:
    """Marks as closing; the id is free at once. Raises InstanceNotExist."""
    instance = draft.instances.get(instance_id)
    if instance is None:
        raise InstanceNotExist(f"instance {instance_id!r} does not exist")
    if group and instance.instance_group != group:
        raise InstanceNotExist(f"instance {instance_id!r} does not exist in group {group!r}")
    return close(draft, instance)


def close(draft: Draft, instance: Instance) -> Instance:
    """Marks a live instance as closing."""
    closing = instance.model_copy(update={"closing": True})
    draft.replace_instance(closing)
    return closing


def forget_instance(draft: Draft, uid: str) -> None:
    """Drops a closing instance; unknown uids are ignored, since the work is repeated after crashes.

    Raises:
        InvalidArgument: the instance is live.
    """
    for instance in draft.instances.values():
        if instance.uid == uid:
            raise InvalidArgument(f"instance {instance.instance_id!r} is live, not closing")
    if uid in draft.closing:
        draft.delete_closing(uid)


def add_account(draft: Draft, user_name: str, password_hash: str, role: AccountRole) -> None:
    """Raises DuplicateEntity."""
    if user_name in draft.accounts:
        raise DuplicateEntity(f"account {user_name!r} exists already")
    draft.put_account(StoredAccount(user_name, role, password_hash))


def delete_account(draft: Draft, user_name: str) -> None:
    """Raises EntityNotExist."""
    if user_name not in draft.accounts:
        raise EntityNotExist(f"account {user_name!r} does not exist")
    draft.delete_account(user_name)


def bootstrap(
    draft: Draft, storages: Iterable[StorageConfig], groups: Iterable[InstanceGroup]
) -> bool:
    """First contents of a registry that never had any; whether they were created.

    Raises:
        InvalidArgument, DuplicateEntity: nothing is created then.
    """
    if draft.defaults_created:
        return False
    draft.defaults_created = True
    if draft.storages or draft.groups or draft.instances:
        return False
    for config in storages:
        put_storage(draft, config, expect_new=True)
    for group in groups:
        create_group(draft, group)
    return True


def fresh_uid(draft: Draft, clock: Clock) -> str:
    """[a-z0-9]{10}: a number this registry never gave before, and random characters."""
    number = draft.next_instance_number
    draft.next_instance_number += 1
    digits = ""
    for _ in range(_UID_COUNTER_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        digits = _ALPHABET[digit] + digits
    return digits + random_token(clock, _UID_RANDOM_CHARS)


def uid_number(uid: str) -> int:
    """The number inside a uid."""
    return int(uid[:_UID_COUNTER_CHARS], len(_ALPHABET))


def is_uid(text: str) -> bool:
    """Whether ``text`` could be an instance uid; the upper half of the numbers stays ours."""
    length = _UID_COUNTER_CHARS + _UID_RANDOM_CHARS
    fits = len(text) == length and set(text) <= set(_ALPHABET)
    return fits and uid_number(text) < len(_ALPHABET) ** _UID_COUNTER_CHARS // 2


def random_token(clock: Clock, length: int) -> str:
    """``length`` characters of [a-z0-9]."""
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in clock.random_bytes(length))


def named(names: Iterable[str]) -> str:
    """A list for messages, cut when it is long."""
    found = sorted(names)
    more = len(found) - _NAMES_SHOWN_MAX
    shown = ", ".join(repr(name) for name in found[:_NAMES_SHOWN_MAX])
    return f"{shown} and {more} more" if more > 0 else shown
