"""Rows of a dataset: a list of dicts with the few methods of a Hugging Face dataset that environments use.

Parts: `Rows`, `rows_source`, `format_row`. Rows may lie over a list or over a Hugging Face dataset, and are
made ready (a `prompt`, an `example_id`) when they are read. Invariant: nothing here imports `datasets`; the source is
never changed.
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

    @property
    def features(self) -> dict[str, type]:
        """The first row's columns and the types of their values."""
        return {name: type(value) for name, value in self[0].items()} if len(self) else {}

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self)

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

    def take(self, n: int) -> Rows:
        """The first `n` rows."""
        return self.select(range(min(n, len(self))))

    def skip(self, n: int) -> Rows:
        """All rows but the first `n`."""
        return self.select(range(min(n, len(self)), len(self)))

    def sort(self, column: str, reverse: bool = False, **_: Any) -> Rows:
        """The rows in the order of a column."""
        values = self[column]
        return self.select(sorted(range(len(self)), key=values.__getitem__, reverse=reverse))

    def filter(self, function: Callable[..., bool], with_indices: bool = False, **_: Any) -> Rows:
        """The rows for which `function` is true."""
        keep = [i for i, row in enumerate(self) if (function(row, i) if with_indices else function(row))]
        return self.select(keep)

    def map(
        self,
        function: Callable[..., Mapping[str, Any] | None],
        with_indices: bool = False,
        remove_columns: str | Iterable[str] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        batched: bool = False,
        **_: Any,
    ) -> Rows:
        """Every row, updated by what `function` returns for it; `batched` maps all rows at once, as columns."""
        dropped = {remove_columns} if isinstance(remove_columns, str) else set(remove_columns or ())
        if batched:
            columns = self.to_dict()
            kept = {name: values for name, values in columns.items() if name not in dropped}
            return Rows.from_dict({**kept, **(function(columns, **(fn_kwargs or {})) or {})})
        made = []
        for index, row in enumerate(self):
            changed = function(row, *([index] if with_indices else []), **(fn_kwargs or {})) or {}
            made.append({**{name: value for name, value in row.items() if name not in dropped}, **changed})
        return Rows(made)

    def select_columns(self, names: str | Iterable[str]) -> Rows:
        """Only these columns."""
        kept = [names] if isinstance(names, str) else list(names)
        return Rows([{name: row.get(name) for name in kept} for row in self])

    def remove_columns(self, names: str | Iterable[str]) -> Rows:
        """All columns but these."""
        return self.map(lambda _: {}, remove_columns=names)

    def rename_columns(self, names: Mapping[str, str]) -> Rows:
        """The same columns under other names."""
        return Rows([{names.get(name, name): value for name, value in row.items()} for row in self])

    def rename_column(self, name: str, new_name: str) -> Rows:
        """The same column under another name."""
        return self.rename_columns({name: new_name})

    def add_column(self, name: str, column: Sequence[Any], **_: Any) -> Rows:
        """One more column."""
        return Rows([{**row, name: value} for row, value in zip(self, column, strict=True)])

    def unique(self, column: str) -> list[Any]:
        """The different values of a column, in their first order."""
        return list(dict.fromkeys(self[column]))

    def train_test_split(
        self, test_size: float | int = 0.25, seed: int | None = None, shuffle: bool = True, **_: Any
    ) -> dict[str, Rows]:
        """`train` and `test`, the latter of `test_size` rows or of that share of them."""
        num_test = round(test_size * len(self)) if isinstance(test_size, float) else test_size
        rows = self.shuffle(seed=seed) if shuffle else self
        num_train = len(self) - num_test
        return {"train": rows.take(num_train), "test": rows.skip(num_train)}

    def to_list(self) -> list[Row]:
        """The rows as a list."""
        return list(self)

    def to_dict(self) -> dict[str, list[Any]]:
        """The rows as columns."""
        columns: dict[str, list[Any]] = self[:]
        return columns

    def to_pandas(self) -> Any:
        """The rows as a data frame."""
        import pandas

        return pandas.DataFrame(self.to_list())


def rows_source(source: Any) -> Any:
    """What `Rows` can lie over: a list, or whatever has a length and gives rows by position.

    Splits give their `train` split, or the only one; a data frame, an iterable and a dict of columns become lists.
    Raises: UserError for splits among which none is meant, and for what holds no rows.
    """
    if isinstance(source, Mapping):
        return _rows_of_mapping(source)
    if hasattr(source, "to_dict") and hasattr(source, "iterrows"):
        return source.to_dict("records")
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str):
        return source
    if isinstance(source, str) or not isinstance(source, Iterable):
        raise UserError(f"a dataset is a list of rows or a Hugging Face dataset, not {type(source).__name__}")
    return list(source)


def _rows_of_mapping(source: Mapping[str, Any]) -> Any:
    values = list(source.values())
    if values and all(isinstance(value, list | tuple) and not _holds_rows(value) for value in values):
        return Rows.from_dict(source)
    split = "train" if "train" in source else next(iter(source), None)
    if split is None or (split != "train" and len(source) > 1):
        raise UserError(f"the dataset has the splits {sorted(source)}; give one of them")
    return rows_source(source[split])


def _holds_rows(values: Sequence[Any]) -> bool:
    return bool(values) and all(
        isinstance(value, Mapping) and ("prompt" in value or "question" in value) for value in values
    )


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
