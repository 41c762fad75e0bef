"""Alembic's entry point. ``kvcm.registry.migrate`` drives it and hands over the connection."""

from __future__ import annotations

from alembic import context

from kvcm.core.errors import ConfigError
from kvcm.registry.tables import METADATA

connection = context.config.attributes.get("connection")
if connection is None:
    raise ConfigError("migrations run through kvcm.registry.migrate, which opens the database")

# The caller's transaction holds the schema lock, so the whole upgrade is one transaction.
context.configure(
    connection=connection,
    target_metadata=METADATA,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
