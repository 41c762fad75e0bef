"""Is this server fit for an index? Asked once, when a store is opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvcm.core.errors import ConfigError, Unavailable
from kvcm.metaindex.stores.valkey_url import Kind, ValkeyConfig
from kvcm.metaindex.stores.valkey_wire import Address, Node, pack

_log = logging.getLogger(__name__)
_VERSION_MIN = (7, 0)
"""Scripts with flags; Valkey of every version reports as Redis 7.2 or later."""


async def check_servers(nodes: Sequence[Node], config: ValkeyConfig) -> None:
    """Check all that answer.

    Raises:
        ConfigError: a server is too old, or of a cluster that the URL does not speak of.
        Unavailable: none answers.
    """
    failures: list[Unavailable] = []
    for node in nodes:
        try:
            await _check(node, config)
        except Unavailable as error:
            failures.append(error)
    if failures and len(failures) == len(nodes):
        raise failures[0]
    for failure in failures:
        _log.error("%s; what lies there is missing", failure)


async def _check(node: Node, config: ValkeyConfig) -> None:
    """Log what the server does with our records, loudly where it may lose them."""
    facts = await _info(node)
    version = facts.get("valkey_version") or facts.get("redis_version", "")
    like = tuple(int(part) for part in facts.get("redis_version", "0").split(".")[:2])
    if like < _VERSION_MIN:
        raise ConfigError(f"index store at {node.address}: version {version}, needs Redis 7.0")
    if facts.get("cluster_enabled") == "1" and config.kind is Kind.SINGLE:
        raise ConfigError(
            f"index store at {node.address}: it is one of a cluster; the URL begins with "
            "valkey+cluster:// then"
        )
    if facts.get("role") == "slave":
        _log.error("index store at %s is a replica: it takes no writes", node.address)
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        _log.error(
            "index store at %s: maxmemory-policy is %s. It may drop parts of the index when memory "
            "is short: blocks become misses, whole shards are emptied. Set it to noeviction.",
            node.address,
            policy,
        )
    _log.info("index store at %s: %s %s", node.address, version, durability(facts, config))
    if facts.get("aof_enabled") == "0":
        _log.warning(
            "index store at %s: appendonly is off, a restart of it empties the index or takes it "
            "back to its last snapshot",
            node.address,
        )


def durability(facts: dict[str, str], config: ValkeyConfig) -> str:
    """What survives, in words."""
    if facts.get("aof_enabled") == "1":
        text = "with an append-only file (what its end may lack is set by appendfsync)"
    else:
        text = "without an append-only file (a restart loses what the last snapshot lacks)"
    if config.wait_replicas:
        return f"{text}; bytes are deleted when {config.wait_replicas} replicas know of it"
    replicas = facts.get("connected_slaves", "0")
    if replicas != "0":
        return f"{text}; {replicas} replicas, not waited for (wait_replicas)"
    return text


async def speaks_plainly(address: Address, timeout_s: float) -> bool:
    """Whether a server answers without TLS; asked of one that does not answer with it."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(b"PING\r\n")
                return await reader.read(1) in (b"+", b"-")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _info(node: Node) -> dict[str, str]:
    exchange = await node.exchange(pack((b"INFO",)), 1)
    (reply,) = exchange.replies or [None]
    if not isinstance(reply, bytes):
        raise Unavailable(f"index store at {node.address}: {exchange.failure or reply}")
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
