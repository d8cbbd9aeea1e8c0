"""A folder that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from mettle.errors import StorageError, UserError

LOCK = ".writer.lock"


class FolderClaim:
    """Holds `folder` until `release`, or until the process is gone: the kernel gives back the lock of the dead.

    Raises: UserError when another process writes there, StorageError when nobody can.
    """

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot write to {folder}: {error.strerror}") from error
        try:
            # A lock of this process alone: a worker that was forked from it and outlives it holds nothing.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise UserError(f"{folder} is being written to by another process; wait for it, or stop it") from error
        self._file = file

    def release(self) -> None:
        """Let another process write; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
