"""Overrides: the command line's last word on a value.

`--trainer.optim.lr 3e-6` and `--trainer.optim.lr=3e-6` set a value; `--flag` and `--no-flag` set a boolean, and turn an
optional table on or off; `--envs.0.id words` reaches into a list, and the index after its last element adds one. Dashes
are underscores. A value is a TOML literal where it is one and plain text where it is not; None is the absent value.
Where a table stands, `--trainer trainer.toml` (or `@trainer.toml`, or `@ trainer.toml`) lays a file over that table.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mettle.config import shape
from mettle.config.layers import DEFAULT, ConfigLayer, Tree, merge, read_layer, replace_sources
from mettle.config.positions import KeyPath
from mettle.errors import UserError


@dataclass(frozen=True, slots=True)
class Override:
    """One override as it was written. `text` is None for a flag."""

    path: KeyPath
    text: str | None
    spelled: str


def parse_overrides(tokens: Sequence[str]) -> list[Override]:
    """Pair option names with their values. Raises: UserError for a stray word."""
    found: list[Override] = []
    at = 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if not token.startswith("--") or len(token) == 2:
            raise UserError(f"unexpected {token!r}: config files come first, then overrides such as --max-steps 20")
        name, equals, text = token[2:].partition("=")
        if equals:
            found.append(Override(_path_of(name), text, f"--{name}"))
        elif at < len(tokens) and not tokens[at].startswith("--"):
            is_apart = tokens[at] == "@" and at + 1 < len(tokens)
            found.append(Override(_path_of(name), "".join(tokens[at : at + 1 + is_apart]), f"--{name}"))
            at += 1 + is_apart
        else:
            found.append(Override(_path_of(name), None, f"--{name}"))
    return found


def apply_overrides(model: type[BaseModel], layer: ConfigLayer, overrides: Sequence[Override]) -> None:
    """Set each override in `layer`, in order."""
    for override in overrides:
        file = _file_of(model, layer, override)
        if file is not None:
            _lay_over(layer, override, file)
            continue
        path, value = _resolve(model, layer, override)
        _set(model, layer, path, value, override.spelled)


def _file_of(model: type[BaseModel], layer: ConfigLayer, override: Override) -> Path | None:
    """The file that is to be laid over a table; None where the text is a value."""
    text = override.text or ""
    if not (text.startswith("@") or text.endswith(".toml")):
        return None
    annotation = shape.annotation_at(model, override.path, layer.tree)
    if annotation is shape.MISSING or not shape.models_of(annotation) or shape.takes_list(annotation):
        return None
    return Path(text.removeprefix("@"))


def _lay_over(layer: ConfigLayer, override: Override, file: Path) -> None:
    if any(isinstance(key, int) for key in override.path):
        raise UserError(f"{override.spelled} {file}: a file is laid over a table, not over an entry of a list")
    found = read_layer(file)
    tree: Tree = found.tree
    for key in reversed(override.path):
        tree = {str(key): tree}
    sources = {(*override.path, *known): words for known, words in found.sources.items()}
    merged = merge(layer, ConfigLayer(tree, sources))
    layer.tree, layer.sources = merged.tree, merged.sources


def apply_mapping(model: type[BaseModel], layer: ConfigLayer, overrides: Mapping[str, Any]) -> None:
    """Set values that are already typed, by dotted name."""
    for name, value in overrides.items():
        spelled = f"--{name.replace('_', '-')}"
        _set(model, layer, _path_of(name), value, spelled)


def parse_value(text: str, annotation: Any) -> Any:
    """What `text` means where `annotation` stands."""
    if text == "None" and (annotation is shape.MISSING or shape.takes_none(annotation)):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text
    if annotation is shape.MISSING or isinstance(value, str):
        return value
    if isinstance(value, bool) and shape.takes_bool(annotation):
        return value
    return text if shape.takes_text_only(annotation) else value


def _resolve(model: type[BaseModel], layer: ConfigLayer, override: Override) -> tuple[KeyPath, Any]:
    annotation = shape.annotation_at(model, override.path, layer.tree)
    if override.text is not None:
        return override.path, parse_value(override.text, annotation)
    positive = _without_no(override.path)
    if annotation is shape.MISSING and positive is not None:
        annotation = shape.annotation_at(model, positive, layer.tree)
        if annotation is not shape.MISSING and shape.takes_bool(annotation):
            return positive, False
        if annotation is not shape.MISSING and shape.models_of(annotation) and shape.takes_none(annotation):
            return positive, None
    if annotation is shape.MISSING or shape.takes_bool(annotation):
        return override.path, True
    if shape.models_of(annotation):
        current = shape.value_at(layer.tree, override.path)
        return override.path, current if isinstance(current, dict) else {}
    raise UserError(f"{override.spelled} needs a value")


def _without_no(path: KeyPath) -> KeyPath | None:
    """`no_compile` as `compile`, with the "no" before the whole name or before its last part."""
    first, last = path[0], path[-1]
    if isinstance(first, str) and first.startswith("no_"):
        return (first[3:], *path[1:])
    if isinstance(last, str) and last.startswith("no_"):
        return (*path[:-1], last[3:])
    return None


def _path_of(name: str) -> KeyPath:
    parts = name.replace("-", "_").split(".")
    if not all(parts):
        raise UserError(f"--{name} is not a key: write it like --trainer.optim.lr")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _set(model: type[BaseModel], layer: ConfigLayer, path: KeyPath, value: Any, spelled: str) -> None:
    holder: Any = layer.tree
    for depth, key in enumerate(path[:-1]):
        holder = _enter(model, layer, holder, path[: depth + 1], key, spelled)
    last = path[-1]
    if isinstance(holder, list):
        _check_index(holder, last, path, spelled)
        assert isinstance(last, int), "checked above"
        holder[last:] = [value, *holder[last + 1 :]]
    else:
        holder[last] = value
    replace_sources(layer, path, spelled)


def _enter(model: type[BaseModel], layer: ConfigLayer, holder: Any, path: KeyPath, key: str | int, spelled: str) -> Any:
    """The table or list at `path`, made where there is none."""
    if isinstance(holder, list):
        _check_index(holder, key, path, spelled)
        assert isinstance(key, int), "checked above"
        if key == len(holder):
            holder.append({})
            replace_sources(layer, path, spelled)
    elif not isinstance(holder.get(key), (dict, list)):
        annotation = shape.annotation_at(model, path, layer.tree)
        if annotation is not shape.MISSING and not shape.has_inside(annotation):
            raise UserError(f"{spelled}: {dotted(path)} is one value, which has nothing inside")
        holder[key] = _starting_value(model, layer, path)
        replace_sources(layer, path, DEFAULT)
    inner = holder[key]
    if not isinstance(inner, (dict, list)):
        raise UserError(f"{spelled}: {dotted(path)} is {inner!r}, which has nothing inside")
    return inner


def _starting_value(model: type[BaseModel], layer: ConfigLayer, path: KeyPath) -> Any:
    """What an override adds to where the files say nothing: a list's default, or an empty table."""
    annotation = shape.annotation_at(model, path, layer.tree)
    if annotation is shape.MISSING or not shape.takes_list(annotation):
        return {}
    parent = shape.annotation_at(model, path[:-1], layer.tree)
    owner = shape.model_for(parent, shape.value_at(layer.tree, path[:-1]))
    default = shape.default_of(owner.model_fields[str(path[-1])]) if owner is not None else shape.MISSING
    if not isinstance(default, (list, tuple)):
        return []
    return [item.model_dump() if isinstance(item, BaseModel) else item for item in default]


def _check_index(holder: list[Any], key: str | int, path: KeyPath, spelled: str) -> None:
    name = dotted(path[: path.index(key)]) if key in path else ""
    if not isinstance(key, int):
        raise UserError(f"{spelled}: {name} is a list, so address it by index, as in --{name}.0")
    if key > len(holder):
        raise UserError(f"{spelled}: {name} has {len(holder)} entries, so the next index is {len(holder)}, not {key}")


def dotted(path: KeyPath) -> str:
    """A key path as people write it."""
    return ".".join(str(key) for key in path)
