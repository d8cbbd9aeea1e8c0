"""Results on disk: the folder of one evaluation, with its `results.jsonl` and `metadata.json`.

Parts: `ResultsFolder` (append rows, replace the metadata, read both). Invariants: a row is appended
whole or not at all, and metadata is replaced by rename, so a process that is killed leaves at most one broken last
line; a disk that fills up costs the rows that did not fit and none before; one process writes to a folder at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.evals.output import json_line
from mettle.storage.plain_json import as_json

RESULTS, METADATA = "results.jsonl", "metadata.json"
NOT_ON_DISK = ("date", "path_to_save")


class ResultsFolder:
    """The folder of one evaluation. The file of results stays open from the first row to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    @property
    def results(self) -> Path:
        """The file of rows."""
        return self.path / RESULTS

    def is_there(self) -> bool:
        """True when an evaluation was saved here."""
        return self.results.is_file() and (self.path / METADATA).is_file()

    def append(self, outputs: Iterable[Mapping[str, Any]]) -> None:
        """Add rows.

        Raises: StorageError when they cannot be written; none of them is in the file then.
        """
        data = "".join(json_line(output) for output in outputs).encode()
        try:
            file = self._open()
            end = os.fstat(file).st_size
            try:
                _write_all(file, data)
            except OSError:
                os.ftruncate(file, end)
                raise
        except OSError as error:
            raise StorageError(f"cannot write {self.results}: {error.strerror}; rows before are safe") from error

    def close(self) -> None:
        """Let go of the file of results; a later row opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def claim(self) -> None:
        """Be the one process that writes here.

        Raises: UserError when another one does.
        """
        try:
            self._open()
        except OSError as error:
            raise StorageError(f"cannot write {self.results}: {error.strerror}") from error

    def replace_lines(self, lines: Iterable[bytes]) -> None:
        """Make the file hold exactly these lines, each of which ends in a newline."""
        temporary = self.path / f".{RESULTS}.tmp"
        try:
            with temporary.open("wb") as file:
                file.writelines(lines)
            temporary.replace(self.results)
        except OSError as error:
            raise StorageError(f"cannot write {self.results}: {error.strerror}; it is as it was") from error
        self.close()
        self.claim()

    def lines(self) -> Iterator[bytes]:
        """The lines of the file of results as they are."""
        try:
            with self.results.open("rb") as file:
                yield from file
        except OSError as error:
            raise StorageError(f"cannot read {self.results}: {error.strerror}") from error

    def read_rows(self) -> list[dict[str, Any]]:
        """The rows that can be read, all at once; see `reader` for a way that keeps none in memory."""
        return [row for line in self.lines() if (row := parsed_row(line)) is not None]

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata."""
        kept = {key: value for key, value in metadata.items() if key not in NOT_ON_DISK}
        text = json.dumps(kept, ensure_ascii=True, default=as_json, indent=2) + "\n"
        temporary = self.path / f".{METADATA}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / METADATA)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / METADATA}: {error.strerror}") from error

    def read_metadata(self) -> dict[str, Any]:
        """The metadata as it was saved.

        Raises: UserError when there is none that can be read.
        """
        try:
            metadata = json.loads((self.path / METADATA).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{self.path / METADATA} cannot be read: {why}") from error
        if not isinstance(metadata, dict):
            raise UserError(f"{self.path / METADATA} is not a JSON object")
        return metadata

    def _open(self) -> int:
        if self._file is None:
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.results, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                # A lock of this process alone: a worker that was forked from it and outlives it holds nothing.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(file)
                raise UserError(
                    f"{self.path} is being written to by another process; wait for it, or stop it"
                ) from error
            self._file = file
        return self._file


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None for one that was cut short or is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def new_results_path(env_id: str, model: str, output_dir: Path | None = None) -> Path:
    """Where a new evaluation is saved: beside the environment's source when that is here, as its authors expect."""
    home = Path("environments") / env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")
    base = output_dir or (home if home.is_dir() else Path()) / "outputs" / "evals"
    return base / f"{env_id.replace('/', '--')}--{model.replace('/', '--')}" / os.urandom(4).hex()
