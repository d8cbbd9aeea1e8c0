"""The functions of `verifiers.utils.save_utils`, `eval_utils` and `metric_utils` that environments call themselves."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.envs.rollout_record import output_of
from mettle.envs.rows import Rows
from mettle.envs.state import State
from mettle.errors import UserError
from mettle.evals.estimator import pass_at_k

RESULTS = "results.jsonl"


def state_to_output(state: State, state_columns: Sequence[str] = ()) -> dict[str, Any]:
    """A finished rollout as a row of the results."""
    return output_of(state, state_columns)


def states_to_outputs(states: Sequence[State], state_columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Finished rollouts as rows of the results."""
    return [output_of(state, state_columns) for state in states]


def make_dataset(results: Mapping[str, Any]) -> Rows:
    """The outputs of an evaluation as rows."""
    return Rows.from_list(results["outputs"])


def load_outputs(results_path: str | Path) -> list[dict[str, Any]]:
    """The rows of a results folder. A last line that was cut short is left out."""
    rows = []
    for line in (Path(results_path) / RESULTS).read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return rows


def save_outputs(outputs: Sequence[Mapping[str, Any]], results_path: str | Path, mode: str = "w") -> None:
    """Write rows to a results folder, after those that are there with mode "a"."""
    folder = Path(results_path)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESULTS).open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(make_serializable(output)) + "\n" for output in outputs)


def is_json_serializable(value: Any) -> bool:
    """Whether JSON can hold the value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def make_serializable(value: Any) -> Any:
    """A value that JSON can hold; what it does not know becomes what it says of itself, or text."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    for method in ("model_dump", "to_dict", "tolist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return dict(value) if isinstance(value, Mapping) else str(value)


def load_toml_config(path: str | Path) -> dict[str, Any]:
    """A TOML file as a dict."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


load_toml = load_toml_config


def compute_pass_at_k(rewards: Sequence[float], k: int, threshold: float = 0.5) -> float:
    """Probability that one of `k` rollouts, drawn from these without replacement, reaches the threshold."""
    num_right = sum(reward >= threshold for reward in rewards)
    return pass_at_k(len(rewards), num_right, k) if len(rewards) >= k else 0.0
