"""Rows from a file: JSON lines, JSON, CSV, TSV, text, Parquet, Arrow; or from a folder of such files, one a split.

Parts: `read_file`, `SUFFIXES`. Invariant: what cannot be read is one `UserError` with the file and, where there is one,
the line; a file is never read past `max_rows`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mettle.errors import UserError

Row = dict[str, Any]
Splits = dict[str, list[Row]]
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "eval", "validation", "dev", "valid"), "eval"),
}
MAX_FIELD_BYTES = 16 << 20


def read_file(path: Path, max_rows: int) -> Splits:
    """The splits of a file or folder; a file without splits is all `train`.

    Raises: UserError when there is no such file, when it is of no known kind, or when it cannot be read.
    """
    if path.is_dir():
        return _read_folder(path, max_rows)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    reader = SUFFIXES.get(_suffix(path))
    if reader is None:
        raise UserError(f"{path} is of no kind that can be read; those are {', '.join(SUFFIXES)}, also with .gz")
    splits = reader(path, max_rows)
    if not any(splits.values()):
        raise UserError(f"{path} holds no rows")
    return splits


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return "." + name.rpartition(".")[2] if "." in name else ""


def _read_folder(path: Path, max_rows: int) -> Splits:
    files = [file for file in sorted(path.iterdir()) if file.is_file() and _suffix(file) in SUFFIXES]
    splits: Splits = {}
    for file in files:
        split = _split_of(file.name)
        rows = [row for part in read_file(file, max_rows).values() for row in part]
        splits[split] = [*splits.get(split, []), *rows][:max_rows]
    if not splits:
        raise UserError(f"{path} holds no file that can be read; those are {', '.join(SUFFIXES)}")
    return splits


def _split_of(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").replace(".", " ").split()
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "train")


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.name.endswith(".gz"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from error
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _read_json_lines(path: Path, max_rows: int) -> Splits:
    rows: list[Row] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is a JSON {_kind(row)}; each line is to be an object")
        rows.append(row)
        if len(rows) >= max_rows:
            break
    return {"train": rows}


def _read_json(path: Path, max_rows: int) -> Splits:
    """A list of objects; columns; `{"data": [...]}`; or an object of splits, each a list of objects."""
    text = _text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        if "Extra data" in str(error):
            return _read_json_lines(path, max_rows)
        raise UserError(f"{path} is not JSON: {error}") from error
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), list):
        name, inner = next(iter(value.items()))
        if name not in SPLIT_NAMES and all(isinstance(row, dict) for row in inner):
            value = inner
    if isinstance(value, list):
        return {"train": _objects(path, value, max_rows)}
    if isinstance(value, dict) and value and all(isinstance(part, list) for part in value.values()):
        if all(isinstance(row, dict) for part in value.values() for row in part):
            return _as_splits(path, value, max_rows)
        if len({len(part) for part in value.values()}) == 1:
            columns = zip(*value.values(), strict=True)
            return {"train": [dict(zip(value, cells, strict=True)) for cells in islice(columns, max_rows)]}
    raise UserError(f"{path} is a JSON {_kind(value)} that is no list of objects, no columns and no splits")


def _as_splits(path: Path, value: Mapping[str, list[Any]], max_rows: int) -> Splits:
    splits: Splits = {}
    for name, rows in value.items():
        split = SPLIT_NAMES.get(name.lower(), name)
        splits[split] = [*splits.get(split, []), *_objects(path, rows, max_rows)]
    return splits


def _objects(path: Path, rows: Iterable[Any], max_rows: int) -> list[Row]:
    found = list(islice(rows, max_rows))
    for number, row in enumerate(found):
        if not isinstance(row, dict):
            raise UserError(f"{path}: item {number} is a JSON {_kind(row)}; each is to be an object")
    return found


def _read_table(path: Path, max_rows: int, delimiter: str) -> Splits:
    csv.field_size_limit(MAX_FIELD_BYTES)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter)
    try:
        rows = list(_table_rows(path, reader, max_rows))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num} is no line of a table: {error}") from error
    return {"train": rows}


def _table_rows(path: Path, reader: csv.DictReader[str], max_rows: int) -> Iterator[Row]:
    for row in islice(reader, max_rows):
        if None in row:
            extra = len(row[None])  # csv keeps under None what is too much
            raise UserError(f"{path}:{reader.line_num} has {extra} more cells than the header; is something unquoted?")
        yield {name: _cell(value) for name, value in row.items()}


def _cell(value: str | None) -> str | None:
    return value if value != "" else None


def _read_text(path: Path, max_rows: int) -> Splits:
    lines = [line for line in _text(path).splitlines() if line.strip()]
    return {"train": [{"text": line} for line in lines[:max_rows]]}


def _read_parquet(path: Path, max_rows: int) -> Splits:
    parquet = _arrow("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
        batches = file.iter_batches(batch_size=min(max_rows, 1024))
        return {"train": list(islice((row for batch in batches for row in batch.to_pylist()), max_rows))}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no Parquet file that can be read: {_first_line(error)}") from error


def _read_arrow(path: Path, max_rows: int) -> Splits:
    """Both kinds: the file format, and the stream that Hugging Face datasets keeps."""
    ipc = _arrow("pyarrow.ipc", path)
    for open_it in (ipc.open_file, ipc.open_stream):
        try:
            with path.open("rb") as source:
                table = open_it(source).read_all()
            return {"train": table.slice(0, max_rows).to_pylist()}
        except (OSError, ValueError) as error:
            failed = error
    raise UserError(f"{path} is no Arrow file that can be read: {_first_line(failed)}") from failed


def _arrow(name: str, path: Path) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs pyarrow: pip install 'mettle-lab[data]'") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _kind(value: Any) -> str:
    return {dict: "object", list: "list", str: "text", type(None): "null"}.get(type(value), "value")


SUFFIXES: dict[str, Callable[[Path, int], Splits]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": lambda path, max_rows: _read_table(path, max_rows, ","),
    ".tsv": lambda path, max_rows: _read_table(path, max_rows, "\t"),
    ".txt": _read_text,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
