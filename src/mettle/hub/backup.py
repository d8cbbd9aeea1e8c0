"""Backup and restore: a Hub as one file, taken while its server runs.

The file is a tar: what the blobs, the pushed results and the hosted runs hold, then a JSON line for each row of each
table, then `manifest.json` with the SHA-256 of everything before it. All rows are read in one transaction, so that they
are of one moment; a blob never changes, and of a result's samples exactly the bytes are taken that its row counts.
The rows name no kind of database: a backup of SQLite goes back into PostgreSQL, and the other way round.
Invariants: a backup appears under its name when it is whole and was read back; a restore changes nothing that is there,
and puts a folder in place when all of it has been checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, text

import mettle
from mettle.errors import StorageError, UserError
from mettle.evals.results import METADATA, RESULTS
from mettle.hub import tables
from mettle.hub.database import HubDatabase
from mettle.hub.lab import Lab
from mettle.hub.registry.catalogue import READY
from mettle.hub.training.jobs import OVER
from mettle.storage.blobs import BlobStore
from mettle.storage.files import folder_aside, storage_errors, sync_folder
from mettle.storage.object_blobs import ObjectBlobStore

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_PIECE_BYTES: Final = 1 << 20
_ROWS: Final = 500
_OWN: Final = ("hub.db", "hub.db-wal", "hub.db-shm")


@dataclass(slots=True)
class BackupManifest:
    """What a backup has: the schema of its rows, how many there are, and the digest of each file in it."""

    schema: str
    made_at: float
    version: str = mettle.__version__
    num_rows: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    format: int = FORMAT

    @classmethod
    def read(cls, data: bytes) -> BackupManifest:
        """Raises: UserError for one of another format."""
        try:
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise UserError(f"this backup has format {found['format']}, and this release reads {FORMAT}: update it")
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"this is no backup of a Hub: its {MANIFEST} cannot be read ({error})") from error


def back_up(lab: Lab, path: Path, *, with_runs: bool = True) -> BackupManifest:
    """Write a Hub to `path`, which must not be there yet; its server may go on. Mode 0600: it opens accounts.

    Raises: UserError when there is such a file, StorageError when the disk refuses or the Hub lacks a blob.
    """
    if path.exists():
        raise UserError(f"{path} exists; name a file that does not")
    with storage_errors(path, "writing the backup"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        part = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                    _write(lab, _BackupWriter(tar), with_runs=with_runs)
                file.flush()
                os.fsync(file.fileno())
            manifest = verify(part)
            os.link(part, path)  # unlike a renaming, never over a file that somebody else has made meanwhile
            sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
    return manifest


def verify(path: Path) -> BackupManifest:
    """Read a backup through. Raises: UserError when it is none, or not as it was written."""
    seen: dict[str, str] = {}
    manifest = None
    for entry, file in _entries(path):
        if entry == MANIFEST:
            manifest = BackupManifest.read(b"".join(_pieces(file)))
        else:
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
            seen[entry] = digest.hexdigest()
    if manifest is None:
        raise UserError(f"{path} is no whole backup of a Hub: it has no {MANIFEST}")
    wrong = sorted(set(seen.items()) ^ set(manifest.sha256.items()))
    if wrong:
        raise UserError(f"{path} is damaged: {wrong[0][0]} is not as it was written")
    return manifest


def restore(path: Path, folder: Path, *, database: str = "", blobs: str = "") -> BackupManifest:
    """Make a Hub of a backup, in a folder and a database that hold none.

    Raises: UserError when the backup is damaged, or something is there already; StorageError when the disk refuses.
    """
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; restore into a folder that is not there yet (--data)")
    manifest = verify(path)
    with storage_errors(folder, "restoring"), folder_aside(folder) as aside:
        aside.chmod(0o700)
        rows = aside / "tables"
        _unpack(path, aside)
        if blobs:
            store = ObjectBlobStore(blobs, aside / "blobs")
            for file in (aside / "blobs").glob("*/*"):
                store.send(file.name)
        opened = HubDatabase(database) if database else HubDatabase.in_folder(aside)
        try:
            _fill(opened, rows, manifest)
        finally:
            opened.close()
        for file in rows.iterdir():
            file.unlink()
        rows.rmdir()
    return manifest


class _BackupWriter:
    """Adds entries to a tar, and remembers their digests."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.sha256: dict[str, str] = {}
        self.num_bytes = 0

    def add(self, name: str, file: IO[bytes], num_bytes: int) -> None:
        """Exactly so many bytes. Raises: StorageError when the file has fewer."""
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = num_bytes, 0o600, int(time.time())
        reader = _Counted(file, num_bytes)
        try:
            self._tar.addfile(info, reader)
        except OSError as error:
            if reader.left:
                raise StorageError(f"{name} has {reader.left} bytes fewer than the Hub's database says") from error
            raise
        self.sha256[name] = reader.digest.hexdigest()
        self.num_bytes += num_bytes

    def add_path(self, name: str, path: Path, num_bytes: int | None = None) -> None:
        with path.open("rb") as file:
            self.add(name, file, os.fstat(file.fileno()).st_size if num_bytes is None else num_bytes)


