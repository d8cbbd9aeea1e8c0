"""What lists and searches read of environments: the newest version, the stars, and the words, with their index."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

from mettle.hub.registry.words import END, words_of

revision = "0007"
down_revision = "0006"

_PARTS = ("name", "said", "readme", "tasks")
_NEWEST = """
    UPDATE environments SET version = coalesce((
        SELECT version FROM releases WHERE environment_id = environments.id AND state = 'ready'
        ORDER BY is_yanked, created_at DESC LIMIT 1), '')
"""
_STARS = "UPDATE environments SET num_stars = (SELECT count(*) FROM stars WHERE environment_id = environments.id)"
_TEXTS = """
    SELECT e.id, o.slug, e.name, e.description, e.tags, r.readme
    FROM environments e JOIN owners o ON o.id = e.owner_id
    JOIN releases r ON r.environment_id = e.id AND r.version = e.version
    WHERE e.version <> ''
"""


def upgrade() -> None:
    """Make the columns, the table and its index; fill them from the releases."""
    op.add_column("environments", sa.Column("version", sa.String(60), nullable=False, server_default=""))
    op.add_column("environments", sa.Column("num_stars", sa.Integer, nullable=False, server_default="0"))
    op.create_index("environment_created_at", "environments", ["created_at"])
    op.create_index("environment_num_stars", "environments", ["num_stars"])
    made = op.create_table(
        "environment_texts",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column(
            "environment_id", sa.String(64), sa.ForeignKey("environments.id", ondelete="CASCADE"), nullable=False,
            unique=True,
        ),
        *(sa.Column(part, sa.Text, nullable=False) for part in _PARTS),
    )  # fmt: skip
    c = op.get_bind()
    for statement in _SQLITE if c.dialect.name == "sqlite" else _POSTGRESQL:
        c.exec_driver_sql(statement)
    for statement in (_NEWEST, _STARS):
        c.exec_driver_sql(statement)
    rows = [_row(*row) for row in c.exec_driver_sql(_TEXTS)]
    if rows:
        c.execute(made.insert(), rows)


def _row(environment_id: str, slug: str, name: str, description: str, tags: Any, readme: str) -> dict[str, str]:
    named = tags if isinstance(tags, list) else json.loads(tags)
    return {
        "environment_id": environment_id, "name": _part(f"{slug} {name}"), "readme": _part(readme), "tasks": "",
        "said": _part(" ".join((description, *map(str, named)))),
    }  # fmt: skip


def _part(said: str) -> str:
    return " ".join((*words_of(said), END))


_NAMES = ", ".join(_PARTS)
_OLD, _NEW = (", ".join(f"{row}.{part}" for part in _PARTS) for row in ("old", "new"))
_DROP = f"INSERT INTO search_words (search_words, rowid, {_NAMES}) VALUES ('delete', old.id, {_OLD});"
_ADD = f"INSERT INTO search_words (rowid, {_NAMES}) VALUES (new.id, {_NEW});"
_SQLITE = (
    f"CREATE VIRTUAL TABLE search_words USING fts5({_NAMES}, content='environment_texts', content_rowid='id',"
    " tokenize='unicode61 remove_diacritics 0', prefix='2 3')",
    f"CREATE TRIGGER search_added AFTER INSERT ON environment_texts BEGIN {_ADD} END",
    f"CREATE TRIGGER search_gone AFTER DELETE ON environment_texts BEGIN {_DROP} END",
    f"CREATE TRIGGER search_changed AFTER UPDATE ON environment_texts BEGIN {_DROP} {_ADD} END",
)
_VECTOR = " || ".join(
    f"setweight(to_tsvector('simple', {part}), '{w}')" for part, w in zip(_PARTS, "ABCD", strict=True)
)
_POSTGRESQL = (
    f"ALTER TABLE environment_texts ADD COLUMN search_words tsvector GENERATED ALWAYS AS ({_VECTOR}) STORED",
    "CREATE INDEX search_words_index ON environment_texts USING gin (search_words)",
)
