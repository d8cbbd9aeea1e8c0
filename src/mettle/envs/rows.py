"""Rows of a dataset: a list of dicts with the few methods of a Hugging Face dataset that environments use.

Parts: `Rows`, `format_row`. Rows may lie over a list or over a Hugging Face dataset, and are made ready (a `prompt`, an
`example_id`) when they are read. Invariant: nothing here imports `datasets`; the source is never changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mettle.errors import UserError
from mettle.records.messages import Message, messages_from

Row = dict[str, Any]
Transform = Callable[[Row, int], Row]


class Rows:
    """Rows `indices` of `source`, each passed through `transform(row, index in the source)` when it is read."""

    def __init__(self, source: Any, indices: Sequence[int] | None = None, transform: Transform | None = None) -> None:
        self._source = source
        self._indices = range(len(source)) if indices is None else indices
        self._transform = transform

    @classmethod
    def from_list(cls, rows: Iterable[Mapping[str, Any]]) -> Rows:
        """Rows over a list of dicts."""
        return cls([dict(row) for row in rows])

    @classmethod
    def from_dict(cls, columns: Mapping[str, Sequence[Any]]) -> Rows:
        """Rows from columns of equal length."""
        return cls([dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)])

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index) for index in self._indices)

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self]
        if isinstance(key, slice):
            rows = [self._row(index) for index in self._indices[key]]
            return {name: [row.get(name) for row in rows] for name in self.column_names}
        return self._row(self._indices[key])

    def _row(self, index: int) -> Row:
        row = dict(self._source[index])
        return self._transform(row, index) if self._transform else row

    @property
    def column_names(self) -> list[str]:
        """Names of the first row's columns."""
        return list(self[0]) if len(self) else []

    def select(self, indices: Iterable[int]) -> Rows:
        """The rows at these positions."""
        return Rows(self._source, [self._indices[i] for i in indices], self._transform)

    def shuffle(self, seed: int | None = None, **_: Any) -> Rows:
        """All rows in another order; the same one for the same seed."""
        indices = list(self._indices)
        random.Random(seed).shuffle(indices)
        return Rows(self._source, indices, self._transform)

    def repeat(self, num_times: int) -> Rows:
        """All rows, `num_times` over."""
        return Rows(self._source, list(self._indices) * num_times, self._transform)

    def filter(self, function: Callable[[Row], bool], **_: Any) -> Rows:
        """The rows for which `function` is true."""
        return Rows(self._source, [i for i in self._indices if function(self._row(i))], self._transform)

    def map(self, function: Callable[[Row], Mapping[str, Any]], **_: Any) -> Rows:
        """Every row, updated by what `function` returns for it."""
        return Rows([{**row, **function(row)} for row in self])

    def take(self, n: int) -> Rows:
        """The first `n` rows."""
        return self.select(range(min(n, len(self))))

    def to_list(self) -> list[Row]:
        """The rows as a list."""
        return list(self)


def format_row(row: Row, index: int, system_prompt: str | None, few_shot: Sequence[Any] | None) -> Row:
    """A row as a rollout takes it: with `prompt` as messages (or text) and an integer `example_id`.

    Raises: UserError when the row has neither `prompt` nor `question`.
    """
    row.pop("env_id", None)
    example_id = row.get("example_id")
    if example_id is not None and (not isinstance(example_id, int) or isinstance(example_id, bool)):
        row["src_id"] = row.pop("example_id")
    row.setdefault("example_id", index)
    prompt = row.get("prompt")
    if prompt is None:
        if row.get("question") is None:
            raise UserError(f"row {index} has neither `prompt` nor `question`; it has {sorted(row)}")
        row["prompt"] = _question_prompt(str(row["question"]), system_prompt, few_shot)
    elif not isinstance(prompt, str):
        row["prompt"] = _with_system(messages_from(prompt), system_prompt)
    return row


def _question_prompt(question: str, system_prompt: str | None, few_shot: Sequence[Any] | None) -> list[Message]:
    prompt = messages_from([{"role": "system", "content": system_prompt}] if system_prompt else [])
    return [*prompt, *messages_from(list(few_shot or [])), *messages_from([{"role": "user", "content": question}])]


def _with_system(prompt: list[Message], system_prompt: str | None) -> list[Message]:
    if not system_prompt or (prompt and prompt[0]["role"] == "system"):
        return prompt
    return [*messages_from([{"role": "system", "content": system_prompt}]), *prompt]
