"""A submitted run: from the field's flat body, or its TOML, to the config of a run on this machine.

A submission names a model and environments that the operator of this Hub offers, and sizes; it never names a path, a
command or a machine. Invariants: what would change the result and is not offered is refused by name; what is accepted
is checked as `mettle rl run` would check it.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, field_validator, model_validator

from mettle.config import Loaded
from mettle.errors import MettleError, UserError
from mettle.hub.routes.json_bodies import HubRequest
from mettle.web.problems import HttpError

if TYPE_CHECKING:
    from mettle.runs.config import RunConfig

BUILT_IN: Final = "tiny"
"""A small policy that is made on the spot and warmed up by imitation: there on every Hub."""
_SAMPLING: Final = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p"})
_WANDB: Final = frozenset({"entity", "project"})
_EVAL: Final = frozenset({"interval", "num_examples", "rollouts_per_example"})


class SubmittedEnvironment(HubRequest):
    id: str = Field(min_length=1, max_length=200)
    args: dict[str, Any] = Field(default_factory=dict)


class Submission(HubRequest):
    """The body of `POST /rft/runs`, or a hosted TOML as JSON: `env` for `environments`, `[sampling]` as a table."""

    name: str | None = Field(default=None, max_length=100)
    model: str
    environments: list[SubmittedEnvironment] = Field(min_length=1, max_length=16)
    max_steps: int = Field(default=100, ge=1, le=100_000)
    batch_size: int = Field(default=128, ge=1, le=65_536)
    rollouts_per_example: int = Field(default=8, ge=2, le=2048)
    learning_rate: float | None = Field(default=None, gt=0, lt=1)
    lora_rank: int | None = Field(default=None, ge=1, le=512)
    lora_alpha: float | None = Field(default=None, gt=0)
    seed: int = 0
    sampling: dict[str, Any] = Field(default_factory=dict)
    eval: dict[str, Any] = Field(default_factory=dict)
    wandb: dict[str, Any] = Field(default_factory=dict)
    team_id: str | None = None
    override_card: bool = False
    others: list[str] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        tree = {key: value for key, value in body.items() if value is not None}
        tree.pop("others", None)
        if "env" in tree:
            tree["environments"] = tree.pop("env")
        if isinstance(tree.get("model"), dict):
            tree["model"] = tree["model"].get("name") or tree["model"].get("path") or ""
        sampling = dict(tree.pop("sampling", None) or {})
        sampling |= {key: tree.pop(key) for key in _SAMPLING & tree.keys()}
        monitoring = dict(tree.pop("monitoring", None) or {})
        wandb = dict(tree.pop("wandb", None) or monitoring.pop("wandb", None) or {})
        validation = dict(tree.pop("val", None) or tree.pop("eval", None) or {})
        empty = {key for key, value in tree.items() if value in ([], {})}
        known = cls.model_fields.keys() | empty
        unknown = [key for key in tree if key not in known]
        unknown += [f"sampling.{key}" for key in sampling.keys() - _SAMPLING]
        unknown += [f"eval.{key}" for key in validation.keys() - _EVAL]
        unknown += [f"wandb.{key}" for key in wandb.keys() - _WANDB] + [f"monitoring.{key}" for key in monitoring]
        return {**tree, "sampling": sampling, "eval": validation, "wandb": wandb, "others": sorted(unknown)}

    @field_validator("others")
    @classmethod
    def _offered(cls, others: list[str]) -> list[str]:
        if others:
            raise ValueError(f"{', '.join(others)}: not offered for hosted runs here, and would change the result")
        return others


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that runs can start from. `path` is None for the one that is made on the spot."""

    name: str
    path: Path | None


def offered_models(folder: Path) -> list[OfferedModel]:
    """The model directories under a folder, and the one that is always there."""
    found = sorted(path.parent for path in folder.glob("*/config.json")) if folder.is_dir() else []
    return [OfferedModel(BUILT_IN, None), *(OfferedModel(path.name, path.resolve()) for path in found)]


def run_config(asked: Submission, models: list[OfferedModel]) -> tuple[dict[str, Any], Loaded[RunConfig]]:
    """The config of the run, as it is written and as it was read.

    Raises: HttpError 422 for a model or environment that is not offered, or a bad value.
    """
    model = next((each for each in models if each.name == asked.model), None)
    if model is None:
        names = ", ".join(each.name for each in models)
        raise HttpError(422, f"model {asked.model[:100]!r} is not offered here; there are {names}", param="model")
    envs = [{"id": local_name(each.id), "args": each.args} for each in asked.environments]
    loop: dict[str, Any] = {"batch_size": asked.batch_size, "group_size": asked.rollouts_per_example, "envs": envs}
    loop |= {name: table for name, table in (("sampling", asked.sampling), ("eval", asked.eval)) if table}
    config: dict[str, Any] = {
        "max_steps": asked.max_steps, "seed": asked.seed, "orchestrator": loop, "deployment": {"hub": False},
    }  # fmt: skip
    if asked.learning_rate is not None:
        config["trainer"] = {"optim": {"lr": asked.learning_rate}}
    if asked.wandb:
        config["tracking"] = {"wandb": asked.wandb}
    lora = {"rank": asked.lora_rank, "alpha": asked.lora_alpha}
    told = {name: value for name, value in lora.items() if value is not None}
    config["model"] = {"preset": BUILT_IN} if model.path is None else {"path": str(model.path)}
    config["model"] |= {"lora": told} if told else {}
    if model.path is None:
        config["warm_up"] = {"enabled": True}
    return config, _checked(config)


def local_name(name: str) -> str:
    """The environment as this machine knows it. A submission runs no code that the operator has not installed."""
    from mettle.envs.packages.registry import find_environment

    bare, _, version = name.rpartition("/")[2].partition("@")
    try:
        entry = find_environment(bare)
    except UserError as error:
        said = f"environment {name[:120]!r} is not installed on the Hub's machine; its operator installs it with"
        raise HttpError(422, f"{said} `mettle env install {name[:120]}`", param="environments") from error
    if not entry.version:  # any module that can be imported, which is no environment that somebody installed
        raise HttpError(422, f"{bare[:100]!r} is no environment on the Hub's machine", param="environments")
    if version and version not in (entry.version, "latest"):
        raise HttpError(422, f"{bare} is installed here as {entry.version}, not {version[:60]}", param="environments")
    return entry.name


def _checked(config: dict[str, Any]) -> Loaded[RunConfig]:
    """As `mettle rl run` would. Raises: HttpError 422 with its words."""
    from mettle.runs.launch import load_run_config

    with tempfile.TemporaryDirectory(prefix="mettle-hosted-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(as_toml(config), encoding="utf-8")
        try:
            loaded = load_run_config([path])
        except MettleError as error:
            raise HttpError(422, str(error).replace(f"{path}:", "").replace(str(path), "the config")) from error
    try:
        loaded.config.tracking.check()
    except UserError as error:
        said = "[wandb] is not offered: its package is not installed on the Hub's machine"
        raise HttpError(422, said, param="wandb") from error
    return loaded


def as_toml(config: dict[str, Any]) -> str:
    """A run's config as its file has it: inline tables, so that any nesting can be written."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in config.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_value(str(k))} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON escapes as TOML does, DEL aside. Half of a character, which TOML cannot hold, becomes a question mark.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return text.encode("utf-8", "replace").decode("utf-8")
