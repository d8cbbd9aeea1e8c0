"""Load a config: built-in defaults, then files left to right, then overrides, then validation with sources.

Parts, in order: compose the layers, lay the model's own default tables under them, validate, name the source of every
resolved value. Invariant: whatever is wrong ends in one `UserError` that says where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mettle.config import shape
from mettle.config.complaints import explain
from mettle.config.layers import DEFAULT, ConfigLayer, Tree, merge_all, read_layer, tree_layer
from mettle.config.options import Given, own_names
from mettle.config.overrides import apply_mapping, dotted, parse_overrides
from mettle.config.positions import KeyPath
from mettle.config.rendering import leaves, render_sources, render_toml
from mettle.errors import UserError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

DERIVED = "derived"
"""The source of a value that a rule of the config computed from other values."""
NOTHING_GIVEN = Given()


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ConfigT]):
    """A validated config. `sources` names, for each value by dotted key, where it came from."""

    config: ConfigT
    sources: dict[str, str]

    def render(self) -> str:
        """The config as TOML with its sources as comments."""
        return render_toml(self.config, self.sources)

    def render_sources(self) -> str:
        """One line a value: key, value, source."""
        return render_sources(self.config, self.sources)


def load_config(
    model: type[ConfigT],
    files: Sequence[Path] = (),
    overrides: Given | Sequence[str] | Mapping[str, Any] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    defaults_name: str = "built-in",
) -> Loaded[ConfigT]:
    """Compose and validate a config.

    `overrides` is what stood on the command line (`["--trainer.optim.lr", "3e-6"]`, or with options) or typed values by
    dotted name.
    `defaults` lies under the files and is called `defaults_name` in the sources.
    Raises: UserError, one line, for a missing file, bad TOML, an unknown key, a wrong value.
    """
    levels = [tree_layer(defaults or {}, defaults_name)]
    levels += [own_names(model, read_layer(path), path.parent) for path in files]
    if isinstance(overrides, Mapping):
        layer = merge_all(levels)
        apply_mapping(model, layer, overrides)
        return load_layer(model, layer, files)
    given = overrides if isinstance(overrides, Given) else Given(overrides=tuple(parse_overrides(overrides)))
    return load_levels(model, levels, given, files)


def load_levels(
    model: type[ConfigT], levels: Sequence[ConfigLayer], given: Given = NOTHING_GIVEN, files: Sequence[Path] = ()
) -> Loaded[ConfigT]:
    """Validate levels that are in the model's own names, the strongest last, under what a command line says."""
    layer = merge_all([*levels, own_names(model, given.layer)])
    given.override(model, layer)
    return load_layer(model, layer, files)


def check_needed(
    model: type[BaseModel], levels: Sequence[ConfigLayer], given: Given, files: Sequence[Path], hows: Mapping[str, str]
) -> Tree:
    """What the levels say together, in which nothing of `hows` is missing.

    Raises: UserError with what `hows` says of the first field that is missing; what else is wrong is told before.
    """
    said = merge_all([*levels, own_names(model, given.layer)])
    given.override(model, said)
    missing = [name for name in hows if name not in said.tree]
    if missing:
        load_levels(model, [tree_layer(dict.fromkeys(missing, "?"), DEFAULT), *levels], given, files)
        raise UserError(hows[missing[0]])
    return said.tree


def load_layer(model: type[ConfigT], layer: ConfigLayer, files: Sequence[Path] = ()) -> Loaded[ConfigT]:
    """Validate one layer. `files` are those that it was read from, in order, for the complaints."""
    given = _read_none(model, layer.tree)
    layer.tree = _complete(model, given, shape.MISSING)
    try:
        config = model.model_validate(layer.tree)
    except ValidationError as error:
        raise explain(error, model, layer, [str(path) for path in files]) from error
    return Loaded(config, _sources(config, layer, given))


def _read_none(model: type[BaseModel], tree: Tree) -> Tree:
    """TOML has no null: the text "None" means it wherever None is a value."""

    def visit(value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: visit(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [visit(item, (*path, index)) for index, item in enumerate(value)]
        if value == "None":
            annotation = shape.annotation_at(model, path, tree)
            return None if annotation is not shape.MISSING and shape.takes_none(annotation) else value
        return value

    return {key: visit(value, (key,)) for key, value in tree.items()}


def _complete(annotation: Any, value: Any, default: Any) -> Any:
    """A copy of a given table, completed from the default that stands there in the model.

    Setting one key of a table so leaves the others as the default has them, rather than as its class would.
    """
    if isinstance(value, list):
        return [_complete(shape.item_annotation(annotation, i), item, shape.MISSING) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    table = dict(value)
    if isinstance(default, BaseModel) and value.get("type") in (None, getattr(default, "type", None)):
        table = {**_spelled_out(default), **value}
    else:
        default = shape.MISSING
    chosen = shape.model_for(annotation, table)
    for key, item in value.items():
        field = chosen.model_fields.get(key) if chosen is not None else None
        if field is not None:
            inner = getattr(default, key) if isinstance(default, BaseModel) else shape.default_of(field)
            table[key] = _complete(field.annotation, item, inner)
    return table


def _spelled_out(default: BaseModel) -> Tree:
    """What makes this default differ from its class, and the variant that it is."""
    kept = default.model_fields_set | ({"type"} & set(type(default).model_fields))
    values = {name: getattr(default, name) for name in type(default).model_fields if name in kept}
    return {key: _spelled_out(item) if isinstance(item, BaseModel) else item for key, item in values.items()}


def _sources(config: BaseModel, layer: ConfigLayer, given: Tree) -> dict[str, str]:
    defaults = dict(_default_leaves(config, given))
    found: dict[str, str] = {}
    for path, value in leaves(config):
        source = layer.source_of(path) if shape.value_at(given, path) is not shape.MISSING else None
        if source is None:
            is_default = path in defaults and _same(defaults[path], value)
            source = DEFAULT if is_default else DERIVED
        found[dotted(path)] = source
    return found


def _default_leaves(
    value: Any, given: Any, default: Any = shape.MISSING, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, Any]]:
    """By path, what a value would be had nobody set it, for the tables that exist in this config."""
    if isinstance(value, (list, tuple)):
        is_default_list = given is shape.MISSING and isinstance(default, (list, tuple)) and len(default) == len(value)
        for index, item in enumerate(value):
            inner = default[index] if is_default_list else shape.MISSING
            yield from _default_leaves(item, shape.entry(given, index), inner, (*path, index))
    if not isinstance(value, BaseModel):
        yield path, default
        return
    for name, field in type(value).model_fields.items():
        is_same_table = type(default) is type(value)
        inner = getattr(default, name) if is_same_table else shape.default_of(field)
        yield from _default_leaves(getattr(value, name), shape.entry(given, name), inner, (*path, name))


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)