class _Counted(io.RawIOBase):
    """The first bytes of a file, hashed on their way."""

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        self._file, self.left = file, num_bytes
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(self.left, size if size >= 0 else self.left))
        self.left -= len(data)
        self.digest.update(data)
        return data


def _write(lab: Lab, out: _BackupWriter, *, with_runs: bool) -> None:
    with lab.database.snapshot() as c:
        manifest = BackupManifest(lab.database.schema(c), time.time())
        if manifest.schema != lab.database.newest_schema():
            raise UserError(
                f"this Hub's tables are those of another release (schema {manifest.schema or 'none'}, here it is "
                f"{lab.database.newest_schema()}): back it up with the release that serves it"
            )
        _add_blobs(c, lab.blobs, out)
        gone = _add_results(c, lab.folder, out)
        if with_runs:
            _add_runs(c, lab.folder, out)
        for path in sorted(lab.folder.iterdir()):  # keys and settings of the Hub's own
            if path.is_file() and path.name not in _OWN and not path.name.startswith("."):
                out.add_path(f"files/{path.name}", path)
        for table in tables.metadata.sorted_tables:
            manifest.num_rows[table.name] = _add_rows(c, table, out, gone if table is tables.results else set())
    manifest.sha256, manifest.num_bytes = out.sha256, out.num_bytes
    data = json.dumps(vars_of(manifest), indent=1).encode()
    out.add(MANIFEST, io.BytesIO(data), len(data))


def vars_of(manifest: BackupManifest) -> dict[str, Any]:
    """A manifest as it is written."""
    return {name: getattr(manifest, name) for name in BackupManifest.__slots__}


def _add_blobs(c: Connection, blobs: BlobStore, out: _BackupWriter) -> None:
    r = tables.releases.c
    rows = c.execute(select(r.version, r.state, r.wheel_sha256, r.source_sha256)).all()
    wanted = {str(sha): (str(version), str(state)) for version, state, *both in rows for sha in both if sha}
    for sha, (version, state) in sorted(wanted.items()):
        if blobs.has(sha):
            out.add_path(f"blobs/{sha[:2]}/{sha}", blobs.path(sha))
        elif state == READY:
            raise StorageError(
                f"the Hub lacks the blob {sha[:12]} of a published release {version}; nothing is written"
            )


def _add_results(c: Connection, root: Path, out: _BackupWriter) -> set[str]:
    """The files of pushed results; returns those that were deleted meanwhile."""
    r, gone = tables.results.c, set()
    for result_id, num_bytes in c.execute(select(r.id, r.num_bytes).order_by(r.id)).all():
        folder = root / "results" / result_id
        try:
            if num_bytes:
                out.add_path(f"results/{result_id}/{RESULTS}", folder / RESULTS, num_bytes)
            if (folder / METADATA).exists():
                out.add_path(f"results/{result_id}/{METADATA}", folder / METADATA)
        except FileNotFoundError:
            gone.add(str(result_id))
    return gone


def _add_runs(c: Connection, root: Path, out: _BackupWriter) -> None:
    """The directories of hosted runs that are over. One that runs is a row alone: a restored Hub calls it failed."""
    j = tables.jobs.c
    for (job_id,) in c.execute(select(j.id).where(j.status.in_(OVER)).order_by(j.id)).all():
        folder = root / "runs" / job_id
        paths = [*folder.rglob("*"), folder.with_name(f"{job_id}.toml"), folder.with_name(f"{job_id}.out")]
        for path in sorted(paths):
            if path.is_file() and not path.is_symlink() and not path.name.endswith(("-wal", "-shm")):
                name = f"runs/{path.relative_to(root / 'runs').as_posix()}"
                if path.suffix == ".db":
                    _add_database(out, name, path)
                else:
                    out.add_path(name, path)


