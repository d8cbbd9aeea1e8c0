"""Reading an evaluation: the figures of each rollout, and any rollout on demand.

Parts: `EvaluationReader`, a lazy index over one evaluation, in the store (`run.db` and shards) or as published
(`results.jsonl` and `metadata.json`, from an earlier release or another program). Invariants: figures come without
opening a conversation; what cannot be read is counted and passed over; an evaluation that is still running is read as
far as it is, and `refresh` reads on from there; no more than one rollout is in memory at a time.

A run that trains has many evaluations: `RUN` means its newest, `RUN:final` its newest of a kind, `RUN:3` that of an id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from mettle.errors import StorageError, UserError
from mettle.evals.entries import EvaluationEntry, evaluations_in, is_stored, stored_in
from mettle.evals.facts import RolloutFacts, facts_of_row, facts_of_stored
from mettle.evals.output import error_row, figures_of, output_row, record_of
from mettle.evals.passing import PassRule
from mettle.evals.report import Stats, stats_of
from mettle.evals.results import METADATA, RESULTS, ResultsFolder, parsed_row
from mettle.records.tasks import RolloutRecord
from mettle.storage.rollouts import RolloutRow, read_rollout, rollout_rows
from mettle.storage.run_dir import RunDir


def evaluation_folder(path: Path) -> Path:
    """The folder of the evaluation that a path means; see `EvaluationReader`.

    Raises: UserError when there is none.
    """
    return _located(path)[0]


class EvaluationReader:
    """One evaluation. `facts[i]` are the figures of rollout i, `record(i)` and `row(i)` the rollout itself.

    `path` is a folder, one of its published files, or a run with what of it is meant (`RUN:final`). Raises: UserError
    when it holds no evaluation.
    """

    def __init__(self, path: Path, eval_id: int | None = None) -> None:
        self.path, self.eval_id = _located(path, eval_id)
        self._rollouts: _Rollouts = _Published(self.path) if self.eval_id is None else _Stored(self.path, self.eval_id)
        self.metadata = self.entry.metadata if self.eval_id is not None else ResultsFolder(self.path).read_metadata()
        self.refresh()

    @property
    def facts(self) -> list[RolloutFacts]:
        """The figures of each rollout, in the order in which they ended."""
        return self._rollouts.facts

    @property
    def num_broken(self) -> int:
        """Lines or blocks that cannot be read."""
        return self._rollouts.num_broken

    @property
    def entry(self) -> EvaluationEntry:
        """The evaluation as the list of them shows it, as it stands now."""
        return next(entry for entry in evaluations_in(self.path) if entry.eval_id == self.eval_id)

    @property
    def rollouts_per_example(self) -> int:
        """Rollouts of each task, as it was asked for."""
        return int(self.metadata.get("rollouts_per_example") or 1)

    @property
    def pass_rule(self) -> PassRule:
        """When a rollout has passed."""
        return PassRule.of_metadata(self.metadata)

    def __len__(self) -> int:
        return len(self.facts)

    def refresh(self) -> int:
        """Take in what was added since; how many rollouts that is. What became less is read anew."""
        return self._rollouts.refresh()

    def record(self, index: int) -> RolloutRecord:
        """Rollout `index`. Raises: UserError when there is no such rollout, StorageError when it cannot be read."""
        if not 0 <= index < len(self.facts):
            many = f"rollouts 0 to {len(self.facts) - 1}" if self.facts else "no rollouts"
            raise UserError(f"{self.path} has {many}, not {index}")
        return self._rollouts.record(index)

    def row(self, index: int) -> dict[str, Any]:
        """Rollout `index` as it is published. Raises: as `record` does."""
        return output_row(self.record(index))

    def records(self) -> Iterator[tuple[int, RolloutRecord]]:
        """(number, rollout) of every rollout that can be read, one at a time."""
        for index in range(len(self.facts)):
            try:
                record = self._rollouts.record(index)
            except StorageError:
                continue
            yield index, record

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every rollout that can be read as it is published, one at a time."""
        return (output_row(record) for _, record in self.records())

    def search(self, text: str, is_wanted: Callable[[RolloutFacts], bool] | None = None) -> Iterator[int]:
        """Numbers of the rollouts whose conversation, answer or error holds `text`, whatever the case."""
        wanted = text.casefold()
        for index in self._rollouts.may_hold(wanted):
            if is_wanted is not None and not is_wanted(self.facts[index]):
                continue
            try:
                record = self._rollouts.figures(index)
            except StorageError:
                continue
            said = [record.messages, record.answer, record.info, error_row(record)]
            if wanted in json.dumps(said, ensure_ascii=False).casefold():
                yield index

    def stats(self) -> Stats:
        """What came of it, from the rollouts; the price, if any, is worked back from the saved cost."""
        rule = self.pass_rule
        stats = stats_of(
            self.facts,
            rollouts_per_example=self.rollouts_per_example,
            pass_threshold=rule.threshold,
            pass_on=rule.weights,
        )
        saved = (self.metadata.get("stats") or {}).get("cost") or self.metadata.get("cost")
        if isinstance(saved, dict):
            stats["cost"] = Stats(saved)
        return stats


class _Rollouts(Protocol):
    """Where the rollouts of one evaluation are read."""

    facts: list[RolloutFacts]
    num_broken: int

    def refresh(self) -> int: ...
    def record(self, index: int) -> RolloutRecord: ...
    def figures(self, index: int) -> RolloutRecord:
        """`record` without what only publishing it again needs."""
        ...

    def may_hold(self, wanted: str) -> Iterable[int]:
        """The rollouts that have to be looked at for a text; at least those that hold it."""
        ...


