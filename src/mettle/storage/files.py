"""Writing files so that a reader, or a process started after a kill, sees all of one or none of it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mettle.errors import StorageError


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an operating system's refusal into one line that names the path and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(_existing(path)).free
            raise StorageError(
                f"no space left while {doing} {path} ({free / 2**20:.0f} MiB free); nothing is lost: "
                "free some space and resume the run"
            ) from error
        raise StorageError(f"{doing} {path}: {error.strerror or error}") from error


def write_atomic(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Write aside and rename. `is_durable` also survives a power cut (fsync of the file and its folder)."""
    with storage_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        if is_durable:
            sync_folder(path.parent)


def write_json(path: Path, value: Any, *, is_durable: bool = False) -> None:
    """`write_atomic` of a JSON document."""
    write_atomic(path, json.dumps(value, indent=2).encode() + b"\n", is_durable=is_durable)


@contextmanager
def folder_aside(final: Path) -> Iterator[Path]:
    """A scratch folder beside `final` that takes its name when the block ends well, replacing what stood there."""
    with storage_errors(final, "writing"):
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}."))
        try:
            yield scratch
            if final.exists():
                old = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.old."))
                os.replace(final, old / "old")
                os.replace(scratch, final)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(scratch, final)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise


def sync_folder(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
