"""Evaluations from a TOML file: settings for all, one `[[eval]]` each, and sweeps.

    model = "mine"                  # settings for all
    rollouts_per_example = 4

    [[eval]]
    env_id = "gsm8k"

    [[ablation]]                    # one evaluation for each combination
    env_id = "wordle"
    [ablation.sweep]
    temperature = [0.0, 0.7, 1.0]

Parts: `read_plan`, `package_defaults` (what an environment's pyproject says under `[tool.verifiers.eval]`). Strength:
command line, then the `[[eval]]`, then the settings for all, then the environment's own, then the built-in ones.
Invariant: whatever is wrong in a file is one line that names file, line and the nearest key.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mettle.config.layers import Layer, read_layer
from mettle.config.positions import KeyPath
from mettle.envs.evaluation.spec import ALIASES, IGNORED, SETTINGS, EvalSpec, checked, relative_to, spec_from
from mettle.envs.packages.loading import resolve_environment
from mettle.errors import UserError

FILE_PATHS = ("endpoints_path", "env_dir_path")


def read_plan(path: Path, overrides: Mapping[str, Any]) -> list[EvalSpec]:
    """The evaluations of a file, with `overrides` (settings by their own names) on top of each.

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
            specs.append(_spec(layer, path, place, shared, own, variant, overrides))
    return specs


def package_defaults(env_id: str) -> dict[str, Any]:
    """What the environment's own pyproject.toml sets for its evaluations; nothing for one without such a file."""
    folder = resolve_environment(env_id).folder
    manifest = folder / "pyproject.toml" if folder is not None else None
    if manifest is None or not manifest.is_file():
        return {}
    tools = tomllib.loads(manifest.read_text(encoding="utf-8")).get("tool") or {}
    found: dict[str, Any] = {}
    for tool in ("verifiers", "mettle"):
        for key, value in ((tools.get(tool) or {}).get("eval") or {}).items():
            try:
                name, setting = checked(key, value)
            except KeyError:
                raise UserError(f"{manifest}: [tool.{tool}.eval] has an unknown key {key!r}; {_hint(key)}") from None
            except UserError as error:
                raise UserError(f"{manifest}: [tool.{tool}.eval] {error}") from None
            found[name] = setting
    return found


def _spec(
    layer: Layer,
    path: Path,
    place: KeyPath,
    shared: Mapping[str, Any],
    own: Mapping[str, Any],
    variant: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> EvalSpec:
    given = {**shared, **own, **variant, **overrides}
    for needed, how in (("env_id", "env_id = NAME"), ("model", "model = NAME, there or for all, or -m")):
        if needed not in given:
            named = ".".join(map(str, place))
            raise UserError(f"{layer.source_of(place) or path}: {named} has no {needed}; set {how}")
    spec = spec_from([package_defaults(given["env_id"]), shared, own, variant, overrides])
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
                f"{_where(layer, path, (*place, key))}: unknown key {'.'.join(map(str, (*place, key)))!r}; {_hint(key)}"
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


def _hint(key: str) -> str:
    import difflib

    known = [*SETTINGS, *ALIASES]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
