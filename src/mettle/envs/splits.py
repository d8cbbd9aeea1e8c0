"""The rows of one environment: a training split and an evaluation split, each given as data or as a function of none.

Parts: `Splits`; `SplitDatasets`, a base of `Environment`. Invariants: what a function returns is asked for when it is
first needed, and once, and what it raises is an `EnvironmentLoadError`; data that cannot be a dataset, or whose first
row cannot be one, is refused where it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from mettle.envs.errors import EnvironmentLoadError, described_fault
from mettle.envs.rows import Rows, rows_source
from mettle.errors import MettleError


class Splits:
    """`train` and `eval`, either of which may be missing. `format_row` makes a row of a dataset into a rollout's."""

    def __init__(
        self, train: Any, evaluation: Any, format_row: Callable[[dict[str, Any], int], dict[str, Any]]
    ) -> None:
        self._sources = {"train": train, "eval": evaluation}
        self._format_row = format_row
        self._rows: dict[str, Rows] = {}
        for split, source in self._sources.items():
            if source is not None and not callable(source):
                self.rows(split)

    def has(self, split: str) -> bool:
        """Whether there is such a split."""
        return self._sources[split] is not None

    def replace(self, split: str, source: Any) -> None:
        """Another source, read when the split is next used."""
        self._sources[split] = source
        self._rows.pop(split, None)

    def rows(self, split: str, n: int = -1, seed: int | None = None) -> Rows:
        """The rows of a split, in the order of `seed` where one is given, the first `n` of them where n > 0."""
        if split not in self._rows:
            self._rows[split] = self._read(split, self._sources[split])
        rows = self._rows[split]
        if seed is not None:
            rows = rows.shuffle(seed=seed)
        return rows.take(n) if n > 0 else rows

    def _read(self, split: str, source: Any) -> Rows:
        if callable(source):
            try:
                source = source()
            except MettleError:
                raise
            except (Exception, SystemExit) as error:
                raise EnvironmentLoadError(f"the {split} rows cannot be made: {described_fault(error)}") from error
        rows = Rows(rows_source(source), transform=self._format_row)
        if len(rows):
            _ = rows[0]
        return rows


class SplitDatasets:
    """The datasets of an `Environment`, by their names."""

    _splits: Splits
    logger: logging.Logger

    @property
    def _title(self) -> str:
        return type(self).__name__

    @property
    def dataset(self) -> Rows | None:
        """Training rows, if there are any."""
        return self._splits.rows("train") if self._splits.has("train") else None

    @dataset.setter
    def dataset(self, source: Any) -> None:
        self._splits.replace("train", source)

    @property
    def eval_dataset(self) -> Rows | None:
        """Evaluation rows, if there are any."""
        return self._splits.rows("eval") if self._splits.has("eval") else None

    @eval_dataset.setter
    def eval_dataset(self, source: Any) -> None:
        self._splits.replace("eval", source)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Training rows, in the order of `seed` where one is given, the first `n` of them where n > 0."""
        if not self._splits.has("train"):
            raise ValueError(f"{self._title} has no training dataset")
        return self._splits.rows("train", n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        """Evaluation rows; the training rows, with a warning, where there are none."""
        if not self._splits.has("eval"):
            self.logger.warning("%s has no evaluation dataset; the training dataset stands in", self._title)
            return self.get_dataset(n, seed)
        return self._splits.rows("eval", n, seed)

    def build_dataset(self) -> Rows | None:
        """Read the training rows, where a function makes them."""
        return self.dataset

    def build_eval_dataset(self) -> Rows | None:
        """Read the evaluation rows, where a function makes them."""
        return self.eval_dataset
