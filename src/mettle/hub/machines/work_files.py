"""Which files of a folder go with the work, and how a database is copied: the same at the Hub and on a machine."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final, Literal

from mettle.errors import StorageError
from mettle.hub.evaluating.source import LOG

MAX_PIECE_BYTES: Final = 8 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_@+=,~%-][A-Za-z0-9_@+=,~%. -]{0,199}")
_ASIDE: Final = ("-wal", "-shm", "-journal")
Mode = Literal["append", "whole"]


def is_work_file(path: str) -> bool:
    """Whether a file of an evaluation's folder goes with the work: its log and its results."""
    parts = path.split("/")
    if len(parts) > 12 or not all(_NAME.fullmatch(part) for part in parts) or path.endswith(_ASIDE):
        return False
    return path == LOG or (parts[0] == "results" and len(parts) > 1)


def stored_files(folder: Path) -> dict[str, int]:
    """The files of a work's folder that go with it, and their sizes in bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if is_work_file(name) and path.is_file() and not path.is_symlink():
            found[name] = path.stat().st_size
    return found


def snapshot(database: Path, target: Path) -> None:
    """Write what is committed in a SQLite database into one file without a log beside it. Raises: StorageError."""
    try:
        with (
            closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")
    except sqlite3.Error as error:
        raise StorageError(f"cannot copy {database}: {error}") from error
