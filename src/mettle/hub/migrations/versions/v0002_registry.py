"""Environments, their releases, stars."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def _text(name: str, length: int) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=False)


def _to(name: str, target: str, *, is_key: bool = False) -> sa.Column[str]:
    link = sa.ForeignKey(f"{target}.id", ondelete="CASCADE")
    return sa.Column(name, sa.String(64), link, nullable=False, primary_key=is_key)


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "environments",
        sa.Column("id", sa.String(64), primary_key=True),
        _to("owner_id", "owners"),
        _text("name", 100),
        _text("visibility", 8),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        _text("forked_from", 200),
        sa.Column("num_downloads", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.UniqueConstraint("owner_id", "name", name="environment_name"),
    )
    op.create_index("environment_by_name", "environments", ["name"])
    op.create_index("environment_updated_at", "environments", ["updated_at"])
    op.create_table(
        "releases",
        sa.Column("id", sa.String(64), primary_key=True),
        _to("environment_id", "environments"),
        _text("version", 60),
        _text("content_hash", 64),
        _text("state", 8),
        sa.Column("is_yanked", sa.Boolean, nullable=False),
        _text("yanked_reason", 200),
        _text("published_by", 40),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("readme", sa.Text, nullable=False),
        _text("wheel_name", 200),
        _text("wheel_sha256", 64),
        sa.Column("wheel_bytes", sa.Integer, nullable=False),
        _text("wheel_key", 64),
        sa.Column("wheel_metadata", sa.Text, nullable=False),
        _text("source_name", 200),
        _text("source_sha256", 64),
        sa.Column("source_bytes", sa.Integer, nullable=False),
        _text("source_key", 64),
        sa.Column("card", sa.JSON),
        _text("card_state", 10),
        sa.Column("card_log", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.UniqueConstraint("environment_id", "version", name="release_version"),
    )
    op.create_index("release_wheel_key", "releases", ["wheel_key"])
    op.create_index("release_source_key", "releases", ["source_key"])
    op.create_table(
        "stars",
        _to("environment_id", "environments", is_key=True),
        _to("person_id", "people", is_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
    )
