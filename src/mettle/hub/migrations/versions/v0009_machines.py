"""Machines that join, what lets them in, and the leases under which they work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def _to(name: str, target: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(64), sa.ForeignKey(f"{target}.id", ondelete="CASCADE"), nullable=nullable)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "machines",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(60), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("address", sa.String(60), nullable=False),
        sa.Column("joined_at", sa.Float(53), nullable=False),
        sa.Column("seen_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "machine_invitations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("name", sa.String(60), nullable=False),
        sa.Column("made_by", sa.String(100), nullable=False),
        _to("machine_id", "machines", nullable=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("revoked_at", sa.Float(53), nullable=True),
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(64), primary_key=True),
        _to("job_id", "jobs"),
        _to("machine_id", "machines"),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("state", sa.String(10), nullable=False),
        sa.Column("begun_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53), nullable=True),
        sa.UniqueConstraint("job_id", "generation", name="lease_generation"),
    )
    op.create_index("lease_by_state", "leases", ["state"])
