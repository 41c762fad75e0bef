"""A process that changes a registry until it is killed; prints what was acknowledged.

Usage: registry_changes.py URL PREFIX COUNT
"""

from __future__ import annotations

import asyncio
import sys

from registry_samples import group, instance, storage

from kvcm.core.clock import SystemClock
from kvcm.core.errors import DuplicateEntity
from kvcm.registry.registry import Registry


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(url: str, prefix: str, count: int) -> None:
    registry = Registry(url, SystemClock())
    await registry.open()
    try:
        await registry.create_group(group())
    except DuplicateEntity:
        pass
    say("open")
    for i in range(count):
        name = f"{prefix}{i}"
        stored = await registry.register_instance(instance(name))
        await registry.put_storage(storage(name), expect_new=True)
        say(f"{name} {stored.uid} {await registry.next_epoch()}")
    await registry.close()


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
