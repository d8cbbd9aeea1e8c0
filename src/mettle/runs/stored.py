"""The config that a run was made with, as this release reads it.

A release may refuse a setting that the one before took. One that had no effect is left out, which is said once; with
one that had an effect the run can't go on as it began, and a line says what can be done. Parts: `read_run_config`
(nothing is written), `mend_config`. Invariant: what is left out changes nothing that the run does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mettle.config import Loaded
from mettle.errors import UserError
from mettle.inference.config import AUDITORS, IDLE_WITH_VLLM, InferenceConfig
from mettle.orchestrator.config import POOLS, TRAINS_ONLY, CurriculumConfig, EnvConfig, OrchestratorConfig
from mettle.runs.config import OF_AN_ENGINE, ModelConfig, RunConfig
from mettle.runs.create import write_configs
from mettle.storage.journal import Journal
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import DistillationConfig, OptimConfig, ProbeConfig, SchedulerConfig, TrainerConfig

Table = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Idle:
    """Keys of the table of a model that have no effect where `is_idle` says so of it."""

    model: type[BaseModel]
    keys: tuple[str, ...]
    is_idle: Callable[[Mapping[str, Any]], bool] = lambda _: True


def _is_only(inference: Mapping[str, Any], engine: str) -> bool:
    """Without an embedded engine beside it that audits workers from outside."""
    return inference.get("engine") == engine and inference.get("outside") is None


_RECIPE = {
    "scheduler": _Idle(SchedulerConfig, ("decay_steps", "min_lr_ratio"), lambda t: t.get("type") == "constant"),
    "optim": _Idle(OptimConfig, ("momentum",), lambda t: t.get("type") == "adamw"),
}
_CURRICULUM = _Idle(CurriculumConfig, POOLS, lambda t: t.get("sampler") == "standard")
_IDLE = (
    ("model", _Idle(ModelConfig, ("preset",), lambda t: t.get("path") is not None)),
    *((f"{place}.{name}", idle) for place in ("trainer", "warm_up.sft") for name, idle in _RECIPE.items()),
    ("trainer.distillation", _Idle(DistillationConfig, ("jsd_weight",), lambda t: t.get("divergence") != "jsd")),
    ("trainer", _Idle(TrainerConfig, ("weight_broadcast_host",), lambda t: t.get("weight_broadcast") == "file")),
    ("trainer", _Idle(TrainerConfig, ("model",))),
    ("warm_up.sft.probe", _Idle(ProbeConfig, ("env_args",), lambda t: t.get("env") is None)),
    ("orchestrator", _Idle(OrchestratorConfig, ("model",))),
    ("orchestrator", _Idle(OrchestratorConfig, ("min_inflight_groups",), lambda t: t.get("max_staleness") == 0)),
    ("orchestrator.curriculum", _CURRICULUM),
    ("orchestrator.envs.*.curriculum", _CURRICULUM),
    ("orchestrator.eval.envs.*", _Idle(EnvConfig, TRAINS_ONLY)),
    ("inference", _Idle(InferenceConfig, (*IDLE_WITH_VLLM, *AUDITORS), lambda t: _is_only(t, "vllm"))),
    ("inference", _Idle(InferenceConfig, OF_AN_ENGINE, lambda t: _is_only(t, "remote"))),
)
"""Settings that earlier releases took without effect, by the table that has them."""


def read_run_config(run_dir: RunDir) -> RunConfig:
    """The config that a run was made with, less what had no effect and is refused now.

    Raises: UserError for a setting that had one.
    """
    return _read(run_dir)[0]


def mend_config(run_dir: RunDir, journal: Journal) -> RunConfig:
    """The same, written down for the run's processes where something was left out, and said."""
    config, left_out = _read(run_dir)
    if left_out:
        sources: dict[str, str] = json.loads((run_dir.path / "sources.json").read_text())
        kept = {key: source for key, source in sources.items() if not any(_is_in(key, name) for name in left_out)}
        write_configs(run_dir, Loaded(config, kept))
        text = f"left out of the run's config, where it had no effect and is refused now: {', '.join(left_out)}"
        journal.event("supervisor", "config_mended", text)
        print(f"note: {text}", file=sys.stderr, flush=True)
    return config


def _read(run_dir: RunDir) -> tuple[RunConfig, list[str]]:
    """(config, the keys that were left out)."""
    tree: Table = json.loads(run_dir.config("run").read_text())
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        refused = error
    left_out = list(_leave_out(tree))
    try:
        return RunConfig.model_validate(tree), left_out
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        raise UserError(
            f"run {run_dir.name} cannot go on with the config that it was made with: {where}: {said} (where an earlier"
            " release took that, it goes on with that release; or begin a new run from its weights: `mettle rl export"
            f" {run_dir.path} DIR`, then `--model.path DIR`)"
        ) from refused


def _leave_out(tree: Table) -> Iterator[str]:
    """Take what is without effect out of a config's tree; the dotted keys of what had been set."""
    for place, idle in _IDLE:
        yield from _taken(tree, place, idle)
    wanted = _kinds_of_teaching(tree)
    if not wanted:
        yield from _taken(tree, "trainer.distillation", _Idle(DistillationConfig, ("divergence", "jsd_weight")))
    if "whole" not in wanted:
        yield from _taken(tree, "trainer.distillation", _Idle(DistillationConfig, ("teacher",)))


def _taken(tree: Table, place: str, idle: _Idle) -> Iterator[str]:
    for name, table in _tables(tree, place.split(".")):
        for key in idle.keys if idle.is_idle(table) else ():
            default = idle.model.model_fields[key].get_default(call_default_factory=True)
            if key in table and table.pop(key) != default:
                yield f"{name}.{key}"


def _tables(tree: Any, parts: list[str], name: str = "") -> Iterator[tuple[str, Table]]:
    """(dotted name, table) of what lies at `parts`; `*` is each element of a list."""
    if not parts:
        if isinstance(tree, dict):
            yield name, tree
        return
    first, *rest = parts
    inner = dict(enumerate(tree)) if isinstance(tree, list) else tree if isinstance(tree, dict) else {}
    for key, value in inner.items():
        if first in ("*", key):
            yield from _tables(value, rest, f"{name}.{key}" if name else str(key))


def _kinds_of_teaching(tree: Table) -> set[str]:
    try:
        return {str(kind) for kind in OrchestratorConfig.model_validate(tree["orchestrator"]).kinds_of_teaching if kind}
    except ValidationError:
        return {"whole"}  # it is told what is wrong there


def _is_in(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")
