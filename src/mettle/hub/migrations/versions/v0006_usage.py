"""What jobs have taken, month by month, and what a million tokens costs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "usage",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("month", sa.String(7), primary_key=True),
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), nullable=False),
        sa.Column("person", sa.String(40), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.Column("usd", sa.Float(53), nullable=False),
    )
    op.create_index("usage_by_owner", "usage", ["owner_id", "month"])
    op.create_table(
        "prices",
        sa.Column("model", sa.String(200), primary_key=True),
        sa.Column("usd_per_mtok", sa.Float(53), nullable=False),
    )
