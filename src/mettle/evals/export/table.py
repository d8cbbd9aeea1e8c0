"""An evaluation as a table: one line per rollout, as CSV, Parquet or JSONL.

Parts: `write_csv`, `write_parquet`, `write_jsonl` (the rows as they are). In the first two, messages and other nested
values are JSON text, and metrics are columns of their own with the prefix `metric.`. Invariants: rows go through one at
a time or in slices (Parquet), and a text that a spreadsheet would run as a formula is kept from it by a leading
apostrophe in CSV.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.evals.facts import facts_of_row
from mettle.evals.output import json_line
from mettle.evals.reader import EvaluationReader

FIGURES = (
    "reward", "cause", "error_type", "error_message", "is_truncated", "stop_condition", "input_tokens", "output_tokens",
    "num_turns", "total_s", "model_s", "env_s", "scoring_s",
)  # fmt: skip
TEXTS = ("prompt", "completion", "answer", "info")
NUMBERS = frozenset(("reward", "input_tokens", "output_tokens", "total_s", "model_s", "env_s", "scoring_s"))
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
SLICE = 500


def write_csv(reader: EvaluationReader, path: Path) -> None:
    """Write `path`. Raises: StorageError when it cannot be written."""
    names = column_names(reader)
    try:
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for record in _records(reader):
                writer.writerow([_cell(record.get(name)) for name in names])
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def write_parquet(reader: EvaluationReader, path: Path) -> None:
    """Write `path`. Raises: UserError without pyarrow, StorageError when it cannot be written."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError("Parquet needs pyarrow; install it with: pip install 'mettle-lab[data]'") from error
    names = column_names(reader)
    types = {"example_id": pyarrow.int64(), "num_turns": pyarrow.int64(), "is_truncated": pyarrow.bool_()}
    if any(not isinstance(facts.example_id, int) for facts in reader.facts):
        types["example_id"] = pyarrow.string()
    fields = [
        (name, types.get(name) or (pyarrow.float64() if _is_number(name) else pyarrow.string())) for name in names
    ]
    schema = pyarrow.schema(fields)
    records = _records(reader)
    try:
        with pyarrow.parquet.ParquetWriter(path, schema) as writer:
            while piece := list(itertools.islice(records, SLICE)):
                for record in piece:
                    for name, kind in fields:
                        record[name] = _as_text(record.get(name)) if kind == pyarrow.string() else record.get(name)
                writer.write_table(pyarrow.Table.from_pylist(piece, schema=schema))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


def write_jsonl(reader: EvaluationReader, path: Path) -> None:
    """Write `path`. Raises: StorageError when it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json_line(row) for row in reader.rows())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def column_names(reader: EvaluationReader) -> list[str]:
    """The columns: what identifies a rollout, its figures, its metrics, its texts."""
    metrics = dict.fromkeys(name for facts in reader.facts for name in facts.metrics)
    return ["example_id", *FIGURES, *(f"metric.{name}" for name in metrics), *TEXTS]


def _records(reader: EvaluationReader) -> Iterator[dict[str, Any]]:
    return map(figures_and_texts, reader.rows())


def figures_and_texts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published row as one flat record: what identifies it, its figures, its metrics, its texts."""
    facts = facts_of_row(row)
    record = {"example_id": facts.example_id, **{name: getattr(facts, name) for name in FIGURES}}
    record.update({f"metric.{name}": value for name, value in facts.metrics.items()})
    record.update({name: row.get(name) for name in TEXTS})
    return record


def _is_number(name: str) -> bool:
    return name in NUMBERS or name.startswith("metric.")


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = _as_text(value) or ""
    return "'" + text if text.startswith(FORMULA_SIGNS) else text
