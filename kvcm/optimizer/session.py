"""The ends of a replay: registering its instance, and checking acknowledged blocks afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kvcm.client import AsyncClient
from kvcm.client.router import Transfers
from kvcm.core.types import ModelDeployment
from kvcm.optimizer.acks import AckHeader
from kvcm.optimizer.content import BlockContent
from kvcm.optimizer.counters import FAULTS_SHOWN
from kvcm.optimizer.fleet import ReplayPlan
from kvcm.optimizer.remote import RemoteManager

_URIS_PER_LOOKUP_MAX = 2_048
"""Keeps a batch answer well below the reply limit."""


def spec_names(count: int) -> list[str]:
    """``tp0``, ``tp1``, …"""
    return [f"tp{rank}" for rank in range(count)]


def fingerprint(instance: str, block_bytes: int, salt: str) -> str:
    """What, besides key and spec, the bytes of an instance's blocks follow from."""
    return "\0".join((instance, str(block_bytes), salt))


def register(plan: ReplayPlan, group: str) -> str:
    """Register the plan's instance; again with equal data is OK.

    Returns:
        JSON of the storages that its blocks may lie on, for the plan and the SDKs.

    Raises:
        KvcmError: no manager answers, or it refuses.
    """

    async def call() -> str:
        async with AsyncClient(plan.targets, timeout=plan.call_timeout_s) as client:
            known = await client.register_instance(
                group,
                plan.instance,
                plan.block_tokens,
                dict.fromkeys(plan.spec_names, plan.block_bytes),
                model_deployment=ModelDeployment(
                    model_name="kvcm-replay", dtype="bytes", tp_size=len(plan.spec_names)
                ),
            )
            return msgspec.json.encode(known.storage_configs).decode()

    return asyncio.run(call())


class AckCheck(msgspec.Struct):
    """What became of the acknowledged blocks; all are right when ``right == keys``."""

    keys: int = 0
    right: int = 0
    gone: int = 0
    """The manager no longer answers them."""
    lost: int = 0
    """Answered, but the bytes are not there."""
    wrong: int = 0
    """Answered and read, but not the right bytes."""
    faults: list[str] = msgspec.field(default_factory=list)


def check_acks(
    targets: Sequence[str], header: AckHeader, keys: Sequence[int], call_timeout_s: float
) -> AckCheck:
    """Look up every key and read and compare all its bytes.

    Raises:
        KvcmError: no manager answers, or it refuses the lookup.
    """

    async def call() -> AckCheck:
        result = AckCheck(keys=len(keys))
        step = max(1, _URIS_PER_LOOKUP_MAX // max(1, len(header.spec_names)))
        sdk = Transfers(header.storage_configs)
        async with AsyncClient(list(targets), timeout=call_timeout_s) as client:
            manager = RemoteManager(client, header.instance, 0)
            with sdk:
                for first in range(0, len(keys), step):
                    await _check_batch(manager, sdk, header, keys[first : first + step], result)
        return result

    return asyncio.run(call())


async def _check_batch(
    manager: RemoteManager,
    sdk: Transfers,
    header: AckHeader,
    keys: Sequence[int],
    result: AckCheck,
) -> None:
    content = BlockContent(header.fingerprint)
    for key, location in zip(keys, await manager.find(keys), strict=True):
        uris = [location.get(spec, "") for spec in header.spec_names]
        if not any(uris):
            result.gone += 1
            _note(result, f"gone: block {key}")
            continue
        lost = wrong = ""
        answers = sdk.get_many([(uri, None) for uri in uris])
        for spec, uri, data in zip(header.spec_names, uris, answers, strict=True):
            if not isinstance(data, bytes):
                lost = f"lost: block {key} {spec} at {uri}: {data}"
            elif fault := content.fault(key, spec, header.block_bytes, data):
                wrong = f"WRONG BYTES: block {key} {spec} at {uri}: {fault}"
        result.wrong += bool(wrong)
        result.lost += bool(lost and not wrong)
        result.right += not (lost or wrong)
        if wrong or lost:
            _note(result, wrong or lost)


def _note(result: AckCheck, fault: str) -> None:
    if len(result.faults) < FAULTS_SHOWN:
        result.faults.append(fault)