def _add_database(out: _BackupWriter, name: str, path: Path) -> None:
    """A ledger with what its log holds, though a page may be reading it."""
    with tempfile.TemporaryDirectory() as aside:
        copy = Path(aside) / "copy.db"
        source, target = sqlite3.connect(f"file:{path}?mode=ro", uri=True), sqlite3.connect(copy)
        try:
            source.backup(target)
        finally:
            source.close()
            target.close()
        out.add_path(name, copy)


def _add_rows(c: Connection, table: Table, out: _BackupWriter, gone: set[str]) -> int:
    num = 0
    with tempfile.TemporaryFile() as file:
        for row in c.execution_options(yield_per=_ROWS).execute(select(table).order_by(*table.primary_key.columns)):
            values = dict(row._mapping)
            if values.get("id") in gone:
                continue
            file.write(json.dumps(values, separators=(",", ":")).encode() + b"\n")
            num += 1
        size = file.tell()
        file.seek(0)
        out.add(f"tables/{table.name}.jsonl", file, size)
    return num


def _entries(path: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files of a backup. Raises: UserError when it is no tar, is cut off, or holds what no backup does."""
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                parts = PurePosixPath(info.name).parts
                if not info.isreg() or not parts or parts[0] == "/" or ".." in parts:
                    raise UserError(f"{path} is no backup of a Hub: it has {info.name[:80]!r}")
                file = tar.extractfile(info)
                assert file is not None, "a regular file has bytes"
                yield info.name, file
    except FileNotFoundError:
        raise UserError(f"there is no {path}") from None
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{path} is no whole backup of a Hub: {error}") from error


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    try:
        while piece := file.read(_PIECE_BYTES):
            yield piece
    except tarfile.TarError as error:
        raise UserError(f"this is no whole backup of a Hub: {error}") from error


def _unpack(path: Path, folder: Path) -> None:
    (folder / "tables").mkdir()
    for name, file in _entries(path):
        if name == MANIFEST:
            continue
        final = folder / name.removeprefix("files/")
        final.parent.mkdir(parents=True, exist_ok=True)
        with final.open("wb") as out:
            for piece in _pieces(file):
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if name.startswith("files/"):
            final.chmod(0o600)


def _fill(database: HubDatabase, rows: Path, manifest: BackupManifest) -> None:
    """The tables as they were, in one transaction, then the migrations since. Raises: UserError when there are any."""
    with _emptied_on_failure(database):
        database.migrate(manifest.schema)
        with database.write() as c:
            known = MetaData()
            known.reflect(c, only=lambda name, _: tables.is_described(name))
            for table in known.sorted_tables:
                path = rows / f"{table.name}.jsonl"
                if path.exists():
                    _insert(c, table, path)
            _advance_counters(c, database)
    database.migrate()


@contextmanager
def _emptied_on_failure(database: HubDatabase) -> Iterator[None]:
    """A PostgreSQL that the restoring of this process has begun to fill is as empty as it was when it fails."""
    with database.read() as c:
        there = inspect(c).get_table_names()
    if there:
        raise UserError(
            f"the database has tables already ({', '.join(sorted(there)[:3])}, ...); restore into an empty one"
        )
    try:
        yield
    except BaseException:
        with database.write() as c:
            made = MetaData()
            made.reflect(c, only=lambda name, _: tables.is_described(name))
            made.drop_all(c)
        raise


def _insert(c: Connection, table: Table, path: Path) -> None:
    batch: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in file:
            batch.append(json.loads(line))
            if len(batch) == _ROWS:
                c.execute(insert(table), batch)
                batch = []
    if batch:
        c.execute(insert(table), batch)


def _advance_counters(c: Connection, database: HubDatabase) -> None:
    """PostgreSQL numbers on from the rows; SQLite does so by itself."""
    if database.is_sqlite:
        return
    for table in tables.metadata.sorted_tables:
        column = table.autoincrement_column
        if column is not None:
            name = f"pg_get_serial_sequence('{table.name}', '{column.name}')"
            most = f"(SELECT coalesce(max({column.name}), 0) + 1 FROM {table.name})"
            c.execute(text(f"SELECT setval({name}, {most}, false)"))
