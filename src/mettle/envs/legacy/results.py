"""The functions of `verifiers.utils.save_utils`, `eval_utils` and `metric_utils` that environments call themselves."""

from __future__ import annotations

import json
import logging
import runpy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.clients.endpoints import ENDPOINTS_FILE, read_registry
from mettle.envs.author_records import EndpointConfig
from mettle.envs.rollout_record import output_of
from mettle.envs.rows import Rows
from mettle.envs.state import State
from mettle.errors import UserError
from mettle.evals.estimator import pass_at_k

logger = logging.getLogger(__name__)

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


def load_endpoints(endpoints_path: str | Path = ENDPOINTS_FILE) -> dict[str, list[EndpointConfig]]:
    """The endpoints of a registry by name: a TOML file, a Python file that sets ENDPOINTS, or a folder with either.

    Where there is none, none. Raises: UserError for a file that cannot be read as one.
    """
    path = resolve_endpoints_file(endpoints_path)
    if path is None:
        logger.warning("no endpoints at %s", endpoints_path)
        return {}
    if path.suffix != ".py":
        named = read_registry(path, is_needed=True).endpoints
        return {name: [_row(endpoint.model_dump()) for endpoint in found] for name, found in named.items()}
    try:
        listed = runpy.run_path(str(path))["ENDPOINTS"]
        rows = {name: found if isinstance(found, list) else [found] for name, found in listed.items()}
        return {name: [_row(row) for row in found] for name, found in rows.items()}
    except Exception as error:
        raise UserError(f"cannot read endpoints from {path}: {type(error).__name__}: {error}") from error


def resolve_endpoints_file(endpoints_path: str | Path) -> Path | None:
    """The file that a path means: itself, or in a folder `endpoints.toml`, then `endpoints.py`."""
    path = Path(endpoints_path)
    candidates = (path / "endpoints.toml", path / "endpoints.py") if path.is_dir() else (path,)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _row(given: Mapping[str, Any]) -> EndpointConfig:
    """A row under the names that 0.1.2 had (`url`, `key`) and those of later releases."""
    url, key = given.get("url") or given.get("api_base_url"), given.get("key") or given.get("api_key_var")
    kind = given.get("api_client_type") or given.get("type") or "openai_chat_completions"
    return EndpointConfig(
        model=given["model"], url=url, base_url=url, key=key, api_key_var=key, api_client_type=kind,
        extra_headers=dict(given.get("headers") or given.get("extra_headers") or {}),
    )  # fmt: skip


def compute_pass_at_k(rewards: Sequence[float], k: int, threshold: float = 0.5) -> float:
    """Probability that one of `k` rollouts, drawn from these without replacement, reaches the threshold."""
    num_right = sum(reward >= threshold for reward in rewards)
    return pass_at_k(len(rewards), num_right, k) if len(rewards) >= k else 0.0
