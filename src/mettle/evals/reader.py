"""Reading saved evaluations: which there are, the figures of each rollout, and any rollout on demand.

Parts: `EvaluationEntry` and `list_evaluations` (what is saved here), `EvaluationReader` (a lazy index over one
`results.jsonl`: byte offsets and facts; rows are read when they are asked for). Invariants: a line that cannot be read
is counted and passed over; a file that is still being written to is read up to its last whole line, and `refresh` reads
on from there; no more than one row is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.evals.facts import RolloutFacts, facts_of
from mettle.evals.report import Stats, stats_of
from mettle.evals.results import (
    METADATA,
    RESULTS,
    ResultsFolder,
    evaluation_folder,
    find_evaluations,
    parsed_row,
)


@dataclass(frozen=True, slots=True)
class EvaluationEntry:
    """One saved evaluation, by its metadata. `problem` says why there is none."""

    path: Path
    modified_at: float
    metadata: dict[str, Any]
    problem: str | None = None

    @property
    def env_id(self) -> str:
        """The environment; the folder's name where the metadata does not say it."""
        return str(self.metadata.get("env_id") or self.metadata.get("env") or self.path.parent.name)

    @property
    def model(self) -> str:
        """The model."""
        return str(self.metadata.get("model") or "?")

    @property
    def time_s(self) -> float | None:
        """How long it took; older files have milliseconds under another name."""
        if self.metadata.get("time") is not None:
            return float(self.metadata["time"])
        return float(self.metadata["time_ms"]) / 1000 if self.metadata.get("time_ms") is not None else None


def list_evaluations(root: Path = Path()) -> list[EvaluationEntry]:
    """Every evaluation under `outputs/evals` and `environments/*/outputs/evals`, the newest first."""
    return sorted(map(_entry, find_evaluations(root)), key=lambda entry: entry.modified_at, reverse=True)


class EvaluationReader:
    """One saved evaluation. `facts[i]` are the figures of rollout i, `row(i)` is the rollout itself.

    Raises: UserError when `path` holds no evaluation.
    """

    def __init__(self, path: Path) -> None:
        self.path = evaluation_folder(path)
        self.metadata = ResultsFolder(self.path).read_metadata()
        self.facts: list[RolloutFacts] = []
        self.num_broken = 0
        self._offsets: list[int] = []
        self._read_to = 0
        self.refresh()

    @property
    def entry(self) -> EvaluationEntry:
        """The evaluation as the list of them shows it."""
        return _entry(self.path)

    @property
    def rollouts_per_example(self) -> int:
        """Rollouts of each task, as it was asked for."""
        return int(self.metadata.get("rollouts_per_example") or 1)

    @property
    def pass_threshold(self) -> float:
        """The reward from which on a rollout has passed."""
        saved = self.metadata.get("pass_threshold")
        return float(saved) if isinstance(saved, int | float) else 0.5

    def __len__(self) -> int:
        return len(self.facts)

    def refresh(self) -> int:
        """Take in what was added since; how many rollouts that is. A file that became shorter is read anew."""
        results = self.path / RESULTS
        before = len(self.facts)
        try:
            if results.stat().st_size < self._read_to:
                self.facts, self._offsets, self.num_broken, self._read_to, before = [], [], 0, 0, 0
            with results.open("rb") as file:
                file.seek(self._read_to)
                for line in file:
                    if not line.endswith(b"\n") and parsed_row(line) is None:
                        break  # Being written, or cut short by a kill.
                    self._add(line)
        except OSError as error:
            raise StorageError(f"cannot read {results}: {error.strerror}") from error
        return len(self.facts) - before

    def row(self, index: int) -> dict[str, Any]:
        """Rollout `index` as it was saved. Raises: UserError when there is no such rollout."""
        if not 0 <= index < len(self._offsets):
            many = f"rollouts 0 to {len(self._offsets) - 1}" if self._offsets else "no rollouts"
            raise UserError(f"{self.path} has {many}, not {index}")
        try:
            with (self.path / RESULTS).open("rb") as file:
                file.seek(self._offsets[index])
                row = parsed_row(file.readline())
        except OSError as error:
            raise StorageError(f"cannot read {self.path / RESULTS}: {error.strerror}") from error
        if row is None:
            raise StorageError(f"{self.path / RESULTS} was rewritten while it was read; look again")
        return row

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every rollout in its order, one at a time."""
        with (self.path / RESULTS).open("rb") as file:
            for offset in self._offsets:
                file.seek(offset)
                row = parsed_row(file.readline())
                if row is not None:
                    yield row

    def search(self, text: str, is_wanted: Callable[[RolloutFacts], bool] | None = None) -> Iterator[int]:
        """Numbers of the rollouts whose conversation, answer or error holds `text`, whatever the case."""
        wanted = text.casefold()
        for index, row in enumerate(self.rows()):
            if is_wanted is not None and not is_wanted(self.facts[index]):
                continue
            said = [row.get("prompt"), row.get("completion"), row.get("answer"), row.get("info"), row.get("error")]
            if wanted in json.dumps(said, ensure_ascii=False).casefold():
                yield index

    def stats(self) -> Stats:
        """What came of it, from the rows; the price, if any, is worked back from the saved cost."""
        stats = stats_of(self.facts, rollouts_per_example=self.rollouts_per_example, pass_threshold=self.pass_threshold)
        saved = (self.metadata.get("stats") or {}).get("cost") or self.metadata.get("cost")
        if isinstance(saved, dict):
            stats["cost"] = Stats(saved)
        return stats

    def _add(self, line: bytes) -> None:
        row = parsed_row(line)
        if row is None:
            self.num_broken += bool(line.strip())
        else:
            self._offsets.append(self._read_to)
            self.facts.append(facts_of(row))
        self._read_to += len(line)


def _entry(path: Path) -> EvaluationEntry:
    file = path / METADATA
    try:
        modified_at = file.stat().st_mtime
    except OSError:
        modified_at = 0.0
    try:
        return EvaluationEntry(path, modified_at, ResultsFolder(path).read_metadata())
    except UserError as error:
        return EvaluationEntry(path, modified_at, {}, str(error))
