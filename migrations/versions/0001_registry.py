"""The registry: its state, storages, groups, instances, accounts.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "registry_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("cluster_uid", sa.String(8), nullable=False),
        sa.Column("secret_hex", sa.String(64), nullable=False),
        sa.Column("defaults_created", sa.Boolean(), nullable=False),
        sa.Column("next_instance_number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_registry_state"),
    )
    op.create_table(
        "storages",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_storages"),
    )
    op.create_table(
        "instance_groups",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_instance_groups"),
    )
    op.create_table(
        "instances",
        sa.Column("uid", sa.String(10), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("live_instance_id", sa.Text(), nullable=True),
        sa.Column("live_group", sa.Text(), nullable=True),
        sa.Column("trim_number", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("uid", name="pk_instances"),
        sa.UniqueConstraint("live_instance_id", name="uq_instances_live_instance_id"),
        sa.ForeignKeyConstraint(
            ["live_group"], ["instance_groups.name"], name="fk_instances_live_group"
        ),
    )
    op.create_index("ix_instances_live_group", "instances", ["live_group"])
    op.create_table(
        "accounts",
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("role", sa.Integer(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("user_name", name="pk_accounts"),
    )


def downgrade() -> None:
    op.drop_table("accounts")
    op.drop_index("ix_instances_live_group", table_name="instances")
    op.drop_table("instances")
    op.drop_table("instance_groups")
    op.drop_table("storages")
    op.drop_table("registry_state")
