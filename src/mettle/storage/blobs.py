"""Blobs: bytes that are named by their SHA-256, in a folder.

Parts: `BlobStore`, `BlobWriter`. Invariants: a blob is whole or not there, also after a kill -9 or a power cut; it
never changes; what is being written stands under another name and goes away when its writer does.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Final

from mettle.errors import StorageError, UserError
from mettle.storage.files import is_disk_full, sync_folder

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_INCOMING: Final = "incoming"


class BlobWriter:
    """One blob on its way in."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Add bytes. Raises: StorageError when the disk takes no more."""
        with _refusals("storing a blob"):
            self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    @property
    def sha256(self) -> str:
        """Hex digest of what has come so far."""
        return self._digest.hexdigest()


class BlobStore:
    """The blobs under a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def incoming(self) -> Iterator[tuple[BlobWriter, Path]]:
        """A writer and the file behind it; the file is gone after the block unless it was kept by `keep`.

        Raises: StorageError when the disk refuses.
        """
        folder = self.folder / _INCOMING
        path = folder / token_hex(16)
        try:
            with _refusals("storing a blob"):
                folder.mkdir(parents=True, exist_ok=True)
                file = path.open("wb")
            with file:
                yield BlobWriter(file), path
        finally:
            path.unlink(missing_ok=True)

    def keep(self, writer: BlobWriter, path: Path, wanted: str) -> str:
        """Give what was written its name. Raises: UserError when it is not the blob that was announced."""
        found = writer.sha256
        if found != wanted:
            raise UserError(
                f"the bytes that came have SHA-256 {found}, and {wanted} was announced; send the file again"
            )
        final = self.folder_path(found)
        with _refusals("storing a blob"):
            writer._file.flush()
            os.fsync(writer._file.fileno())
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)
            sync_folder(final.parent)
        return found

    def add(self, data: bytes) -> str:
        """Store bytes; returns their name."""
        with self.incoming() as (writer, path):
            writer.write(data)
            return self.keep(writer, path, writer.sha256)

    def path(self, sha256: str) -> Path:
        """Where a blob lies, or would."""
        return self.folder_path(sha256)

    def folder_path(self, sha256: str) -> Path:
        """Its place in the folder. Raises: UserError for what is no digest."""
        if not _DIGEST.fullmatch(sha256):
            raise UserError(f"{sha256[:80]!r} is no SHA-256: 64 hexadecimal digits are")
        return self.folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """True when the blob is there."""
        return self.path(sha256).is_file()

    def sweep(self, known: set[str], *, older_than_s: float = 3600.0) -> int:
        """Remove what nobody refers to and nobody has touched for so long; returns how many files went."""
        old = time.time() - older_than_s
        gone = 0
        for path in self.folder.glob("*/*") if self.folder.is_dir() else ():
            if path.name not in known and path.stat().st_mtime < old:
                path.unlink(missing_ok=True)
                gone += 1
        return gone


@contextmanager
def _refusals(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise StorageError(f"no space left while {doing}; nothing of it is kept: free some space") from error
        raise StorageError(f"{doing}: {error.strerror or error}") from error
