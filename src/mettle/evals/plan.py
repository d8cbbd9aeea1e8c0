"""Evaluations from TOML files: settings for all, one `[[eval]]` each, and sweeps.

    model = "mine"                  # settings for all
    rollouts_per_example = 4

    [[eval]]
    env_id = "grade-math"

    [[ablation]]                    # one evaluation for each combination
    env_id = "wordle"
    [ablation.sweep]
    temperature = [0.0, 0.7, 1.0]

Parts: `read_plan`, `EvalFile` (the whole, to be shown). Strength: command line, then a combination of a sweep, then the
`[[eval]]`, then the settings for all, then the environment's own, then the built-in ones. Of several files the later
is stronger; its lists of evaluations replace those before. Invariant: whatever is wrong in a file is one line that
names file, line and the nearest key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mettle.config import Loaded
from mettle.config.layers import ConfigLayer, merge, read_layer, sub_layer, tree_layer
from mettle.config.loader import DERIVED, check_needed, load_levels
from mettle.config.options import Given, own_names
from mettle.config.positions import KeyPath
from mettle.errors import UserError
from mettle.evals.spec import EvalSpec


class EvalFile(BaseModel):
    """The evaluations of one command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eval: list[EvalSpec]
    """One `[[eval]]` table each."""

    @classmethod
    def of(cls, specs: Sequence[Loaded[EvalSpec]]) -> Loaded[EvalFile]:
        """Evaluations as one config that loads back to them, with their sources."""
        sources = {f"eval.{at}.{key}": words for at, one in enumerate(specs) for key, words in one.sources.items()}
        return Loaded(cls(eval=[one.config for one in specs]), sources)


@dataclass(slots=True)
class _Table:
    """An `[[eval]]` or `[[ablation]]`: what it sets, and the combinations of its sweep."""

    where: str
    named: str
    settings: ConfigLayer
    variants: list[ConfigLayer]


@dataclass(slots=True)
class _File:
    """What a file says, in the names of the settings."""

    shared: ConfigLayer = field(default_factory=ConfigLayer)
    tables: dict[str, list[_Table]] = field(default_factory=dict)


def read_plan(files: Sequence[Path], given: Given, defaults_of: Callable[[str], ConfigLayer]) -> list[Loaded[EvalSpec]]:
    """The evaluations of files, composed left to right, with what was `given` on top of each.

    `defaults_of` tells what an environment itself sets for its evaluations.
    Raises: UserError for a file that cannot be read, an unknown key, a wrong value, no evaluation or no model.
    """
    whole = _File()
    for path in files:
        file = _read_file(path)
        whole = _File(merge(whole.shared, file.shared), whole.tables | file.tables)
    tables = [table for name in EvalSpec.GROUPS for table in whole.tables.get(name, [])]
    if not tables:
        load_levels(EvalSpec, [tree_layer({"env_id": "?", "model": "?"}, DERIVED), whole.shared], given, files)
        names = ", ".join(map(str, files))
        raise UserError(f"{names} has no [[eval]] and no [[ablation]]; each names an environment with env_id")
    return [
        _spec([whole.shared, table.settings, variant], table, given, defaults_of, files)
        for table in tables
        for variant in table.variants
    ]


def _spec(
    levels: Sequence[ConfigLayer],
    table: _Table,
    given: Given,
    defaults_of: Callable[[str], ConfigLayer],
    files: Sequence[Path],
) -> Loaded[EvalSpec]:
    hows = {
        "env_id": f"{table.where}: {table.named} has no env_id; set env_id = NAME",
        "model": f"{table.where}: {table.named} has no model; set model = NAME, there or for all, or -m",
    }
    said = check_needed(EvalSpec, levels, given, files, hows)
    loaded = load_levels(EvalSpec, [defaults_of(str(said["env_id"])), *levels], given, files)
    spec, variant = loaded.config, levels[-1].tree
    if not variant or spec.name is not None:
        return loaded
    name = f"{spec.env_id} {' '.join(_variant_words(spec, variant))}"
    return Loaded(spec.model_copy(update={"name": name}), {**loaded.sources, "name": DERIVED})


def _variant_words(spec: EvalSpec, variant: Mapping[str, Any]) -> Iterator[str]:
    """What was swept, with the values that it has in the end."""
    for name, swept in variant.items():
        value = getattr(spec, name)
        yield from (f"{key}={value[key]}" for key in swept) if isinstance(swept, dict) else [f"{name}={value}"]


def _read_file(path: Path) -> _File:
    layer = read_layer(path)

    def settings(level: ConfigLayer) -> ConfigLayer:
        return own_names(EvalSpec, level, path.parent)

    shared = ConfigLayer({key: value for key, value in layer.tree.items() if key not in EvalSpec.GROUPS}, layer.sources)
    found = _File(settings(shared))
    for name in EvalSpec.GROUPS:
        for index in range(_length(layer, path, name)):
            place = (name, index)
            own = sub_layer(layer, place)
            sweep = own.tree.pop("sweep", None) if name == "ablation" else None
            variants = _sweep(layer, path, (*place, "sweep"), sweep) if name == "ablation" else [ConfigLayer()]
            table = _Table(_where(layer, path, place), f"{name}.{index}", settings(own), [*map(settings, variants)])
            found.tables.setdefault(name, []).append(table)
    return found


def _sweep(layer: ConfigLayer, path: Path, place: KeyPath, table: Any) -> list[ConfigLayer]:
    """Every combination of the swept values, each as a level of settings."""
    if not isinstance(table, dict) or not table:
        raise UserError(f"{_where(layer, path, place)}: an [[ablation]] has an [ablation.sweep] with lists of values")
    axes = [[(keys, value, where) for value in values] for keys, values, where in _axes(layer, path, place, table, ())]
    found = []
    for combination in itertools.product(*axes):
        variant = ConfigLayer()
        for keys, value, where in combination:
            inner = variant.tree
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = value
            variant.sources[keys] = where
        found.append(variant)
    return found


def _axes(
    layer: ConfigLayer, path: Path, place: KeyPath, table: Mapping[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[Any], str]]:
    """The swept keys, their values, and where they stand."""
    for key, value in table.items():
        keys, where = (*above, *key.split(".")), _where(layer, path, (*place, key))
        if isinstance(value, dict):
            yield from _axes(layer, path, (*place, key), value, keys)
        elif isinstance(value, list) and value:
            yield keys, value, where
        else:
            raise UserError(f"{where}: {key} = {value!r}: a sweep is over a list of values")


def _length(layer: ConfigLayer, path: Path, name: str) -> int:
    value = layer.tree.get(name, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise UserError(f"{_where(layer, path, (name,))}: {name} is written as [[{name}]] tables")
    return len(value)


def _where(layer: ConfigLayer, path: Path, place: KeyPath) -> str:
    return layer.source_of(place) or str(path)
