"""The background loops: each is ``run_once(now)`` under the server's supervisor, with a report."""

from __future__ import annotations

from kvcm.reclaimer.base import Loop, Surroundings
from kvcm.reclaimer.eviction import EvictionLoop
from kvcm.reclaimer.expiry import ExpiryLoop
from kvcm.reclaimer.forget import ForgetLoop
from kvcm.reclaimer.loading import LoadLoop
from kvcm.reclaimer.ordering import OrderLoop
from kvcm.reclaimer.stamps import StampLoop
from kvcm.reclaimer.trash import TrashLoop
from kvcm.reclaimer.trim import TrimLoop


def build_loops(around: Surroundings) -> list[Loop]:
    """All loops, in the order in which one pass makes most progress."""
    return [
        LoadLoop(around),
        ExpiryLoop(around),
        TrimLoop(around),
        OrderLoop(around),
        EvictionLoop(around),
        TrashLoop(around),
        ForgetLoop(around),
        StampLoop(around),
    ]
