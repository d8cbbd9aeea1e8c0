"""The published files of an evaluation: `results.jsonl` and `metadata.json`, as verifiers writes them.

Parts: `ResultsFolder` (write both, read both), `parsed_row`. Invariant: a file is replaced by rename, so whoever reads
finds all of an old one or all of a new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.storage.plain_json import as_json

RESULTS, METADATA = "results.jsonl", "metadata.json"
NOT_ON_DISK = ("date", "path_to_save")


class ResultsFolder:
    """The published files in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def results(self) -> Path:
        """The file of rows."""
        return self.path / RESULTS

    def is_there(self) -> bool:
        """True when an evaluation was published here."""
        return self.results.is_file() and (self.path / METADATA).is_file()

    def write(self, lines: Iterable[str], metadata: Mapping[str, Any]) -> None:
        """Publish rows (lines of JSON) and what they are of. Raises: StorageError; the files are as they were then."""
        kept = {key: value for key, value in metadata.items() if key not in NOT_ON_DISK}
        self._replace(RESULTS, lines)
        self._replace(METADATA, [json.dumps(kept, ensure_ascii=True, default=as_json, indent=2) + "\n"])

    def lines(self) -> Iterator[bytes]:
        """The lines of the file of results as they are."""
        try:
            with self.results.open("rb") as file:
                yield from file
        except OSError as error:
            raise StorageError(f"cannot read {self.results}: {error.strerror}") from error

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

    def _replace(self, name: str, lines: Iterable[str]) -> None:
        temporary = self.path / f".{name}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(lines)
            temporary.replace(self.path / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(
                f"cannot write {self.path / name}: {error.strerror}; what is in the store is safe"
            ) from error


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None for one that was cut short or is no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
