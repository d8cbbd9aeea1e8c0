"""The files of leased work at the Hub: what a machine gets with it, and what it hands in.

Parts: `work_folder`, `open_stored`, `inputs_of`, `receive`. A machine keeps the work's folder and hands
in what changes, so that the folder at the Hub is that of a process here which was killed a moment ago: readers and
whoever takes the work next need to know nothing more. A file grows at its end (`append`) or is replaced (`whole`); a
database comes as a snapshot and goes into the one that is there in a transaction of SQLite's. Invariants: nothing is
read or written but what belongs to the job, by names that are looked at; a symbolic link is never followed.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from mettle.errors import StorageError
from mettle.hub.evaluating.outcome import evaluation_folder
from mettle.hub.lab import Lab
from mettle.hub.machines.work_files import Mode, is_work_file, snapshot
from mettle.hub.training.jobs import TrainingJob
from mettle.storage.files import storage_errors
from mettle.storage.ledger_copy import damage_of_ledger
from mettle.storage.run_dir import RunDir
from mettle.web.problems import HttpError

MAX_FILE_BYTES: Final = 64 << 30


def work_folder(lab: Lab, job: TrainingJob) -> Path:
    """Where the work's files lie at the Hub."""
    return evaluation_folder(lab.folder, job.id)


@contextmanager
def open_stored(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A file of the work; of a database what is committed. Raises: HttpError 404 for one that is not there."""
    path = _place(folder, name)
    if not path.is_file() or path.is_symlink():
        raise HttpError(404, f"this work has no file {name[:200]!r}")
    if not name.endswith(".db"):
        with path.open("rb") as file:
            yield file
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".out.", suffix=".part") as copy:
        snapshot(path, Path(copy.name))
        yield copy.file  # type: ignore[misc]


def inputs_of(job: TrainingJob) -> dict[str, Path]:
    """What a machine needs that only the Hub has: the model directory, or a run's model and one version of it."""
    order = job.config
    if order.get("version"):
        run, number = RunDir(Path(order["version"][0])), int(order["version"][1])
        return _files_of(run.model, "run/model") | _files_of(run.version(number), f"run/weights/v{number}")
    settings = order.get("settings") or {}
    if settings.get("api_base_url") or settings.get("provider"):
        return {}
    return _files_of(Path(str(settings.get("model"))), "model")


def needs_torch(job: TrainingJob) -> bool:
    """Whether the machine serves the model itself."""
    return bool(inputs_of(job))


def _files_of(folder: Path, name: str) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {
        f"{name}/{path.relative_to(folder).as_posix()}": path for path in sorted(folder.rglob("*")) if path.is_file()
    }


def receive(folder: Path, name: str, data: bytes, *, offset: int, size: int, mode: Mode) -> bool:
    """Take a piece of a file that is to have `size` bytes. True when the file is whole with it.

    Raises: HttpError 409 for a piece that does not go on where the file ends, 422 for a name that is none or a damaged
    database; StorageError when the disk refuses.
    """
    target = _place(folder, name)
    if size > MAX_FILE_BYTES or offset + len(data) > size:
        raise HttpError(422, f"a file has at most {MAX_FILE_BYTES >> 30} GiB, and no more than it says", param="size")
    written = target if mode == "append" else target.with_name(f".{target.name}.part")
    with storage_errors(target, "writing"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if written.is_symlink():
            raise HttpError(422, f"{name[:200]!r} is a link here", param="path")
        with written.open("r+b" if written.exists() else "w+b") as file:
            has = file.seek(0, os.SEEK_END)
            if mode == "whole" and offset == 0:
                file.truncate(0)
                has = file.seek(0)
            if has != offset:
                raise HttpError(409, f"{name[:200]} has {has} bytes here, not {offset}", code="wrong_offset")
            file.write(data)
        if offset + len(data) < size:
            return False
        if mode == "whole":
            if name.endswith(".db"):
                _put_database(written, target)
            else:
                os.replace(written, target)
    return True


def _put_database(new: Path, target: Path) -> None:
    """Give a database the content of another, whole or not at all, while others read it."""
    if damage := damage_of_ledger(new):
        new.unlink(missing_ok=True)
        raise HttpError(422, f"this database is damaged: {damage}", param="path")
    if not target.exists():
        os.replace(new, target)
        return
    try:
        with closing(sqlite3.connect(new)) as source, closing(sqlite3.connect(target, timeout=20)) as there:
            source.backup(there)
    except sqlite3.Error as error:
        raise StorageError(f"cannot write {target}: {error}") from error
    new.unlink()


def _place(folder: Path, name: str) -> Path:
    """Raises: HttpError 422 for a name that no file of the work has."""
    path = folder / name
    if not is_work_file(name) or not path.parent.resolve().is_relative_to(folder.resolve()):
        raise HttpError(422, f"{name[:200]!r} is no file of this work", param="path")
    return path
