"""The resolved config of a run, value by value, and where each came from.

Values stand in `run.toml`, their sources in `sources.json`: a flat object from a dotted key (or a table that encloses
it) to words such as "quickstart.toml:12" or "--trainer.optim.lr". A value without a source is a default.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import StorageError


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of the config. `source` is empty for a default."""

    key: str
    value: str
    source: str

    @property
    def table(self) -> str:
        """The table that the value stands in; empty at the top."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]


def read_config(path: Path) -> dict[str, Any]:
    """`run.toml` as a tree; empty when there is none.

    Raises: StorageError when it cannot be read.
    """
    try:
        return tomllib.loads((path / "run.toml").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{path / 'run.toml'}: {error}") from error


def read_settings(path: Path) -> list[Setting]:
    """Every value of a run's config in the order of the file."""
    try:
        sources = json.loads((path / "sources.json").read_text())
    except (OSError, ValueError):
        sources = {}
    if not isinstance(sources, dict):
        sources = {}
    return [Setting(key, shown_value(value), _source(sources, key)) for key, value in flatten(read_config(path))]


def flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """A tree as (dotted key, value); values of the tables before it, tables after, as TOML has them."""
    children: list[tuple[str, Any]]
    if isinstance(tree, dict):
        children = sorted(tree.items(), key=lambda item: _is_table(item[1]))
    else:
        children = [(str(index), value) for index, value in enumerate(tree)]
    flat: list[tuple[str, Any]] = []
    for name, value in children:
        key = f"{prefix}.{name}" if prefix else name
        flat += flatten(value, key) if _is_table(value) else [(key, value)]
    return flat


def _is_table(value: Any) -> bool:
    return (isinstance(value, dict) and bool(value)) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def _source(sources: dict[str, Any], key: str) -> str:
    while key:
        if key in sources:
            return str(sources[key])
        key = key.rpartition(".")[0]
    return ""


def shown_value(value: Any) -> str:
    """A value as JSON, which for what a config holds is nearly as TOML has it."""
    return json.dumps(value, ensure_ascii=False, default=str)
