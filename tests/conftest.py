"""Settings that hold for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a shared, busy machine the time of one example says nothing about the code.
settings.register_profile(
    "kvcm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvcm")
