"""The copy of a run's ledger, from which it is restored when its own file is damaged or gone.

SQLite's backup makes it in one piece while other processes write; it appears by rename, so that there is always a
whole one. A copy takes as long as the ledger is large: `LedgerCopier` spaces them so that they cost a bounded share of
the time, however long the run. Invariant: restoring never deletes: the damaged file is set aside.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from mettle.errors import StorageError
from mettle.storage.files import storage_errors

SPACING = 50.0
"""A copy that took t seconds is followed by none for this many times t: at most 2 % of the time goes into copies."""


class LedgerCopier:
    """Makes the copy of `ledger` when one is due; `step` is the checkpoint that the newest copy belongs to."""

    def __init__(self, ledger: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._next = float("-inf")
        self.step: int | None = None

    def copy(self, step: int) -> None:
        """Called after the checkpoint of `step` is written."""
        started = self._clock()
        if started < self._next:
            return
        copy_ledger(self._ledger, copy_of(self._ledger))
        self.step = step
        now = self._clock()
        self._next = now + SPACING * (now - started)


def copy_of(ledger: Path) -> Path:
    """Where the copy of a ledger lies."""
    return ledger.with_name(ledger.name + ".copy")


def copy_ledger(ledger: Path, final: Path) -> None:
    """Copy what is committed now; the copy appears by rename."""
    aside = final.with_name(f".{final.name}.aside")
    with storage_errors(final, "copying the ledger to"):
        aside.unlink(missing_ok=True)
        try:
            source, target = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True), sqlite3.connect(aside)
            try:
                source.backup(target)
                target.execute("PRAGMA journal_mode=DELETE")
            finally:
                source.close()
                target.close()
        except sqlite3.Error as error:
            aside.unlink(missing_ok=True)
            raise StorageError(f"cannot copy {ledger}: {error}") from error
        os.replace(aside, final)


def damage_of_ledger(ledger: Path) -> str | None:
    """What is wrong with a ledger's file, in a few words; None when it is whole."""
    if not ledger.exists():
        return "it is gone"
    connection = sqlite3.connect(ledger)
    try:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        return None if found == "ok" else str(found).splitlines()[-1]
    except sqlite3.DatabaseError as error:
        return str(error)
    finally:
        connection.close()


def restore_ledger(ledger: Path) -> None:
    """Put the copy in the ledger's place. Raises: StorageError when there is none that is whole."""
    copy = copy_of(ledger)
    damage = damage_of_ledger(copy)
    if damage is not None:
        raise StorageError(f"its copy {copy.name} cannot take its place: {damage}")
    with storage_errors(ledger, "restoring"):
        for suffix in ("", "-wal", "-shm"):  # what the log of the damaged file says must not reach the new one
            path = ledger.with_name(ledger.name + suffix)
            if path.exists():
                os.replace(path, ledger.with_name(f"{ledger.name}.damaged{suffix}"))
        fresh = ledger.with_name(f".{ledger.name}.restored")
        fresh.write_bytes(copy.read_bytes())
        os.replace(fresh, ledger)
