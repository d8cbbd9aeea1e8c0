"""What is to be optimised, how far, and with which models: settings from a TOML file and from the command line.

    model = "mine"
    reflection_model = "writer"      # [default: model]

    [env]
    env_id = "gsm8k"

    [gepa]
    max_calls = 500

    [sampling]
    max_tokens = 512

Parts: `GepaSpec`, `read_config`, `spec_from_settings`. Settings that say where models answer and how an environment is
loaded are those of evaluations (`mettle.evals.spec`). Invariant: whatever is wrong in a file is one line that
names file, line and the nearest key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mettle.config.layers import Layer, read_layer
from mettle.config.positions import KeyPath
from mettle.config.values import flag, number, text, whole
from mettle.errors import UserError
from mettle.evals.spec import EvalSpec, checked, relative_to, spec_from

CONNECTION = (
    "model", "endpoints_path", "provider", "api_key_var", "api_base_url", "api_client_type", "headers", "env_dir_path",
    "env_id", "env_args", "extra_env_kwargs", "sampling_args", "max_tokens", "temperature", "max_concurrent",
    "max_retries", "state_columns", "timeout",
)  # fmt: skip
"""Settings that mean here what they mean in an evaluation."""
SHORT = {"sampling": "sampling_args", "header": "headers", "id": "env_id", "args": "env_args"}
IGNORED = ("verbose", "tui")
FILE_PATHS = ("endpoints_path", "env_dir_path")


@dataclass(frozen=True, slots=True)
class GepaSpec:
    """One optimisation. `connection` holds the environment, the model that is prompted, and its sampling."""

    connection: EvalSpec
    reflection_model: str | None = None
    max_calls: int = 500
    num_train: int = 100
    num_val: int = 50
    num_test: int = 50
    test_rollouts: int = 1
    minibatch_size: int = 3
    perfect_score: float = 1.0
    seed: int = 0
    seed_prompt: str | None = None
    tool_descriptions: bool = False
    run_dir: str | None = None
    save_results: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As it is saved, so that `--resume` needs to be told nothing again; headers can hold secrets and are not."""
        own = {name: value for name, value in asdict(self).items() if name != "connection"}
        saved = self.connection.to_dict()
        return own | {name: saved[name] for name in CONNECTION if saved.get(name) not in (None, {}, [])}


OWN: Mapping[str, Callable[[Any], Any]] = {
    "reflection_model": text, "max_calls": whole(1), "num_train": whole(1), "num_val": whole(1),
    "num_test": whole(0), "test_rollouts": whole(1), "minibatch_size": whole(1), "perfect_score": number,
    "seed": whole(0), "seed_prompt": text, "tool_descriptions": flag, "run_dir": text, "save_results": flag,
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, by their own names.

    Raises: UserError for a file that cannot be read, an unknown key, a wrong value or several environments.
    """
    layer = read_layer(path)
    found: dict[str, Any] = {}
    for place, table in _tables(layer, path):
        for key, value in table.items():
            if key in IGNORED and not place:
                continue
            name, setting = _setting(layer, path, (*place, key), value)
            found[name] = relative_to(setting, path.parent) if name in FILE_PATHS else setting
    return found


def spec_from_settings(levels: Sequence[Mapping[str, Any]]) -> GepaSpec:
    """One spec from levels of settings, the strongest last.

    Raises: UserError when there is no environment or no model.
    """
    merged = {name: value for level in levels for name, value in level.items() if name in OWN}
    shared = [{name: value for name, value in level.items() if name not in OWN} for level in levels]
    given = {name for level in shared for name in level}
    if "env_id" not in given:
        raise UserError("say which environment: `mettle gepa run ENV -m MODEL`; `mettle env list` names them")
    if "model" not in given:
        raise UserError("say which model with -m: a model directory, an endpoint's id, or a model at -b")
    known = {entry.name for entry in fields(GepaSpec)}
    return GepaSpec(spec_from(shared), **{name: value for name, value in merged.items() if name in known})


def own_setting(name: str, value: Any) -> Any:
    """A checked value of one of the settings in `OWN`. Raises: UserError."""
    try:
        return OWN[name](value)
    except ValueError as error:
        raise UserError(f"{name} = {value!r}: must be {error}") from None


def _tables(layer: Layer, path: Path) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """The tables of a file with their places: the top level, `[gepa]`, `[env]`, `[execution]`."""
    tree = layer.tree
    yield (), {key: value for key, value in tree.items() if key not in ("env", "gepa", "execution")}
    for name in ("gepa", "execution"):
        if name in tree:
            yield (name,), _table(layer, path, (name,), tree[name])
    if "env" in tree:
        entries = tree["env"] if isinstance(tree["env"], list) else [tree["env"]]
        if len(entries) != 1:
            where = layer.source_of(("env",)) or str(path)
            raise UserError(f"{where}: {len(entries)} environments; one run optimises the prompt of one")
        place: KeyPath = ("env", 0) if isinstance(tree["env"], list) else ("env",)
        yield place, _table(layer, path, place, entries[0])


def _table(layer: Layer, path: Path, place: KeyPath, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{layer.source_of(place) or path}: {place[0]} is a table, as [{place[0]}]")
    return value


def _setting(layer: Layer, path: Path, place: KeyPath, value: Any) -> tuple[str, Any]:
    key = str(place[-1])
    name = SHORT.get(key, key)
    where = layer.source_of(place) or str(path)
    if name not in OWN and name not in CONNECTION:
        near = difflib.get_close_matches(key, [*OWN, *CONNECTION], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join((*OWN, *CONNECTION))}"
        raise UserError(f"{where}: unknown key {'.'.join(map(str, place))!r}; {hint}")
    try:
        return (name, own_setting(name, value)) if name in OWN else checked(name, value)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
