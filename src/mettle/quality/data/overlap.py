"""Rows that are there twice, and rows of one split that are in the other.

Parts: `Overlap`, `find_overlap`. Two rows are the same when their questions differ by nothing but case and space.
Invariant: where rows ask the same, or one of a few things (a game whose state is hidden), sameness says nothing, and
`is_one_prompt` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]
ONE_PROMPT_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Overlap:
    """Counts, and examples of what is doubled and what leaks."""

    num_rows: dict[str, int]
    num_duplicates: dict[str, int]
    num_conflicts: int
    num_leaked: int
    is_one_prompt: bool
    num_distinct: int = 0
    """Different questions, over all splits."""
    examples: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON wants it."""
        return asdict(self)


def find_overlap(
    splits: Mapping[str, Sequence[Row]], question: Callable[[Row], str], answer: Callable[[Row], str]
) -> Overlap:
    """Duplicates in each split, questions with several answers, and evaluation questions that are trained on."""
    keys = {name: [_folded(question(row)) for row in rows] for name, rows in splits.items()}
    every = [key for part in keys.values() for key in part]
    distinct = set(every)
    is_one_prompt = len(every) > 1 and len(distinct) <= max(1, int(ONE_PROMPT_SHARE * len(every)))
    duplicates = {name: len(part) - len(set(part)) for name, part in keys.items()}
    answers: dict[str, set[str]] = {}
    for name, rows in splits.items():
        for key, row in zip(keys[name], rows, strict=True):
            answers.setdefault(key, set()).add(_folded(answer(row)))
    conflicts = [key for key, found in answers.items() if len(found) > 1]
    trained = set(keys.get("train", ()))
    leaked = [key for name, part in keys.items() if name != "train" for key in part if key in trained]
    examples = [f"leaked: {key[:80]}" for key in leaked[:2]] + [f"several answers: {key[:80]}" for key in conflicts[:2]]
    return Overlap(
        num_rows={name: len(rows) for name, rows in splits.items()},
        num_duplicates=duplicates,
        num_conflicts=len(conflicts),
        num_leaked=len(leaked),
        is_one_prompt=is_one_prompt,
        num_distinct=len(distinct),
        examples=() if is_one_prompt else tuple(examples),
    )


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
