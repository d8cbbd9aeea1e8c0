"""The Hub's database: SQLite in its folder by default, PostgreSQL where a team has one.

Parts: `HubDatabase` with `read` and `write`, `migrate`. Invariants: a block of `write` is kept whole or not at all; a
database that refuses (full, read-only, gone) is a StorageError in one line, and never a traceback.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from mettle.errors import StorageError, UserError
from mettle.hub.tables import metadata

if TYPE_CHECKING:  # what migrates is slow to import, and most starts have nothing to migrate
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

MIGRATIONS = Path(__file__).parent / "migrations"
_IMMEDIATE = "is_write"
_WAIT_MS = 20_000


class HubDatabase:
    """A pool of connections to one database. Raises: UserError for an address that nothing here understands."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self.engine = create_engine(url, **_arguments(url))
        except (ArgumentError, NoSuchModuleError) as error:
            raise UserError(
                f"database {url!r} is no address: write it like postgresql+psycopg://me@host/hub"
            ) from error
        if self.is_sqlite:
            event.listen(self.engine, "connect", _prepare)
            event.listen(self.engine, "begin", _begin)

    @classmethod
    def in_folder(cls, folder: Path) -> HubDatabase:
        """The SQLite database of a Hub's folder."""
        return cls(f"sqlite:///{(folder / 'hub.db').resolve()}")

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection that sees one state of the database. Raises: StorageError when the database refuses."""
        with self._refusals(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction: kept when the block ends well. Raises: StorageError when the database refuses."""
        with self._refusals(), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A connection that sees one state in all of its statements, while others write."""
        with self._refusals(), self.engine.connect() as connection:
            if not self.is_sqlite:  # a transaction of SQLite's always does
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @staticmethod
    def schema(connection: Connection) -> str:
        """The revision that the tables stand at."""
        from alembic.runtime.migration import MigrationContext

        return str(MigrationContext.configure(connection).get_current_revision() or "")

    @staticmethod
    def newest_schema() -> str:
        """The revision that this release has: that of the newest file, each of which is named after its own."""
        return max(path.stem for path in (MIGRATIONS / "versions").glob("v[0-9]*.py"))[1:5]

    def migrate(self, to: str = "head") -> None:
        """Bring the schema to that of this release, or to an earlier one where there is none yet.

        Raises: StorageError for one of a later release.
        """
        if to == "head" and self._is_newest():
            return
        from alembic.runtime.environment import EnvironmentContext

        config, script = _script()

        def upgrade(revision: Any, context: MigrationContext) -> Any:
            known = {each.revision for each in script.walk_revisions()}
            for own in context.get_current_heads():
                if own not in known:
                    raise StorageError(
                        f"the database is of a later release of Mettle (its schema is {own}): update Mettle"
                    )
            return script._upgrade_revs(to, revision)

        with self.write() as connection, EnvironmentContext(config, script, fn=upgrade) as environment:
            environment.configure(connection=connection, target_metadata=metadata, transactional_ddl=False)
            environment.run_migrations()

    def _is_newest(self) -> bool:
        try:
            with self.engine.connect() as c:
                found = c.exec_driver_sql("SELECT version_num FROM alembic_version").all()
        except DBAPIError:
            return False  # there is no such table, or no database; the migration says what is wrong
        return [row[0] for row in found] == [self.newest_schema()]

    def close(self) -> None:
        """Let go of all connections."""
        self.engine.dispose()

    @property
    def _writer(self) -> Engine:
        return self.engine.execution_options(**{_IMMEDIATE: True})

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            # What a statement says wrong is our mistake and stays an exception of its own.
            if type(error).__name__ not in ("OperationalError", "InternalError"):
                raise
            said = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
            hint = "; nothing of this request is kept: free some space" if "full" in said or "space" in said else ""
            raise StorageError(f"the Hub's database refused: {said}{hint}") from error


def _script() -> tuple[Config, ScriptDirectory]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config, ScriptDirectory.from_config(config)


def _arguments(url: str) -> dict[str, Any]:
    if url.startswith("sqlite"):
        return {"connect_args": {"check_same_thread": False, "timeout": _WAIT_MS / 1000}, "pool_size": 16}
    return {"pool_pre_ping": True, "pool_size": 16, "isolation_level": "READ COMMITTED"}


def _prepare(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says so (`_begin`)
    for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", f"busy_timeout = {_WAIT_MS}"):
        connection.execute(f"PRAGMA {setting}")


def _begin(connection: Connection) -> None:
    """A writer takes the lock at once: two that read first and write then would refuse each other."""
    is_write = connection.get_execution_options().get(_IMMEDIATE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")
