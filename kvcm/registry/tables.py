"""The registry's tables. Bodies hold whole entities as JSON text, so unknown fields survive.

The schema itself is made by ``migrations/``; a test compares the two. ``live_…`` columns are NULL
for closing instances: an instance id is unique among live ones only, and a group may go while
the space of its removed instances is still being freed.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
    }
)

STATE = Table(
    "registry_state",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("cluster_uid", String(8), nullable=False),
    Column("secret_hex", String(64), nullable=False),
    Column("defaults_created", Boolean, nullable=False),
    Column("next_instance_number", BigInteger, nullable=False),
)
"""One row, id 1. Every change updates it first, which serialises writers on any database."""

STORAGES = Table(
    "storages",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("body", Text, nullable=False),
)

GROUPS = Table(
    "instance_groups",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)

INSTANCES = Table(
    "instances",
    METADATA,
    Column("uid", String(10), primary_key=True),
    Column("instance_id", Text, nullable=False),
    Column("live_instance_id", Text, unique=True),
    Column("live_group", Text, ForeignKey(GROUPS.c.name)),
    Column("trim_number", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    Index("ix_instances_live_group", "live_group"),
)

ACCOUNTS = Table(
    "accounts",
    METADATA,
    Column("user_name", Text, primary_key=True),
    Column("role", Integer, nullable=False),
    Column("password_hash", Text, nullable=False),
)
