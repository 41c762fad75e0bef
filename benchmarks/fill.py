"""Writing chains through the real client, and looking at what is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import grpc
import numpy as np

from benchmarks import workload
from benchmarks.load import GRPC_PATH
from benchmarks.workload import Chain, Keys
from kvcm._pb import meta_pb2 as pb
from kvcm.client import AsyncClient
from kvcm.core.errors import NotReady

_WRITERS = 8
_TIMEOUT_S = 60.0


class WrongAnswer(Exception):
    """The manager did not answer what it must."""


async def _register(client: AsyncClient) -> None:
    await client.register_instance(
        workload.GROUP,
        workload.INSTANCE,
        workload.BLOCK_TOKENS,
        {workload.SPEC: workload.BLOCK_BYTES},
    )


async def _fill(target: str, chains: Sequence[Chain]) -> None:
    left: Iterator[Chain] = iter(chains)
    async with AsyncClient(target, timeout=_TIMEOUT_S) as client:
        await _register(client)
        await _ready(client)

        async def writer() -> None:
            for chain in left:
                for keys, before in chain.extents():
                    await _write(client, keys, before)

        async with asyncio.TaskGroup() as group:
            for _ in range(_WRITERS):
                group.create_task(writer())


async def _ready(client: AsyncClient) -> None:
    """The instance takes writes once its index is loaded."""
    while True:
        try:
            await client.start_write_cache(workload.INSTANCE, [])
        except NotReady:
            await asyncio.sleep(0.05)
        else:
            return


async def _write(client: AsyncClient, keys: Keys, before: Keys) -> None:
    grant = await client.start_write_cache(workload.INSTANCE, np.concatenate((before, keys)))
    if len(grant.locations) != len(keys):
        raise WrongAnswer(f"{len(grant.locations)} of {len(keys)} new keys were granted")
    await client.finish_write_cache(workload.INSTANCE, grant.session_id, [True] * len(keys))


async def _look_at_all(target: str, chains: Sequence[Chain]) -> None:
    seen: set[str] = set()
    total = 0
    async with AsyncClient(target, timeout=_TIMEOUT_S) as client:
        for chain in chains:
            found = await client.get_cache_location(workload.INSTANCE, chain.keys)
            if len(found) != len(chain.keys):
                raise WrongAnswer(f"{len(found)} of {len(chain.keys)} keys of a chain were found")
            seen.update(found.locations.uris(workload.SPEC))
            total += len(chain.keys)
    if len(seen) != total:
        raise WrongAnswer(f"{total} keys lie at only {len(seen)} different places")


def fill(target: str, chains: Sequence[Chain]) -> None:
    """Register the instance and write all chains, each from its head on, several at a time."""
    asyncio.run(_fill(target, chains))


def look_at_all(target: str, chains: Sequence[Chain]) -> None:
    """Look every key up; afterwards all answers are cached.

    Raises:
        WrongAnswer: a key is missing, or two lie at the same place.
    """
    asyncio.run(_look_at_all(target, chains))


def reply_bytes(address: str, keys: Keys, expected: int) -> int:
    """Bytes of the answer as gRPC sends it.

    Raises:
        WrongAnswer: it does not hold ``expected`` locations.
    """
    options = [("grpc.max_receive_message_length", -1)]
    message = workload.lookup_message(keys).SerializeToString()
    with grpc.insecure_channel(address, options) as channel:
        data = channel.unary_unary(GRPC_PATH, None, None)(message)
    reply = pb.GetCacheLocationResponse.FromString(data)
    if reply.header.status.code != pb.OK or len(reply.locations) != expected:
        raise WrongAnswer(f"{len(reply.locations)} locations, not {expected}: {reply.header}")
    return 5 + len(data)
