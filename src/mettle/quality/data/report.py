"""What there is to know about a dataset before an environment is made of it.

Parts: `DataReport`, `inspect_data`. Invariant: looking changes nothing and runs nothing of the dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mettle.errors import UserError
from mettle.quality.checks import Check, check
from mettle.quality.data.columns import DataColumn, Roles, as_text, describe_columns, find_roles
from mettle.quality.data.formats import AnswerFormat, detect_format
from mettle.quality.data.overlap import Overlap, find_overlap
from mettle.quality.data.prepared import EVAL_SHARE
from mettle.quality.data.recipes import RewardRecipe, recipe_for
from mettle.quality.data.sources import Dataset

MIN_ROWS = 20
MIN_HELD_OUT = 20
"""Fewer evaluation tasks tell one policy from another only when they differ by a lot."""
MAX_DUPLICATE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class DataReport:
    """The whole picture. `format` and `recipe` are None when nothing in it looks like an answer."""

    dataset: Dataset
    columns: list[DataColumn]
    roles: Roles
    overlap: Overlap
    format: AnswerFormat | None
    recipe: RewardRecipe | None

    def checks(self) -> list[Check]:
        """Size, duplicates, leakage, nulls."""
        return [*overlap_checks(self.overlap), *self._role_checks()]

    def _role_checks(self) -> list[Check]:
        nulls = [f"{c.name} ({c.num_null})" for c in self.columns if c.num_null and c.name in self._needed()]
        has_both = self.roles.question is not None or self.roles.messages is not None
        found = f"question {self.roles.question or self.roles.messages}, answer {self.roles.answer or self.roles.tests}"
        fix = "name them: --question COLUMN --answer COLUMN"
        is_known = has_both and self.format is not None
        return [
            check("columns", is_known, found, fix, otherwise="warn"),
            check(
                "no nulls",
                not nulls,
                ", ".join(nulls) or "none where it matters",
                "they are left out",
                otherwise="warn",
            ),
        ]

    def _needed(self) -> set[str | None]:
        return {self.roles.question, self.roles.answer, self.roles.tests}

    def to_dict(self, num_rows: int) -> dict[str, Any]:
        """As JSON wants it, with so many sample rows."""
        return {
            "name": self.dataset.name,
            "origin": self.dataset.origin,
            "splits": self.overlap.num_rows,
            "columns": [column.to_dict() for column in self.columns],
            "roles": {name: getattr(self.roles, name) for name in self.roles.__slots__},
            "overlap": self.overlap.to_dict(),
            "format": self.format.to_dict() if self.format else None,
            "recipe": self.recipe.to_dict() if self.recipe else None,
            "checks": [each.to_dict() for each in self.checks()],
            "rows": self.dataset.rows[:num_rows],
        }


def inspect_data(dataset: Dataset, *, question: str | None = None, answer: str | None = None) -> DataReport:
    """Look at a dataset. `question` and `answer` name columns that are not found by themselves.

    Raises: UserError for a column that is not there.
    """
    rows = dataset.rows
    columns = describe_columns(rows)
    names = [column.name for column in columns]
    for wanted in (question, answer):
        if wanted is not None and wanted not in names:
            raise UserError(f"{dataset.name} has no column {wanted!r}; it has {', '.join(names)}")
    roles = find_roles(rows, question=question, answer=answer)
    found = detect_format(rows, roles)
    overlap = find_overlap(
        dataset.splits,
        lambda row: as_text(row.get(roles.question or roles.messages or "")) or as_text(dict(row)),
        lambda row: as_text(row.get(roles.answer or "")),
    )
    return DataReport(dataset, columns, roles, overlap, found, recipe_for(found) if found else None)


def held_out_check(num_rows: Mapping[str, int]) -> Check:
    """Whether there is enough to measure on; of a single split, in what an environment made of it would hold out."""
    total = sum(num_rows.values())
    num = total - num_rows.get("train", 0) if len(num_rows) > 1 else total // EVAL_SHARE
    told = f"{num} of {total} rows are held out" if len(num_rows) > 1 else f"a tenth of {total} rows would be {num}"
    if 0 < num < MIN_HELD_OUT:
        told += f": a rate measured on {num} tasks is known to about +-{points_unsure(num):.0f} points"
    fix = f"have at least {MIN_HELD_OUT} evaluation rows, better 100: more data, or a split of your own (train, eval)"
    return check("enough held out", num >= MIN_HELD_OUT, told, fix, otherwise="warn")


def points_unsure(num_tasks: int) -> float:
    """How many percentage points a pass rate over so many tasks may be off (95 %, about the middle of the range)."""
    return min(50.0, 98.0 / math.sqrt(num_tasks))


def overlap_checks(overlap: Overlap) -> list[Check]:
    """Size, duplicates and leakage, of a dataset or of an environment's rows."""
    total = sum(overlap.num_rows.values())
    sizes = ", ".join(f"{name} {num}" for name, num in overlap.num_rows.items())
    checks = [
        check("enough rows", total >= MIN_ROWS, sizes, f"have at least {MIN_ROWS}, better hundreds", otherwise="warn")
    ]
    if overlap.is_one_prompt:
        asked = "every row asks the same"
        if overlap.num_distinct > 1:
            asked = f"{overlap.num_distinct} different questions in {total} rows"
        detail = f"{asked}; what differs is hidden, so sameness says nothing"
        return [*checks, Check("no duplicates", "skip", detail), Check("no leakage", "skip", detail)]
    num = sum(overlap.num_duplicates.values())
    doubled = f"{num} of {total} rows repeat a question; {overlap.num_conflicts} questions have several answers"
    is_clean = num <= MAX_DUPLICATE_SHARE * total and not overlap.num_conflicts
    checks.append(check("no duplicates", is_clean, doubled, "keep one row of each question", otherwise="warn"))
    checks.append(held_out_check(overlap.num_rows))
    if len(overlap.num_rows) < 2:
        detail = "there is one split, so nothing is held out"
        return [
            *checks,
            Check("no leakage", "warn", detail, "hold out rows as `eval_dataset`; `mettle env init --from data` does"),
        ]
    leaked = f"{overlap.num_leaked} evaluation questions are trained on"
    checks.append(check("no leakage", overlap.num_leaked == 0, leaked, "take them out of one of the splits"))
    return checks
