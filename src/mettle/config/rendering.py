"""A config as TOML, with the source of each value beside it. What is written here loads back to the same config."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, SecretStr

from mettle.config import shape
from mettle.config.overrides import dotted
from mettle.config.positions import KeyPath
from mettle.errors import UserError

_COMMENT_COLUMN = 48
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def leaves(config: BaseModel) -> Iterator[tuple[KeyPath, Any]]:
    """Every value of a config that is not itself a table with something in it."""
    yield from _leaves((), config)


def render_toml(config: BaseModel | Mapping[str, Any], sources: Mapping[str, str] | None = None) -> str:
    """A config, or any table, as TOML, every value written out; `sources` (of `Loaded`) become comments."""
    lines: list[str] = []
    _write_table(lines, (), config, sources or {})
    return "\n".join(lines).strip() + "\n"


def render_sources(config: BaseModel, sources: Mapping[str, str]) -> str:
    """One line a value: the key, the value, and where it came from."""
    rows = [
        (dotted(path), _literal(value, path), sources.get(dotted(path), "default")) for path, value in leaves(config)
    ]
    key_width = max((len(row[0]) for row in rows), default=0)
    value_width = min(max((len(row[1]) for row in rows), default=0), 48)
    return "".join(f"{key:<{key_width}}  {value:<{value_width}}  {source}\n" for key, value, source in rows)


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from _leaves((*path, key), child)


def _children(value: Any) -> list[tuple[str | int, Any]] | None:
    """The entries of a table or of a list of tables; None for a leaf."""
    if isinstance(value, BaseModel):
        return [(name, getattr(value, name)) for name in type(value).model_fields]
    if isinstance(value, dict) and value:
        return [(str(_plain(key)), item) for key, item in value.items()]
    if _is_table_list(value):
        return list(enumerate(value))
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, (BaseModel, dict))


def _is_table_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_table(item) for item in value)


def _write_table(lines: list[str], path: KeyPath, value: Any, sources: Mapping[str, str]) -> None:
    entries = [(str(key), item) for key, item in _children(value) or []]
    nested = [(key, item) for key, item in entries if (_is_table(item) and _children(item)) or _is_table_list(item)]
    for key, item in entries:
        if (key, item) not in nested:
            lines.append(_line(value, path, key, item, sources))
    for key, item in nested:
        here = (*path, key)
        tables = list(enumerate(item)) if _is_table_list(item) else [(None, item)]
        for index, table in tables:
            name = ".".join(_key(str(part)) for part in here if isinstance(part, str))
            lines.extend(["", f"[{name}]" if index is None else f"[[{name}]]"])
            _write_table(lines, here if index is None else (*here, index), table, sources)


def _line(owner: Any, path: KeyPath, key: str, value: Any, sources: Mapping[str, str]) -> str:
    here = (*path, key)
    source = sources.get(dotted(here))
    if value is None and _default(owner, key) is None:
        line = f"# {_key(key)} is not set"
    else:
        line = f"{_key(key)} = {_literal(value, here)}"
    return f"{line:<{_COMMENT_COLUMN}}  # {source}" if source else line


def _default(owner: Any, key: str) -> Any:
    if not isinstance(owner, BaseModel):
        return shape.MISSING
    return shape.default_of(type(owner).model_fields[key])


def _literal(value: Any, path: KeyPath) -> str:
    plain = _plain(value)
    if plain is None:
        return '"None"'
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, (int, float)):
        return repr(plain)
    if isinstance(plain, str):
        return _text(plain)
    if isinstance(plain, (datetime.datetime, datetime.date, datetime.time)):
        return plain.isoformat()
    if isinstance(plain, (list, tuple)):
        return "[" + ", ".join(_literal(item, path) for item in plain) + "]"
    if isinstance(plain, (set, frozenset)):
        return "[" + ", ".join(sorted(_literal(item, path) for item in plain)) + "]"
    if isinstance(plain, dict):
        return "{" + ", ".join(f"{_key(str(_plain(k)))} = {_literal(v, path)}" for k, v in plain.items()) + "}"
    if isinstance(plain, BaseModel):
        return _literal({name: getattr(plain, name) for name in type(plain).model_fields}, path)
    raise UserError(f"{dotted(path)}: a {type(value).__name__} cannot be written as TOML")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, SecretStr):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)
