"""The published files of an evaluation: `results.jsonl` and `metadata.json`, as verifiers writes them.

Parts: `ResultsFolder` (write both, read both), `publish`, `parsed_row`. Invariant: a file is replaced by rename, so
whoever reads finds all of an old one or all of a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from mettle.errors import StorageError, UserError
from mettle.evals.described import complaint, well_formed
from mettle.evals.output import json_line
from mettle.storage.plain_json import as_json, read_json

RESULTS, METADATA = "results.jsonl", "metadata.json"
NOT_ON_DISK = ("date", "path_to_save")


class EvaluationLike(Protocol):
    """What is published."""

    metadata: dict[str, Any]

    def rows(self) -> Iterator[dict[str, Any]]: ...


class ResultsFolder:
    """The published files in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._aside: IO[str] | None = None

    @property
    def results(self) -> Path:
        """The file of rows."""
        return self.path / RESULTS

    def is_there(self) -> bool:
        """True when an evaluation was published here."""
        return self.results.is_file() and (self.path / METADATA).is_file()

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row aside, where nobody reads it before `publish`. Raises: StorageError."""
        with self._storage_errors(RESULTS):
            if self._aside is None:
                self.path.mkdir(parents=True, exist_ok=True)
                self._aside = (self.path / f".{RESULTS}.tmp").open("w", encoding="utf-8")
            self._aside.write(json_line(row))

    def publish(self, metadata: Mapping[str, Any]) -> None:
        """Put what was added in the place of what was here. Raises: StorageError; the files are as they were then."""
        kept = {key: value for key, value in metadata.items() if key not in NOT_ON_DISK}
        with self._storage_errors(RESULTS):
            aside = self._aside or (self.path / f".{RESULTS}.tmp").open("w", encoding="utf-8")
            self._aside = None
            aside.close()
            (self.path / f".{RESULTS}.tmp").replace(self.results)
        with self._storage_errors(METADATA):
            temporary = self.path / f".{METADATA}.tmp"
            temporary.write_text(
                json.dumps(kept, ensure_ascii=True, default=as_json, indent=2) + "\n", encoding="utf-8"
            )
            temporary.replace(self.path / METADATA)

    def discard(self) -> None:
        """Forget what was added and not published."""
        if self._aside is not None:
            with suppress(OSError):
                self._aside.close()
            self._aside = None
            (self.path / f".{RESULTS}.tmp").unlink(missing_ok=True)

    def lines(self) -> Iterator[bytes]:
        """The lines of the file of results as they are."""
        try:
            with self.results.open("rb") as file:
                yield from file
        except OSError as error:
            raise StorageError(f"cannot read {self.results}: {error.strerror}") from error

    def read_metadata(self) -> dict[str, Any]:
        """The metadata as it was saved, without fields that have no shape that could mean something.

        Raises: UserError when there is none that can be read.
        """
        return self.described()[0]

    def described(self) -> tuple[dict[str, Any], str | None]:
        """`read_metadata`, and what of it was passed over, in words. Raises: as it does."""
        try:
            metadata = read_json((self.path / METADATA).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{self.path / METADATA} cannot be read: {why}") from error
        if not isinstance(metadata, dict):
            raise UserError(f"{self.path / METADATA} is not a JSON object")
        kept, names = well_formed(metadata)
        return kept, f"{self.path / METADATA}: {complaint(metadata, names)}; passed over" if names else None

    @contextmanager
    def _storage_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path / name}: {error.strerror}; what is in the store is safe"
            ) from error


def publish(evaluation: EvaluationLike, folder: Path) -> Path:
    """Write an evaluation into `folder` as other programs read it; the file of rows."""
    results = ResultsFolder(folder)
    try:
        for row in evaluation.rows():
            results.add(row)
        results.publish(evaluation.metadata)
    finally:
        results.discard()
    return results.results


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None for one that was cut short or is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
