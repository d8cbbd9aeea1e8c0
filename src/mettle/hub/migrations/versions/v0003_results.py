"""Results of evaluations that people push."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "results",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), nullable=False),
        sa.Column("pushed_by", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("environment", sa.String(160), nullable=False),
        sa.Column("environment_id", sa.String(64), sa.ForeignKey("environments.id", ondelete="CASCADE")),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("is_public", sa.Boolean, nullable=False),
        sa.Column("framework", sa.String(60), nullable=False),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("num_samples", sa.Integer, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("mean", sa.Float(53)),
        sa.Column("ci_low", sa.Float(53)),
        sa.Column("ci_high", sa.Float(53)),
        sa.Column("num_tasks", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.Column("completed_at", sa.Float(53)),
    )
    op.create_index("result_by_environment", "results", ["environment"])
    op.create_index("result_created_at", "results", ["created_at"])
