"""People, teams, tokens, sessions, links, sign-in from a terminal, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "owners",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("slug", sa.String(40), nullable=False, unique=True),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "people",
        sa.Column("id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("email", sa.String(200), nullable=False, server_default=""),
        sa.Column("password_hash", sa.String(200), nullable=False),
        sa.Column("is_admin", sa.Boolean, nullable=False),
        sa.Column("is_disabled", sa.Boolean, nullable=False),
    )
    op.create_table(
        "memberships",
        sa.Column("team_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("person_id", sa.String(64), sa.ForeignKey("people.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("role", sa.String(8), nullable=False),
        sa.Column("joined_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("person_id", sa.String(64), sa.ForeignKey("people.id", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("used_at", sa.Float(53)),
        sa.Column("revoked_at", sa.Float(53)),
    )
    op.create_table(
        "sessions",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("person_id", sa.String(64), sa.ForeignKey("people.id", ondelete="CASCADE"), nullable=False),
        sa.Column("csrf", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "links",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("person_id", sa.String(64), sa.ForeignKey("people.id", ondelete="CASCADE")),
        sa.Column("team_id", sa.String(64), sa.ForeignKey("owners.id", ondelete="CASCADE")),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("used_at", sa.Float(53)),
    )
    op.create_table(
        "challenges",
        sa.Column("code", sa.String(16), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("person_id", sa.String(64), sa.ForeignKey("people.id", ondelete="CASCADE")),
        sa.Column("created_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("actor", sa.String(100), nullable=False),
        sa.Column("action", sa.String(60), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("address", sa.String(60), nullable=False),
    )
    op.create_index("audit_at", "audit", ["at"])
