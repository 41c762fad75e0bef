"""Contract suites: what every implementation of a contract does, as tests to subclass."""

import pytest

pytest.register_assert_rewrite(
    "kvcm.testing.contracts.kvstore",
    "kvcm.testing.contracts.kvstore_model",
    "kvcm.testing.contracts.storage_backend",
)
