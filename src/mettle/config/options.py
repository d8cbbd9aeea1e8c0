"""How the fields of a model are asked for: flags of the command line, and other names in a file.

    class EvalSpec(BaseModel):
        num_examples: Annotated[int, Field(ge=-1), Option("-n")] = 5
        \"\"\"Tasks; -1 takes all.\"\"\"

makes `-n, --num-examples` with its help, type, range and default, and the key `num_examples` of a file. A key inside a
table that carries an `Option` may be written at the top as well: `temperature` for `sampling_args.temperature`.

Parts: `Option` (what a field says of itself), `Foreign` (a setting of other programs), `asked_fields` (the fields of a
model with their options), `Given` (what a command line said), `own_names` (a layer in the model's own names).
Invariant: layers are brought to own names before they are merged, so that it never matters which name a file uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mettle.config import shape
from mettle.config.layers import ConfigLayer, replace_sources
from mettle.config.overrides import Override, apply_overrides, dotted
from mettle.config.positions import KeyPath
from mettle.errors import UserError


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is asked for. Every field has a flag made from its name; this adds what the name cannot say."""

    flags: str = ""
    """Separated by spaces: "-n"; one that begins with two dashes replaces the field's own."""
    also: tuple[str, ...] = ()
    """Other names of the field in a file."""
    read: Callable[[Any], Any] | None = None
    """Turns a written form into the value, before levels are merged; raises ValueError with what it should be."""
    is_path: bool = False
    """Stands beside the file that names it, when it is there."""
    is_repeatable: bool = False
    """The flag may be given several times."""
    is_argument: bool = False
    """Asked for by the command itself and not by a flag."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of other programs. Where it could change a result here, `accepts` has the values that agree with us."""

    why: str = ""
    accepts: tuple[Any, ...] | None = None
    """None takes any value: what it says has no bearing on a result."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A field, or a key of a table, that a person can set by one name."""

    path: KeyPath
    annotation: Any
    info: FieldInfo
    option: Option

    @property
    def name(self) -> str:
        """Its own name."""
        return str(self.path[-1])


@dataclass(frozen=True, slots=True)
class Given:
    """What a command line says: options as a layer, then dotted overrides, which may reach inside values."""

    layer: ConfigLayer = field(default_factory=ConfigLayer)
    overrides: tuple[Override, ...] = ()

    def __bool__(self) -> bool:
        """True when anything was said."""
        return bool(self.layer.tree or self.overrides)

    def with_value(self, name: str, value: Any, source: str) -> Given:
        """The same, and one more value."""
        layer = ConfigLayer({**self.layer.tree, name: value}, {**self.layer.sources, (name,): source})
        return Given(layer, self.overrides)

    def override(self, model: type[BaseModel], layer: ConfigLayer) -> None:
        """Set the overrides in a merged layer."""
        names = other_names(model)
        own = [
            Override((*names.get(str(given.path[0]), given.path[:1]), *given.path[1:]), given.text, given.spelled)
            for given in self.overrides
        ]
        apply_overrides(model, layer, own)


@cache
def asked_fields(model: type[BaseModel]) -> tuple[Asked, ...]:
    """The fields of a model in their order, each followed by the keys of its table that have an option of their own."""
    found: list[Asked] = []
    for name, info in model.model_fields.items():
        found.append(Asked((name,), info.annotation, info, _option_in(info.metadata) or Option()))
        for key, annotation in shape.typed_keys(info.annotation).items():
            own = _option_in(get_args(annotation)[1:]) if get_origin(annotation) is Annotated else None
            if own is not None:
                found.append(Asked((name, key), annotation, FieldInfo.from_annotation(annotation), own))
    return tuple(found)


@cache
def other_names(model: type[BaseModel]) -> Mapping[str, KeyPath]:
    """By other name, where the value belongs."""
    found: dict[str, KeyPath] = {}
    for asked in asked_fields(model):
        if len(asked.path) > 1:
            found[asked.name] = asked.path
        found |= dict.fromkeys(asked.option.also, asked.path)
    return found


