"""The tables of the Hub, as SQLAlchemy describes them; the migrations beside them make the same.

Times are seconds since 1970. A secret stands as its SHA-256, never as itself. Invariant: a table here and the schema
that the migrations lead to are the same (`tests/hub/test_database.py`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()


def _key(name: str = "id") -> Column[str]:
    return Column(name, String(64), primary_key=True)


def _to(name: str, target: str, *, nullable: bool = False, primary_key: bool = False) -> Column[Any]:
    return Column(
        name, String(64), ForeignKey(f"{target}.id", ondelete="CASCADE"), nullable=nullable, primary_key=primary_key
    )


def _time(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, Float(53), nullable=nullable)


owners = Table(
    "owners",
    metadata,
    _key(),
    Column("slug", String(40), nullable=False, unique=True),
    Column("kind", String(8), nullable=False),  # person or team
    Column("name", String(100), nullable=False),
    _time("created_at"),
)

people = Table(
    "people",
    metadata,
    Column("id", String(64), ForeignKey("owners.id", ondelete="CASCADE"), primary_key=True),
    Column("email", String(200), nullable=False, server_default=""),
    Column("password_hash", String(200), nullable=False),
    Column("is_admin", Boolean, nullable=False),
    Column("is_disabled", Boolean, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    _to("team_id", "owners", primary_key=True),
    _to("person_id", "people", primary_key=True),
    Column("role", String(8), nullable=False),  # ADMIN or MEMBER
    _time("joined_at"),
)

tokens = Table(
    "tokens",
    metadata,
    _key(),
    _to("person_id", "people"),
    Column("name", String(100), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("scopes", JSON, nullable=False),
    _time("created_at"),
    _time("expires_at", nullable=True),
    _time("used_at", nullable=True),
    _time("revoked_at", nullable=True),
)

sessions = Table(
    "sessions",
    metadata,
    Column("digest", String(64), primary_key=True),
    _to("person_id", "people"),
    Column("csrf", String(64), nullable=False),
    _time("created_at"),
    _time("expires_at"),
)

links = Table(
    "links",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),  # admin, invitation or password
    _to("person_id", "people", nullable=True),  # whose password it sets
    _to("team_id", "owners", nullable=True),  # the team that an invitation leads into
    _time("created_at"),
    _time("expires_at"),
    _time("used_at", nullable=True),
)

identities = Table(
    "identities",
    metadata,
    Column("issuer", String(200), primary_key=True),
    Column("subject", String(255), primary_key=True),
    _to("person_id", "people"),
    Column("email", String(200), nullable=False),  # as the provider had it then, for people to read
    _time("created_at"),
    Index("identity_by_person", "person_id"),
)

sign_ins = Table(
    "sign_ins",
    metadata,
    Column("digest", String(64), primary_key=True),  # of the state that the provider hands back
    Column("browser", String(64), nullable=False),  # digest of the cookie of the browser that began it
    Column("nonce", String(64), nullable=False),
    Column("verifier", String(128), nullable=False),
    Column("following", Text, nullable=False),
    _to("person_id", "people", nullable=True),  # who adds the identity to an account
    _time("created_at"),
)

challenges = Table(
    "challenges",
    metadata,
    Column("code", String(16), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("public_key", Text, nullable=False),
    _to("person_id", "people", nullable=True),
    _time("created_at"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    _time("at"),
    Column("actor", String(100), nullable=False),
    Column("action", String(60), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("detail", Text, nullable=False),
    Column("address", String(60), nullable=False),
    Index("audit_at", "at"),
)

environments = Table(
    "environments",
    metadata,
    _key(),
    _to("owner_id", "owners"),
    Column("name", String(100), nullable=False),
    Column("visibility", String(8), nullable=False),  # PUBLIC or PRIVATE: to its owner, or to the team that owns it
    Column("description", Text, nullable=False),
    Column("tags", JSON, nullable=False),
    Column("forked_from", String(200), nullable=False),
    Column("num_downloads", Integer, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    # What lists show of the releases and stars, kept with them: a list reads only rows of this table.
    Column("version", String(60), nullable=False, server_default=""),  # the newest that is there; empty without one
    Column("num_stars", Integer, nullable=False, server_default="0"),
    UniqueConstraint("owner_id", "name", name="environment_name"),
    Index("environment_by_name", "name"),
    Index("environment_updated_at", "updated_at"),
    Index("environment_created_at", "created_at"),
    Index("environment_num_stars", "num_stars"),
)

environment_texts = Table(
    "environment_texts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column(
        "environment_id", String(64), ForeignKey("environments.id", ondelete="CASCADE"), nullable=False, unique=True
    ),
    Column("name", Text, nullable=False),  # each part as the words that it has (`registry/words.py`)
    Column("said", Text, nullable=False),
    Column("readme", Text, nullable=False),
    Column("tasks", Text, nullable=False),
)

SEARCH = "search_words"
"""What a database's own index of `environment_texts` is called: a virtual table of SQLite's FTS5, which keeps tables
beside it under longer names; a generated column of PostgreSQL, with its GIN index."""


def is_described(name: str | None) -> bool:
    """Whether a table, column or index of the database is one of these, or belongs to an index of words."""
    return not (name or "").startswith(SEARCH)


releases = Table(
    "releases",
    metadata,
    _key(),
    _to("environment_id", "environments"),
    Column("version", String(60), nullable=False),
    Column("content_hash", String(64), nullable=False),
    Column("state", String(8), nullable=False),  # pending, ready or deleted; a version that was deleted stays taken
    Column("is_yanked", Boolean, nullable=False),
    Column("yanked_reason", String(200), nullable=False),
    Column("published_by", String(40), nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("readme", Text, nullable=False),
    Column("wheel_name", String(200), nullable=False),
    Column("wheel_sha256", String(64), nullable=False),
    Column("wheel_bytes", Integer, nullable=False),
    Column("wheel_key", String(64), nullable=False),  # digest of the secret in the address of its upload
    Column("wheel_metadata", Text, nullable=False),  # its METADATA; empty until it was checked
    Column("source_name", String(200), nullable=False),
    Column("source_sha256", String(64), nullable=False),
    Column("source_bytes", Integer, nullable=False),
    Column("source_key", String(64), nullable=False),
    Column("card", JSON, nullable=True),
    Column("card_state", String(10), nullable=False),  # empty, PENDING, RUNNING, SUCCESS, FAILED or CANCELLED
    Column("card_log", Text, nullable=False),
    _time("created_at"),
    UniqueConstraint("environment_id", "version", name="release_version"),
    Index("release_wheel_key", "wheel_key"),
    Index("release_source_key", "source_key"),
)

stars = Table(
    "stars",
    metadata,
    _to("environment_id", "environments", primary_key=True),
    _to("person_id", "people", primary_key=True),
    _time("at"),
)

results = Table(
    "results",
    metadata,
    _key(),
    _to("owner_id", "owners"),
    Column("pushed_by", String(40), nullable=False),
    Column("name", String(200), nullable=False),
    Column("environment", String(160), nullable=False),  # owner/name, or what the pusher calls it
    _to("environment_id", "environments", nullable=True),
    Column("model", String(200), nullable=False),
    Column("status", String(12), nullable=False),
    Column("is_public", Boolean, nullable=False),
    Column("framework", String(60), nullable=False),
    Column("metadata", JSON, nullable=False),
    Column("metrics", JSON, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),  # of the file of samples that count; what is behind them does not
    Column("mean", Float(53), nullable=True),
    Column("ci_low", Float(53), nullable=True),
    Column("ci_high", Float(53), nullable=True),
    Column("num_tasks", Integer, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    _time("completed_at", nullable=True),
    Index("result_by_environment", "environment"),
    Index("result_created_at", "created_at"),
)

jobs = Table(
    "jobs",
    metadata,
    _key(),
    _to("owner_id", "owners"),
    Column("submitted_by", String(40), nullable=False),
    Column("name", String(200), nullable=False),
    Column("model", String(200), nullable=False),
    Column("environments", JSON, nullable=False),
    Column("config", JSON, nullable=False),  # the run's config, as it is written to its TOML file
    Column("status", String(12), nullable=False),  # QUEUED, RUNNING, COMPLETED, FAILED or STOPPED
    Column("is_stop_wanted", Boolean, nullable=False),
    Column("error", Text, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    _time("started_at", nullable=True),
    _time("ended_at", nullable=True),
    Column("kind", String(8), nullable=False, server_default="train"),  # train or eval
    Column("sealed", Text, nullable=False, server_default=""),  # the secrets that it was told, to hide them in its logs
    Column("planned", JSON, nullable=True),
    Column("num_tokens", BigInteger, nullable=False, server_default="0"),  # that it took until now
    Column("result_id", String(64), nullable=False, server_default=""),  # of an evaluation: where its results go
    Index("job_by_status", "status", "created_at"),
)

secrets = Table(
    "secrets",
    metadata,
    _key(),
    _to("owner_id", "owners"),
    _to("environment_id", "environments", nullable=True),  # without one, for all jobs of the owner
    Column("name", String(255), nullable=False),
    Column("is_variable", Boolean, nullable=False),
    Column("sealed", Text, nullable=False),
    Column("description", String(500), nullable=False),
    _time("created_at"),
    _time("updated_at"),
    Index("secret_by_owner", "owner_id", "environment_id"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("owner_id", String(64), ForeignKey("owners.id", ondelete="CASCADE"), primary_key=True),
    Column("tokens_a_month", BigInteger, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("job_id", String(64), primary_key=True),  # no foreign key: a run that is deleted has still been run
    Column("month", String(7), primary_key=True),  # 2026-11, in UTC
    _to("owner_id", "owners"),
    Column("person", String(40), nullable=False),
    Column("name", String(200), nullable=False),
    Column("model", String(200), nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("usd", Float(53), nullable=False),  # at the price of the moment
    Index("usage_by_owner", "owner_id", "month"),
)

prices = Table(
    "prices",
    metadata,
    Column("model", String(200), primary_key=True),  # `*` for all that have none of their own
    Column("usd_per_mtok", Float(53), nullable=False),
)

machines = Table(
    "machines",
    metadata,
    _key(),
    Column("name", String(60), nullable=False),
    Column("digest", String(64), nullable=False, unique=True),
    Column("state", String(10), nullable=False),  # ACTIVE, LEAVING, LEFT or REMOVED
    Column("facts", JSON, nullable=False),  # what it has, as it says itself
    Column("address", String(60), nullable=False),
    _time("joined_at"),
    _time("seen_at"),
)

machine_invitations = Table(
    "machine_invitations",
    metadata,
    _key(),
    Column("digest", String(64), nullable=False, unique=True),
    Column("name", String(60), nullable=False),
    Column("made_by", String(100), nullable=False),
    _to("machine_id", "machines", nullable=True),  # the one that has used it
    _time("created_at"),
    _time("expires_at"),
    _time("revoked_at", nullable=True),
)

leases = Table(
    "leases",
    metadata,
    _key(),
    _to("job_id", "jobs"),
    _to("machine_id", "machines"),
    Column("generation", Integer, nullable=False),  # from 1 on for each job: what an earlier one reports is refused
    Column("state", String(10), nullable=False),  # HELD, ENDED, BACK or EXPIRED
    _time("begun_at"),
    _time("expires_at"),
    _time("ended_at", nullable=True),
    UniqueConstraint("job_id", "generation", name="lease_generation"),
    Index("lease_by_state", "state"),
)
