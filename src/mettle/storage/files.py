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

from mettle.errors import MettleError, StorageError

SHORT_WRITE = "unexpected pos"
"""How torch's archive writer tells that the disk took fewer bytes than it was given."""

FULL_BYTES = 64 * 2**10
"""A disk with less than this is full."""


@contextmanager
def storage_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn an operating system's refusal into one line that names the path and says what to do."""
    try:
        yield
    except MettleError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise StorageError(
                f"no space left while {doing} {path}; nothing is lost: free some space and resume the run"
            ) from error
        if isinstance(error, OSError):
            raise StorageError(f"{doing} {path}: {error.strerror or error}") from error
        raise


def is_disk_full(error: BaseException, place: Path | None = None) -> bool:
    """True when an error comes from a full disk.

    Writers outside Python (safetensors, torch) keep the kernel's words at best and an unrelated complaint at worst, so
    that it also counts when there is nothing free at `place` right now.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_said = os.strerror(errno.ENOSPC) in str(error) or SHORT_WRITE in str(error)
    return is_said or (place is not None and shutil.disk_usage(place).free < FULL_BYTES)


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
        except BaseException as error:
            # Asked before the scratch folder goes, which frees what it took.
            is_full = not isinstance(error, MettleError) and is_disk_full(error, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            if is_full and isinstance(error, Exception) and not isinstance(error, OSError):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Another name for a file that is never written to again; a copy where the disk allows no second name."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


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
