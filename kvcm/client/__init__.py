"""The client library of the KV cache manager: what an engine uses.

::

    from kvcm.client import Client, block_keys
    from kvcm.client.router import Transfers

    with Client("kvcm-0:6381,kvcm-1:6381") as client:
        known = client.register_instance("default", "llama-8b", 16, {"tp0": 4096})
        sdk = Transfers(known.storage_configs)
        keys = block_keys(prompt_token_ids, 16, salt=tenant)

        found = client.get_cache_location("llama-8b", keys)
        cached = sdk.get_many([(uri, None) for uri in found.locations.uris("tp0")])

        with client.write("llama-8b", keys) as session:
            session.put(sdk, blocks)

`AsyncClient` is the same for asyncio; `AdminClient` and `AsyncAdminClient` speak to the admin
port. Errors are those of `kvcm.core.errors`; a call that got no answer raises Unavailable (nothing
happened), OutcomeUnknown (it may have happened) or NotLeader (no address leads).
"""

from kvcm.client.aio import AsyncAdminClient, AsyncClient
from kvcm.client.errors import is_reportable, report_kind
from kvcm.client.keys import KeyChain, block_keys, hash_fingerprint, token_block_keys
from kvcm.client.retry import RetryPolicy
from kvcm.client.session import AsyncWriteSession, WriteSession
from kvcm.client.sync import AdminClient, Client
from kvcm.client.types import (
    BlockMeta,
    ClusterInfo,
    ErrorReport,
    Health,
    InstanceInfo,
    Location,
    Locations,
    Lookup,
    Metric,
    MetricsSnapshot,
    Registration,
    StorageInfo,
    WriteGrant,
)

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncWriteSession",
    "BlockMeta",
    "Client",
    "ClusterInfo",
    "ErrorReport",
    "Health",
    "InstanceInfo",
    "KeyChain",
    "Location",
    "Locations",
    "Lookup",
    "Metric",
    "MetricsSnapshot",
    "Registration",
    "RetryPolicy",
    "StorageInfo",
    "WriteGrant",
    "WriteSession",
    "block_keys",
    "hash_fingerprint",
    "is_reportable",
    "report_kind",
    "token_block_keys",
]
