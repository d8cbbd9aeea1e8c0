"""SQLite as every room uses it: WAL, one transaction at a time, errors as one line, migrations in order.

Parts: `Database`; `transaction_soon`, for coroutines: the event loop goes on while another process writes.
Committed work survives a kill -9 of any process (WAL, synchronous=NORMAL); after a power cut the newest transactions
may be missing, never half of one.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from mettle.errors import StorageError
from mettle.storage.files import FULL_BYTES

BUSY_TIMEOUT_S = 180.0
"""Longer than it takes a supervisor to end a process that was frozen, or blocked, in the middle of a transaction."""
READ_TIMEOUT_S = 1.0
RETRY_S = 0.02


class DatabaseBusy(StorageError):
    """Another process is writing, and this connection is not one that waits for that."""


class Database:
    """One connection to one SQLite file. Safe to share between threads: calls are serialised by a lock."""

    def __init__(
        self, path: Path, migrations: Sequence[str], *, is_read_only: bool = False, is_blocking: bool = True
    ) -> None:
        self.path = path
        self._is_blocking = is_blocking
        self._lock = threading.RLock()
        self._depth = 0
        with self._storage_errors():
            if is_read_only:
                if not path.exists():
                    raise StorageError(f"there is no database at {path}")
                self._connection = sqlite3.connect(
                    f"file:{path}?mode=ro",
                    uri=True,
                    timeout=BUSY_TIMEOUT_S,
                    check_same_thread=False,
                    isolation_level=None,
                )
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(
                    path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
                )
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=NORMAL")
                if not is_blocking:
                    # Moving the log into the database waits for the disk; the processes that may wait do that.
                    self._connection.execute("PRAGMA wal_autocheckpoint=0")
            self._connection.row_factory = sqlite3.Row
            if not is_read_only:
                self._migrate(migrations)
            if not is_blocking:
                self._set_timeout(READ_TIMEOUT_S)

    @property
    def is_writing(self) -> bool:
        """True inside of a transaction, for which every other process that writes waits. Any thread may ask."""
        with suppress(sqlite3.ProgrammingError):  # it is closed
            return self._connection.in_transaction
        return False

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Nested blocks join the outermost one.

        Raises: DatabaseBusy at once, where the connection does not block and another process is writing.
        """
        with self._lock, self._storage_errors():
            if self._depth == 0:
                self._begin()
            self._depth += 1
            try:
                yield self._connection
            except BaseException:
                self._depth -= 1
                if self._depth == 0 and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self._connection.execute("COMMIT")

    def rows(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._lock, self._storage_errors():
            return self._connection.execute(sql, parameters).fetchall()

    def row(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Row | None:
        """The first row of a query, or None."""
        with self._lock, self._storage_errors():
            found: sqlite3.Row | None = self._connection.execute(sql, parameters).fetchone()
            return found

    def value(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> Any:
        """The first column of the first row, or None."""
        found = self.row(sql, parameters)
        return None if found is None else found[0]

    def _begin(self) -> None:
        if self._is_blocking:
            self._connection.execute("BEGIN IMMEDIATE")
            return
        self._set_timeout(0.0)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise DatabaseBusy(f"{self.path} is being written by another process") from error
            raise
        finally:
            self._set_timeout(READ_TIMEOUT_S)

    def _set_timeout(self, seconds: float) -> None:
        self._connection.execute(f"PRAGMA busy_timeout={int(seconds * 1000)}")

    def _migrate(self, migrations: Sequence[str]) -> None:
        # The version is read again inside the transaction: several processes may open a new file at once.
        if self.value("PRAGMA user_version") == len(migrations):
            return
        with self.transaction() as connection:
            current = connection.execute("PRAGMA user_version").fetchone()[0]
            if current > len(migrations):
                raise StorageError(
                    f"{self.path} was written by a newer Mettle (schema {current}); upgrade Mettle to open it"
                )
            for number, script in enumerate(migrations[current:], start=current + 1):
                for statement in filter(None, (part.strip() for part in script.split(";"))):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number}")

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            text = str(error)
            # Where the disk is full, writing the index of the WAL fails as an input/output error.
            is_io_error = "I/O" in text and shutil.disk_usage(self.path.parent).free < FULL_BYTES
            if "full" in text or is_io_error:
                raise StorageError(
                    f"no space left while writing {self.path}; nothing committed is lost: "
                    "free some space and resume the run"
                ) from error
            raise StorageError(f"database {self.path}: {text}") from error
        except sqlite3.DatabaseError as error:
            raise StorageError(f"database {self.path}: {error}") from error


@asynccontextmanager
async def transaction_soon(database: Database) -> AsyncIterator[sqlite3.Connection]:
    """`transaction` for a coroutine whose loop must not stand while another process writes.

    The block must not await: whatever it decides and writes is one step for everybody else on the loop.
    """
    while True:
        transaction = database.transaction()
        try:
            connection = transaction.__enter__()
            break
        except DatabaseBusy:
            await asyncio.sleep(RETRY_S)
    try:
        yield connection
    except BaseException as error:
        if not transaction.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        transaction.__exit__(None, None, None)
