"""Taking over a saved evaluation: what of it is kept, and what must be run (again).

Parts: `take_over` (reads and repairs the folder), `check_same` (refuses another evaluation's folder). A rollout counts
as done when it has a reward and no error. Invariants: the kept lines are byte for byte those that were written; nothing
is kept from another model, other settings or another task; the file is only rewritten when something in it must go.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mettle.errors import UserError
from mettle.evals.output import task_key_of
from mettle.evals.results import RESULTS, ResultsFolder, parsed_row

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
SAME = ("env_id", "model", "rollouts_per_example", "shuffle", "shuffle_seed")
SAME_IF_SAVED = ("env_args", "sampling_args")
NO_SAMPLING: Mapping[str, Any] = {"n": 1, "extra_body": {}}
"""Sampling arguments that every environment has, and that say nothing."""


@dataclass(slots=True)
class TakenOver:
    """What is left to run, and how many lines were kept and dropped."""

    missing: list[Row]
    num_kept: int = 0
    num_failed: int = 0
    num_broken: int = 0
    num_surplus: int = 0
    is_cut: bool = False
    changed: list[Any] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        """Lines of the file that are not taken over."""
        return self.num_failed + self.num_broken + self.num_surplus


def take_over(
    folder: ResultsFolder, inputs: Sequence[Row], keep: Callable[[dict[str, Any]], None], *, is_whole_groups: bool
) -> TakenOver:
    """Hand each finished row of `inputs` to `keep`, drop the others from the file; what remains to be run.

    With `is_whole_groups`, rollouts that are scored together are kept or repeated together.
    Raises: UserError when the dataset has changed under the evaluation.
    """
    folder.claim()
    found = TakenOver([])
    keys = {example_of(row): row for row in reversed(inputs)}
    wanted = count_by_example(inputs)
    complete = _complete_examples(folder, wanted) if is_whole_groups else None
    kept: list[bool] = []
    for row in _rows(folder, found):
        kept.append(row is not None and _is_wanted(row, wanted, keys, complete, found))
        if kept[-1] and row is not None:
            found.num_kept += 1
            keep(row)
    if found.changed:
        raise UserError(_changed(folder, found.changed))
    if not all(kept) or found.is_cut:
        folder.replace_lines(_selected(folder, kept))
    found.missing = take_wanted(inputs, wanted)
    logger.info("resumed evaluation", extra={"kept": found.num_kept, "of": len(inputs), "dropped": found.num_dropped})
    return found


def check_same(folder: ResultsFolder, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The saved metadata, unless it is that of something else; an evaluation may grow by more examples.

    Raises: UserError, one line.
    """
    saved = folder.read_metadata()
    for name in SAME:
        if name in saved and saved[name] != mine[name]:
            raise UserError(_other(folder, name, saved[name], mine[name]))
    if (saved.get("num_examples") or 0) > mine["num_examples"]:
        raise UserError(_other(folder, "num_examples", saved["num_examples"], mine["num_examples"]))
    for name in SAME_IF_SAVED:
        if saved.get(name) is None:
            continue
        before, now = (settings_of(values[name]) for values in (saved, mine))
        if before != now:
            key = next(key for key in (*before, *now) if before.get(key) != now.get(key))
            raise UserError(_other(folder, f"{name}.{key}", before.get(key), now.get(key)))
    return saved


def example_of(row: Row) -> Any:
    """The place of a row's task in its dataset."""
    return row.get("example_id", 0)


def count_by_example(rows: Iterable[Row]) -> dict[Any, int]:
    """How many rows each task has."""
    counts: dict[Any, int] = {}
    for row in rows:
        counts[example_of(row)] = counts.get(example_of(row), 0) + 1
    return counts


def take_wanted(rows: Sequence[Row], wanted: dict[Any, int]) -> list[Row]:
    """As many rows of each task as are wanted, in order; counts `wanted` down."""
    taken = []
    for row in rows:
        if wanted.get(example_of(row), 0) > 0:
            wanted[example_of(row)] -= 1
            taken.append(row)
    return taken


def _rows(folder: ResultsFolder, found: TakenOver) -> Iterator[dict[str, Any] | None]:
    """One row for each line, None for a line that is no result or was cut short."""
    for number, line in enumerate(folder.lines(), 1):
        row = _parsed(line)
        found.is_cut = not line.endswith(b"\n")
        if row is None:
            found.num_broken += 1
            logger.warning("line %d of %s is no result and is dropped", number, folder.results)
        yield row


def _parsed(line: bytes) -> dict[str, Any] | None:
    row = parsed_row(line)
    return row if row is not None and "example_id" in row else None


def _is_done(row: Row) -> bool:
    return row.get("error") is None and row.get("reward") is not None


def _is_wanted(
    row: Row, wanted: dict[Any, int], tasks: Mapping[Any, Row], complete: set[Any] | None, found: TakenOver
) -> bool:
    example = example_of(row)
    if not _is_done(row):
        found.num_failed += 1
        return False
    if example not in tasks or row.get("task_key") not in (None, task_key_of(tasks[example])):
        found.changed.append(example)
        return False
    if wanted.get(example, 0) <= 0 or (complete is not None and example not in complete):
        found.num_surplus += 1
        return False
    wanted[example] -= 1
    return True


def _complete_examples(folder: ResultsFolder, wanted: Mapping[Any, int]) -> set[Any]:
    parsed = (_parsed(line) for line in folder.lines())
    done = count_by_example(row for row in parsed if row is not None and _is_done(row))
    return {example for example, count in done.items() if count >= wanted.get(example, 0)}


def _selected(folder: ResultsFolder, kept: Sequence[bool]) -> Iterator[bytes]:
    return (line.rstrip(b"\n") + b"\n" for line, is_kept in zip(folder.lines(), kept, strict=True) if is_kept)


def settings_of(values: Any) -> dict[str, Any]:
    """Settings as they are compared: as JSON writes them, without those that mean nothing."""
    plain = json.loads(json.dumps(values, default=str))
    if not isinstance(plain, dict):
        return {}
    return {k: v for k, v in plain.items() if v is not None and not (k in NO_SAMPLING and NO_SAMPLING[k] == v)}


def _other(folder: ResultsFolder, name: str, saved: Any, mine: Any) -> str:
    return (
        f"cannot resume from {folder.path}: its {name} is {saved!r}, this evaluation's is {mine!r}; "
        "give the same, or another results path"
    )


def _changed(folder: ResultsFolder, examples: Sequence[Any]) -> str:
    shown = ", ".join(map(str, examples[:3])) + (", ..." if len(examples) > 3 else "")
    return (
        f"cannot resume from {folder.path}: the dataset has changed since ({len(examples)} finished rollouts "
        f"in {RESULTS} are of other tasks than examples {shown} now); start a new evaluation"
    )
