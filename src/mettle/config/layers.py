"""Layers of values, composed left to right: tables merge, everything else is replaced, and each value keeps its source.

A tree is what TOML gives: nested dicts and lists. `ConfigLayer.sources` names the origin of the paths that a layer
sets.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.config.positions import KeyPath, key_lines
from mettle.errors import UserError

Tree = dict[str, Any]
DEFAULT = "default"
"""The source of what nobody said."""


@dataclass(slots=True)
class ConfigLayer:
    """Values and where they came from. `sources` maps a key path to words such as "run.toml:12"."""

    tree: Tree = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)

    def source_of(self, path: KeyPath) -> str | None:
        """The source of a path, or of the nearest enclosing value that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.sources:
                return self.sources[path[:end]]
        return None


def read_layer(path: Path) -> ConfigLayer:
    """One TOML file. Raises: UserError naming the file, and the line when its TOML is not TOML."""
    try:
        text = path.read_bytes().decode("utf-8")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"no config file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(_syntax_complaint(path, text, str(error))) from error
    return ConfigLayer(tree, {key: f"{path}:{line}" for key, line in key_lines(text).items()})


def tree_layer(tree: Mapping[str, Any], source: str) -> ConfigLayer:
    """A layer of values that come from one place, such as a built-in recipe."""
    layer = ConfigLayer(_copy(dict(tree)))

    def name(value: Any, path: KeyPath) -> None:
        layer.sources[path] = source
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in entries:
            name(item, (*path, key))

    for key, value in layer.tree.items():
        name(value, (key,))
    return layer


def sub_layer(layer: ConfigLayer, path: KeyPath) -> ConfigLayer:
    """The table at `path` as a layer of its own; an empty one where there is no table."""
    table: Any = layer.tree
    for key in path:
        table = table.get(key, {}) if isinstance(table, dict) else table[key]
    if not isinstance(table, dict):
        return ConfigLayer()
    depth = len(path)
    inside = {known[depth:]: words for known, words in layer.sources.items() if known[:depth] == path}
    return ConfigLayer(_copy(table), {known: words for known, words in inside.items() if known})


def merge(base: ConfigLayer, over: ConfigLayer) -> ConfigLayer:
    """`over` on top of `base`, as a new layer."""
    result = ConfigLayer(_copy(base.tree), dict(base.sources))
    _merge_table(result, over, result.tree, over.tree, ())
    return result


def merge_all(layers: Iterable[ConfigLayer]) -> ConfigLayer:
    """Layers composed, the strongest last."""
    result = ConfigLayer()
    for layer in layers:
        result = merge(result, layer)
    return result


def replace_sources(layer: ConfigLayer, path: KeyPath, source: str) -> None:
    """Say that the value at `path`, with everything below it, now comes from `source`."""
    for known in [known for known in layer.sources if known[: len(path)] == path]:
        del layer.sources[known]
    layer.sources[path] = source


def _merge_table(result: ConfigLayer, over: ConfigLayer, into: Tree, table: Tree, path: KeyPath) -> None:
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            if here in over.sources:
                result.sources[here] = over.sources[here]
            _merge_table(result, over, into[key], value, here)
            continue
        into[key] = _copy(value)
        for known in [known for known in result.sources if known[: len(here)] == here]:
            del result.sources[known]
        inherited = over.source_of(here)
        if inherited is not None:
            result.sources[here] = inherited
        result.sources.update({known: words for known, words in over.sources.items() if known[: len(here)] == here})


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _syntax_complaint(path: Path, text: str, message: str) -> str:
    found = re.search(r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)$", message)
    if found is None:
        return f"{path}: not valid TOML: {message}"
    line = found["line"] or text.count("\n") + 1
    return f"{path}:{line}: not valid TOML: {found['what'].lower()}"