class _Stored:
    """Rollouts of the store: figures from the rows of the database, conversations from the shards."""

    def __init__(self, folder: Path, eval_id: int) -> None:
        self.facts: list[RolloutFacts] = []
        self.num_broken = 0
        self._folder, self._eval_id = folder, eval_id
        self._rows: list[RolloutRow] = []

    def refresh(self) -> int:
        database = stored_in(self._folder)
        try:
            last = self._rows[-1].number if self._rows else 0
            older = database.value(
                "SELECT count(*) FROM rollouts WHERE eval_id = ? AND rowid <= ?", (self._eval_id, last)
            )
            if older != len(self._rows):  # What had failed was run again.
                self._rows, self.facts, last = [], [], 0
            added = rollout_rows(database, self._eval_id, last)
        finally:
            database.close()
        self._rows += added
        self.facts += map(facts_of_stored, added)
        return len(added)

    def record(self, index: int) -> RolloutRecord:
        return read_rollout(RunDir(self._folder).rollouts, self._rows[index])

    figures = record

    def may_hold(self, wanted: str) -> Iterable[int]:
        return range(len(self.facts))


class _Published:
    """Rollouts of a `results.jsonl`, by the offsets of its lines."""

    def __init__(self, folder: Path) -> None:
        self.facts: list[RolloutFacts] = []
        self.num_broken = 0
        self._file = folder / RESULTS
        self._offsets: list[int] = []
        self._read_to = 0

    def refresh(self) -> int:
        before = len(self.facts)
        try:
            if self._file.stat().st_size < self._read_to:
                self.facts, self._offsets, self.num_broken, self._read_to, before = [], [], 0, 0, 0
            with self._file.open("rb") as file:
                file.seek(self._read_to)
                for line in file:
                    if not line.endswith(b"\n") and parsed_row(line) is None:
                        break  # Being written, or cut short by a kill.
                    self._add(line)
        except OSError as error:
            raise StorageError(f"cannot read {self._file}: {error.strerror}") from error
        return len(self.facts) - before

    def record(self, index: int) -> RolloutRecord:
        return record_of(self._row(index))

    def figures(self, index: int) -> RolloutRecord:
        return figures_of(self._row(index))

    def _row(self, index: int) -> dict[str, Any]:
        try:
            with self._file.open("rb") as file:
                file.seek(self._offsets[index])
                row = parsed_row(file.readline())
        except OSError as error:
            raise StorageError(f"cannot read {self._file}: {error.strerror}") from error
        if row is None:
            raise StorageError(f"{self._file} was rewritten while it was read; look again")
        return row

    def may_hold(self, wanted: str) -> Iterable[int]:
        # A plain word stands in the line as it stands in the text, unless JSON has written some of it in numbers; a
        # number alone may be written in another way.
        is_plain = wanted.isascii() and wanted.isalnum() and not wanted.isdigit()
        if not is_plain:
            yield from range(len(self.facts))
            return
        sought = wanted.encode()
        try:
            with self._file.open("rb") as file:
                for index, offset in enumerate(self._offsets):
                    file.seek(offset)
                    line = file.readline()
                    # An error is shown by words of our own.
                    if (
                        self.facts[index].cause is not None
                        or sought in line.lower()
                        or not line.isascii()
                        or b"\\u" in line
                    ):
                        yield index
        except OSError as error:
            raise StorageError(f"cannot read {self._file}: {error.strerror}") from error

    def _add(self, line: bytes) -> None:
        row = parsed_row(line)
        if row is None:
            self.num_broken += bool(line.strip())
        else:
            self._offsets.append(self._read_to)
            self.facts.append(facts_of_row(row))
        self._read_to += len(line)


def _located(path: Path, eval_id: int | None = None) -> tuple[Path, int | None]:
    """(folder, id in the store) of the evaluation that `path` means; the id is None for one that is only published."""
    folder, chosen = _folder_of(path)
    if not folder.exists() and not path.is_absolute():
        named, wanted = _folder_of("runs" / path)
        if named.exists():
            folder, chosen = named, wanted
    if is_stored(folder):
        return folder, _chosen(folder, chosen) if eval_id is None else eval_id
    if chosen or not (folder / METADATA).exists() or not (folder / RESULTS).exists():
        raise UserError(f"no evaluation in {path}: it has no {METADATA} and {RESULTS}; `mettle eval view` lists them")
    return folder, None


def _folder_of(path: Path) -> tuple[Path, str]:
    """(folder, what of it is chosen after a colon) as a path or the name of a run says it."""
    folder = path.parent if path.name in (RESULTS, METADATA, "run.db") else path
    head, _, chosen = path.name.rpartition(":")
    if folder.exists() or not head or not chosen:
        return folder, ""
    return path.with_name(head), chosen


def _chosen(folder: Path, chosen: str) -> int:
    entries = evaluations_in(folder)
    wanted = [entry for entry in entries if chosen in ("", entry.kind, str(entry.eval_id))]
    if not wanted:
        there = ", ".join(dict.fromkeys(f"{entry.kind}" for entry in entries))
        raise UserError(f"{folder} has no evaluation {chosen!r}; there are 1 to {len(entries)}: {there}")
    found = wanted[-1].eval_id
    assert found is not None, "what is stored has an id"
    return found
