"""The ledger's schema, as migrations. A script that has been released is never edited; a change is a new one."""

MIGRATIONS = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);

    CREATE TABLE tasks (
        draw_id INTEGER PRIMARY KEY,
        env_id TEXT NOT NULL,
        uid TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        example_id INTEGER NOT NULL,
        state TEXT NOT NULL DEFAULT 'pending',
        reason TEXT,
        step INTEGER,
        attempts INTEGER NOT NULL DEFAULT 0,
        updated_at REAL NOT NULL,
        UNIQUE (env_id, epoch, example_id)
    );
    CREATE INDEX tasks_by_state ON tasks (state);
    CREATE INDEX tasks_by_step ON tasks (step);

    CREATE TABLE groups (
        draw_id INTEGER PRIMARY KEY REFERENCES tasks (draw_id),
        version_at_start INTEGER NOT NULL,
        shard TEXT NOT NULL,
        offset INTEGER NOT NULL,
        length INTEGER NOT NULL,
        num_rollouts INTEGER NOT NULL,
        reward_mean REAL,
        reward_std REAL,
        created_at REAL NOT NULL
    );

    CREATE TABLE rollouts (
        rollout_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        env_id TEXT NOT NULL,
        draw_id INTEGER,
        eval_id INTEGER,
        step INTEGER,
        position INTEGER NOT NULL,
        reward REAL,
        advantage REAL,
        metrics TEXT NOT NULL,
        num_turns INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        version_min INTEGER NOT NULL,
        version_max INTEGER NOT NULL,
        stop_condition TEXT,
        is_truncated INTEGER NOT NULL,
        error_kind TEXT,
        error TEXT,
        duration_s REAL NOT NULL,
        shard TEXT NOT NULL,
        offset INTEGER NOT NULL,
        length INTEGER NOT NULL,
        created_at REAL NOT NULL
    );
    CREATE INDEX rollouts_by_step ON rollouts (kind, step);
    CREATE INDEX rollouts_by_draw ON rollouts (draw_id);
    CREATE INDEX rollouts_by_eval ON rollouts (eval_id);

    CREATE TABLE batches (
        step INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,
        num_sequences INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        staleness_mean REAL NOT NULL,
        staleness_max INTEGER NOT NULL,
        orchestrator_state TEXT NOT NULL,
        shipped_at REAL NOT NULL,
        trained_at REAL,
        weights_digest TEXT,
        trainings INTEGER NOT NULL DEFAULT 0
    );

    CREATE TABLE versions (
        version INTEGER PRIMARY KEY,
        path TEXT NOT NULL,
        digest TEXT NOT NULL,
        kind TEXT NOT NULL,
        published_at REAL NOT NULL,
        acked_at REAL,
        acked_digest TEXT,
        canary_mean REAL,
        canary_max REAL,
        update_ms REAL
    );

    CREATE TABLE evals (
        eval_id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        step INTEGER NOT NULL,
        env_id TEXT NOT NULL,
        version_min INTEGER NOT NULL,
        version_max INTEGER NOT NULL,
        num_tasks INTEGER NOT NULL,
        num_rollouts INTEGER NOT NULL,
        num_errors INTEGER NOT NULL,
        mean REAL,
        ci_low REAL,
        ci_high REAL,
        metrics TEXT NOT NULL,
        created_at REAL NOT NULL
    );

    CREATE TABLE metrics (
        name TEXT NOT NULL,
        step INTEGER NOT NULL,
        value REAL NOT NULL,
        at REAL NOT NULL,
        PRIMARY KEY (name, step)
    ) WITHOUT ROWID;

    CREATE TABLE events (
        event_id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        source TEXT NOT NULL,
        kind TEXT NOT NULL,
        message TEXT NOT NULL,
        data TEXT NOT NULL
    );

    CREATE TABLE waits (
        owner TEXT PRIMARY KEY,
        edge TEXT NOT NULL,
        awaits TEXT NOT NULL,
        since REAL NOT NULL,
        budget_s REAL NOT NULL,
        pid INTEGER NOT NULL
    );

    CREATE TABLE processes (
        name TEXT PRIMARY KEY,
        pid INTEGER,
        state TEXT NOT NULL,
        restarts INTEGER NOT NULL DEFAULT 0,
        exit_code INTEGER,
        started_at REAL,
        updated_at REAL NOT NULL
    )
    """,
    """
    ALTER TABLE evals ADD COLUMN state TEXT NOT NULL DEFAULT 'finished';
    ALTER TABLE evals ADD COLUMN model TEXT NOT NULL DEFAULT '';
    ALTER TABLE evals ADD COLUMN planned_tasks INTEGER;
    ALTER TABLE evals ADD COLUMN planned_rollouts INTEGER;
    ALTER TABLE evals ADD COLUMN metadata TEXT NOT NULL DEFAULT '{}';
    ALTER TABLE evals ADD COLUMN updated_at REAL;

    ALTER TABLE rollouts ADD COLUMN example_id TEXT;
    ALTER TABLE rollouts ADD COLUMN uid TEXT;
    ALTER TABLE rollouts ADD COLUMN error_type TEXT;
    ALTER TABLE rollouts ADD COLUMN input_tokens REAL;
    ALTER TABLE rollouts ADD COLUMN output_tokens REAL;
    ALTER TABLE rollouts ADD COLUMN model_s REAL;
    ALTER TABLE rollouts ADD COLUMN env_s REAL;
    ALTER TABLE rollouts ADD COLUMN scoring_s REAL;
    ALTER TABLE rollouts ADD COLUMN excerpt TEXT
    """,
    "DROP TABLE waits",
    "CREATE TABLE trained (draw_id INTEGER, step INTEGER, times INTEGER NOT NULL, PRIMARY KEY (draw_id, step))"
    " WITHOUT ROWID",
)