def own_names(model: type[BaseModel], layer: ConfigLayer, folder: Path | None = None) -> ConfigLayer:
    """A layer in which every value stands under the model's own name and in its own form.

    Within one layer a table's own key outweighs the short name for it. `folder` is that of the file that was read.
    Raises: UserError for two names of one value, a form that cannot be read, a foreign setting that is refused.
    """
    kept = {key: value for key, value in layer.tree.items() if not _is_foreign(model, layer, key, value)}
    result = ConfigLayer(kept, dict(layer.sources))
    names = other_names(model)
    for key in list(kept):
        if len(names.get(key, ())) == 1:
            _rename(result, key, str(names[key][0]))
    for asked in asked_fields(model):
        if len(asked.path) == 1 and asked.name in result.tree:
            _read(result, asked, folder)
    for key in list(kept):
        if len(names.get(key, ())) > 1:
            _move_inside(result, key, names[key])
    return result


def _is_foreign(model: type[BaseModel], layer: ConfigLayer, key: str, value: Any) -> bool:
    foreign: Foreign | None = getattr(model, "FOREIGN", {}).get(key)
    if foreign is None:
        return False
    if foreign.accepts is not None and value not in foreign.accepts:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UserError(f"{_where(layer, (key,))}{key} = {shown}: {foreign.why}")
    return True


def _rename(layer: ConfigLayer, key: str, name: str) -> None:
    if name in layer.tree:
        raise UserError(f"{_where(layer, (key,))}{key} and {name} are the same setting; keep one")
    layer.tree = {name if old == key else old: value for old, value in layer.tree.items()}
    _move_sources(layer, (key,), (name,))


def _move_inside(layer: ConfigLayer, key: str, path: KeyPath) -> None:
    """A short name's value into its table, which may say it already."""
    value, (table_name, inner) = layer.tree[key], path
    if table_name not in layer.tree:
        layer.tree = {str(table_name) if old == key else old: {} if old == key else v for old, v in layer.tree.items()}
    else:
        del layer.tree[key]
    table = layer.tree[str(table_name)]
    if isinstance(table, dict) and inner not in table:
        layer.tree[str(table_name)] = {**table, str(inner): value}
        _move_sources(layer, (key,), path)
    else:
        _move_sources(layer, (key,), None)


def _move_sources(layer: ConfigLayer, old: KeyPath, new: KeyPath | None) -> None:
    moved = [known for known in layer.sources if known[: len(old)] == old]
    for known in moved:
        source = layer.sources.pop(known)
        if new is not None:
            layer.sources[(*new, *known[len(old) :])] = source


def _read(layer: ConfigLayer, asked: Asked, folder: Path | None) -> None:
    value = layer.tree[asked.name]
    read: Any = value
    if asked.option.read is not None:
        try:
            read = asked.option.read(value)
        except ValueError as error:
            shown = value[0] if isinstance(value, tuple) and len(value) == 1 else value  # an option given once
            raise UserError(f"{_where(layer, asked.path)}{asked.name} = {shown!r}: must be {error}") from None
    if asked.option.is_path and folder is not None and value and isinstance(value, str) and (folder / value).exists():
        read = str(folder / value)
    if read is not value and read != value:
        layer.tree[asked.name] = read
        replace_sources(layer, asked.path, layer.source_of(asked.path) or "")


def _where(layer: ConfigLayer, path: KeyPath) -> str:
    source = layer.source_of(path)
    return f"{source}: " if source else ""


def _option_in(metadata: Sequence[Any]) -> Option | None:
    return next((item for item in metadata if isinstance(item, Option)), None)


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    """Every name that a file may use at the top, those of tables that group it and foreign ones included."""
    yield from model.model_fields
    yield from other_names(model)
    yield from getattr(model, "GROUPS", ())
    yield from getattr(model, "FOREIGN", {})


def spelled(path: KeyPath) -> str:
    """The flag of a path as people type it."""
    return f"--{dotted(path).replace('_', '-')}"
