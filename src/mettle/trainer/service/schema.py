"""The service's schema, as migrations. A script that has been released is never edited; a change is a new one."""

MIGRATIONS = (
    """
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_seen_at REAL NOT NULL,
        ended_at REAL,
        metadata TEXT NOT NULL
    );

    CREATE TABLE models (
        model_id TEXT PRIMARY KEY,
        session_id TEXT NOT NULL REFERENCES sessions (session_id),
        owner TEXT NOT NULL,
        base_model TEXT NOT NULL,
        spec TEXT NOT NULL,
        metadata TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_request_at REAL NOT NULL,
        last_seq INTEGER NOT NULL,
        snapshot_seq INTEGER NOT NULL,
        snapshot TEXT NOT NULL
    );
    CREATE INDEX models_by_owner ON models (owner, created_at);
    CREATE INDEX models_by_session ON models (session_id);

    CREATE TABLE operations (
        request_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        owner TEXT NOT NULL,
        session_id TEXT NOT NULL,
        model_id TEXT NOT NULL,
        seq_id INTEGER NOT NULL,
        body BLOB NOT NULL,
        digest BLOB NOT NULL,
        state TEXT NOT NULL,
        result BLOB NOT NULL DEFAULT x'',
        category TEXT NOT NULL DEFAULT '',
        error TEXT NOT NULL DEFAULT '',
        created_at REAL NOT NULL,
        ended_at REAL,
        num_samples INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX operations_by_model ON operations (model_id, seq_id);
    CREATE INDEX operations_waiting ON operations (owner) WHERE state = 'waiting';
    CREATE INDEX operations_by_session ON operations (session_id, ended_at);

    CREATE TABLE samplers (
        sampler_id TEXT PRIMARY KEY,
        session_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        base_model TEXT NOT NULL,
        model_path TEXT NOT NULL,
        folder TEXT NOT NULL,
        created_at REAL NOT NULL,
        version INTEGER NOT NULL DEFAULT 0,
        num_joined INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX samplers_by_session ON samplers (session_id);

    CREATE TABLE checkpoints (
        path TEXT PRIMARY KEY,
        model_id TEXT NOT NULL,
        owner TEXT NOT NULL,
        kind TEXT NOT NULL,
        name TEXT NOT NULL,
        folder TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL,
        is_public INTEGER NOT NULL DEFAULT 0,
        metadata TEXT NOT NULL,
        spec TEXT NOT NULL,
        base_model TEXT NOT NULL
    );
    CREATE INDEX checkpoints_by_owner ON checkpoints (owner, created_at);
    CREATE INDEX checkpoints_by_model ON checkpoints (model_id)
    """,
    """
    CREATE TABLE usage (
        owner TEXT PRIMARY KEY,
        since REAL NOT NULL,
        num_tokens INTEGER NOT NULL
    )
    """,
)
