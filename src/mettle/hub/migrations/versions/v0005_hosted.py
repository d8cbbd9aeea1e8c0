"""Secrets; what kind a job is, what it was planned to take, and what it took; quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the tables, and the columns of jobs."""
    op.create_table(
        "secrets",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), nullable=False),
        sa.Column("environment_id", sa.String(64), sa.ForeignKey("environments.id", ondelete="CASCADE")),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("is_variable", sa.Boolean, nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("description", sa.String(500), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
    )
    op.create_index("secret_by_owner", "secrets", ["owner_id", "environment_id"])
    op.create_table(
        "quotas",
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("tokens_a_month", sa.BigInteger, nullable=False),
    )
    op.add_column("jobs", sa.Column("kind", sa.String(8), nullable=False, server_default="train"))
    op.add_column("jobs", sa.Column("sealed", sa.Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("planned", sa.JSON))
    op.add_column("jobs", sa.Column("num_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("result_id", sa.String(64), nullable=False, server_default=""))
