"""Evaluations from a TOML file: settings for all, one `[[eval]]` each, and sweeps.

    model = "mine"                  # settings for all
    rollouts_per_example = 4

    [[eval]]
    env_id = "gsm8k"

    [[ablation]]                    # one evaluation for each combination
    env_id = "wordle"
    [ablation.sweep]
    temperature = [0.0, 0.7, 1.0]

Parts: `read_plan`. Strength: command line, then the `[[eval]]`, then the settings for all, then the environment's
own, then the built-in ones.
Invariant: whatever is wrong in a file is one line that names file, line and the nearest key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mettle.config.layers import Layer, read_layer
from mettle.config.positions import KeyPath
from mettle.errors import UserError
from mettle.evals.spec import ALIASES, IGNORED, SETTINGS, EvalSpec, checked, relative_to, spec_from

Defaults = Callable[[str], Mapping[str, Any]]
FILE_PATHS = ("endpoints_path", "env_dir_path")


def read_plan(path: Path, overrides: Mapping[str, Any], defaults_of: Defaults) -> list[EvalSpec]:
    """The evaluations of a file, with `overrides` (settings by their own names) on top of each.

    `defaults_of` tells what an environment itself sets for its evaluations.

    Raises: UserError for a file that cannot be read, an unknown key, a wrong value, no evaluation or no model.
    """
    layer = read_layer(path)
    tables: list[tuple[KeyPath, dict[str, Any], list[dict[str, Any]]]] = []
    for index, table in _list(layer, path, "eval"):
        tables.append((("eval", index), table, [{}]))
    for index, table in _list(layer, path, "ablation"):
        place: KeyPath = ("ablation", index)
        own = {key: value for key, value in table.items() if key != "sweep"}
        tables.append((place, own, _sweep(layer, path, (*place, "sweep"), table.get("sweep"))))
    if not tables:
        raise UserError(f"{path} has no [[eval]] and no [[ablation]]; each names an environment with env_id")
    globals_ = {key: value for key, value in layer.tree.items() if key not in ("eval", "ablation")}
    shared = _settings(layer, path, (), globals_)
    specs = []
    for place, table, variants in tables:
        own = _settings(layer, path, place, table)
        for variant in variants:
            specs.append(_spec(layer, path, place, shared, own, variant, overrides, defaults_of))
    return specs


def _spec(
    layer: Layer,
    path: Path,
    place: KeyPath,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    variant: Mapping[str, Any],
    overrides: Mapping[str, Any],
    defaults_of: Defaults,
) -> EvalSpec:
    given = {**shared, **own, **variant, **overrides}
    for needed, how in (("env_id", "env_id = NAME"), ("model", "model = NAME, there or for all, or -m")):
        if needed not in given:
            named = ".".join(map(str, place))
            raise UserError(f"{layer.source_of(place) or path}: {named} has no {needed}; set {how}")
    spec = spec_from([defaults_of(given["env_id"]), shared, own, variant, overrides])
    if variant and spec.name is None:
        return replace(spec, name=_variant_name(spec, variant))
    return spec


def _settings(layer: Layer, path: Path, place: KeyPath, table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in IGNORED:
            continue
        try:
            name, setting = checked(key, value)
        except KeyError:
            raise UserError(
                f"{_where(layer, path, (*place, key))}: unknown key {'.'.join(map(str, (*place, key)))!r}; {hint(key)}"
            ) from None
        except UserError as error:
            raise UserError(f"{_where(layer, path, (*place, key))}: {error}") from None
        found[name] = relative_to(setting, path.parent) if name in FILE_PATHS else setting
    return found


def _sweep(layer: Layer, path: Path, place: KeyPath, table: Any) -> list[dict[str, Any]]:
    """Every combination of the swept values, each as settings."""
    if not isinstance(table, dict) or not table:
        raise UserError(f"{_where(layer, path, place)}: an [[ablation]] has an [ablation.sweep] with lists of values")
    axes = [[(keys, value) for value in values] for keys, values in _axes(layer, path, place, table, ())]
    found = []
    for combination in itertools.product(*axes):
        nested: dict[str, Any] = {}
        for keys, value in combination:
            inner = nested
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = value
        found.append(_settings(layer, path, place, nested))
    return found


def _axes(
    layer: Layer, path: Path, place: KeyPath, table: Mapping[str, Any], above: tuple[str, ...]
) -> list[tuple[tuple[str, ...], list[Any]]]:
    axes: list[tuple[tuple[str, ...], list[Any]]] = []
    for key, value in table.items():
        keys = (*above, *key.split("."))
        if isinstance(value, dict):
            axes += _axes(layer, path, (*place, key), value, keys)
        elif isinstance(value, list) and value:
            axes.append((keys, value))
        else:
            raise UserError(
                f"{_where(layer, path, (*place, key))}: {key} = {value!r}: a sweep is over a list of values"
            )
    return axes


def _variant_name(spec: EvalSpec, variant: Mapping[str, Any]) -> str:
    parts = []
    for name, value in variant.items():
        parts += [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [f"{name}={value}"]
    return f"{spec.env_id} {' '.join(parts)}"


def _list(layer: Layer, path: Path, name: str) -> Sequence[tuple[int, dict[str, Any]]]:
    value = layer.tree.get(name, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise UserError(f"{_where(layer, path, (name,))}: {name} is written as [[{name}]] tables")
    return list(enumerate(value))


def _where(layer: Layer, path: Path, place: KeyPath) -> str:
    return layer.source_of(place) or str(path)


def hint(key: str) -> str:
    """The setting that an unknown key was meant to be, or all there are."""
    import difflib

    known = [*SETTINGS, *ALIASES]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
