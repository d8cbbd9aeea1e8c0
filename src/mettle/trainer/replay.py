"""A step done again from its batch: with the run's settings the same bytes, with others what those would have made.

Parts: `Start` (the state to begin from), `StepTaken` (what a step did), `Replay`, `replay_step`. The state before the
step is that of the nearest checkpoint with the steps since trained again. Invariants: nothing in the run directory is
written; the other settings begin from the same weights, the same moments of the optimiser and the same batch.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from mettle.records.tokens import Batch
from mettle.trainer.checkpoint import load_learner
from mettle.trainer.config import OptimConfig, TrainerConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loop import recipe_of
from mettle.trainer.model import Policy, full_state, load_policy
from mettle.trainer.process import setup_torch
from mettle.trainer.world import World, join_world

TIMES = ("time/", "throughput/", "memory/")
"""Metrics that say how fast a step was, and not what it did."""


@dataclass(frozen=True, slots=True)
class Start:
    """The state after `step`: in `folder`, or the initial policy's."""

    step: int
    folder: Path | None


@dataclass(frozen=True, slots=True)
class StepTaken:
    """`metrics` of the step; `after/...` those of the same batch under the new weights. `weights` are copies."""

    digest: str
    metrics: dict[str, float]
    weights: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """`same` is the step as the run took it, `other` with the settings that were asked for instead.

    `differing` are the steps on the way, that one among them, that made other weights than the run has on record.
    """

    step: int
    start: Start
    same: StepTaken
    other: StepTaken | None
    differing: tuple[int, ...]
    distance: float | None
    """Between the weights that the two made, in the Euclidean norm."""


def replay_step(
    config: TrainerConfig,
    start: Start,
    step: int,
    *,
    model: Path,
    batch_of: Callable[[int], Batch],
    recorded: Callable[[int], str | None],
    other: TrainerConfig | None = None,
) -> Replay:
    """Take the steps after `start` again up to `step`. `recorded` says which digest a step's weights had in the run."""
    setup_torch(config.num_threads, config.seed)
    with join_world(config.device) as world:
        policy = load_policy(config.model or model, world, dtype=getattr(torch, config.dtype))
        learner = Learner(policy, recipe_of(config), world)
        if start.folder is not None:
            load_learner(start.folder, learner)
        differing = []
        for number in range(start.step + 1, step):
            learner.train(batch_of(number), number)
            if weights_digest(_weights(policy)) != recorded(number):
                differing.append(number)
        batch = batch_of(step)
        before, saved = _weights(policy), _saved(learner)
        same = _take(learner, batch, step, before)
        if same.digest != recorded(step):
            differing.append(step)
        if other is None:
            return Replay(step, start, same, None, tuple(differing), None)
        taken = _take(_with_settings(other, model, saved, world), batch, step, before)
        return Replay(step, start, same, taken, tuple(differing), _distance(same.weights, taken.weights))


def weights_digest(weights: dict[str, Tensor]) -> str:
    """The digest that these weights have when they are published."""
    return hashlib.sha256(save(weights, metadata={"format": "pt"})).hexdigest()


def _take(learner: Learner, batch: Batch, step: int, before: dict[str, Tensor]) -> StepTaken:
    metrics = {name: value for name, value in learner.train(batch, step).items() if not name.startswith(TIMES)}
    weights = _weights(learner.policy)
    moved = _distance(before, weights)
    metrics["update/norm"] = moved
    metrics["update/relative"] = moved / max(_norm(before), 1e-12)
    after = learner.measure(batch)
    kept = ("loss/total", "entropy/mean", "mismatch_kl/mean", "mismatch_kl/max", "masked/share")
    return StepTaken(weights_digest(weights), metrics | {f"after/{name}": after[name] for name in kept}, weights)


def _with_settings(config: TrainerConfig, model: Path, saved: tuple[Any, Any, Tensor], world: World) -> Learner:
    """A learner of other settings in a saved state. The optimiser keeps its moments and takes the new numbers."""
    policy = load_policy(config.model or model, world, dtype=getattr(torch, config.dtype))
    learner = Learner(policy, recipe_of(config), world)
    weights, optimiser, rng = saved
    if optimiser is None:
        set_model_state_dict(policy, weights)
    else:
        set_state_dict(policy, learner.optimizer, model_state_dict=weights, optim_state_dict=optimiser)
    torch.set_rng_state(rng)
    _apply(learner.optimizer, config.optim)
    return learner


def _apply(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    for group in optimizer.param_groups:
        decays = any(parameter.ndim > 1 for parameter in group["params"])
        group |= {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay if decays else 0.0}


def _saved(learner: Learner) -> tuple[Any, Any, Tensor]:
    if not learner.optimizer.state:  # asked for its state before its first step, torch takes a step to make one
        return copy.deepcopy(get_model_state_dict(learner.policy)), None, torch.get_rng_state()
    weights, optimiser = get_state_dict(learner.policy, learner.optimizer)
    return copy.deepcopy(weights), copy.deepcopy(optimiser), torch.get_rng_state()


def _weights(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in full_state(policy).items()}


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((right[name].double() - left[name].double()).square().sum()) for name in left))


def _norm(weights: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in weights.values()))
