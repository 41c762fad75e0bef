"""The loader for machines without h2load: gRPC and HTTP from asyncio, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

import grpc.aio
import httpx
import numpy as np

from benchmarks.load import GRPC_PATH, JSON_HEADERS, Loaded, LoadFailed, Target

Send = Callable[[bytes], Awaitable[bytes]]


def run_aioload(
    target: Target,
    messages: Sequence[bytes],
    *,
    seconds: float,
    in_flight: int,
    reply_bytes: int,
) -> Loaded:
    """Like ``run_h2load``, one task for each request in flight.

    Raises:
        LoadFailed: an answer had the wrong size.
    """
    return asyncio.run(_run(target, messages, seconds, in_flight, reply_bytes))


async def _run(
    target: Target, messages: Sequence[bytes], seconds: float, in_flight: int, reply_bytes: int
) -> Loaded:
    latencies: list[float] = []
    begin = perf_counter()
    end = begin + seconds

    async def worker(send: Send, message: bytes) -> None:
        while (started := perf_counter()) < end:
            reply = await send(message)
            # h2load counts gRPC's five bytes before each message.
            if abs(len(reply) + (0 if target.json else 5) - reply_bytes) > 0.02 * reply_bytes:
                raise LoadFailed(f"{len(reply)} bytes in a reply, not {reply_bytes}")
            latencies.append(perf_counter() - started)

    async def all_workers(send: Send) -> None:
        async with asyncio.TaskGroup() as group:
            for message in messages:
                for _ in range(in_flight):
                    group.create_task(worker(send, message))

    if target.json:
        headers = dict(h.split(": ", 1) for h in JSON_HEADERS)
        async with httpx.AsyncClient(headers=headers) as client:

            async def post(message: bytes) -> bytes:
                return (await client.post(target.url, content=message)).content

            await all_workers(post)
    else:
        options = [("grpc.max_receive_message_length", -1)]
        async with grpc.aio.insecure_channel(target.address, options) as channel:
            await all_workers(channel.unary_unary(GRPC_PATH, None, None))
    rate = len(latencies) / (perf_counter() - begin)
    return Loaded(rate, len(latencies), np.asarray(latencies), "asyncio")
