"""A step done again from its batch: with the run's settings the same bytes, with others what those would have made.

Parts: `Start` (the state to begin from), `StepTaken` (what a step did), `Replay`, `replay_step`. The state before the
step is that of the nearest checkpoint with the steps since trained again. Invariants: nothing in the run directory is
written; the other settings begin from the same weights, the same moments of the optimiser and the same batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mettle.errors import UserError
from mettle.records.tokens import Batch
from mettle.trainer.checkpoint import load_learner
from mettle.trainer.config import TrainerConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loop import make_learner
from mettle.trainer.process import setup_torch
from mettle.trainer.publish import published_state
from mettle.trainer.tenant_files import METADATA
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


@dataclass(frozen=True, slots=True)
class SavedState:
    """A learner's state in memory, to begin from again."""

    parameters: dict[str, Tensor]
    optimiser: list[dict[str, Any]]
    rng: Tensor


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
        learner = make_learner(config.alone(), config.model or model, world)
        if start.folder is not None:
            load_learner(start.folder, learner)
        differing = []
        for number in range(start.step + 1, step):
            learner.train(batch_of(number), number)
            if weights_digest(_weights(learner)) != recorded(number):
                differing.append(number)
        batch = batch_of(step)
        before, saved = _weights(learner), _saved(learner)
        same = _take(learner, batch, step, before)
        if same.digest != recorded(step):
            differing.append(step)
        if other is None:
            return Replay(step, start, same, None, tuple(differing), None)
        taken = _take(_with_settings(other, model, saved, world), batch, step, before)
        return Replay(step, start, same, taken, tuple(differing), _distance(same.weights, taken.weights))


def weights_digest(weights: dict[str, Tensor]) -> str:
    """The digest that these weights have when they are published."""
    return hashlib.sha256(save(weights, metadata=METADATA)).hexdigest()


def _take(learner: Learner, batch: Batch, step: int, before: dict[str, Tensor]) -> StepTaken:
    metrics = {name: value for name, value in learner.train(batch, step).items() if not name.startswith(TIMES)}
    weights = _weights(learner)
    moved = _distance(before, weights)
    metrics["update/norm"] = moved
    metrics["update/relative"] = moved / max(_norm(before), 1e-12)
    after = learner.measure(batch)
    kept = ("loss/total", "entropy/mean", "mismatch_kl/mean", "mismatch_kl/max", "masked/share")
    return StepTaken(weights_digest(weights), metrics | {f"after/{name}": after[name] for name in kept}, weights)


def _with_settings(config: TrainerConfig, model: Path, saved: SavedState, world: World) -> Learner:
    """A learner of other settings in a saved state. The optimiser keeps its moments and takes the new numbers."""
    learner = make_learner(config.alone(), config.model or model, world)
    own = learner.tenant.parameters
    if {name: p.shape for name, p in own.items()} != {name: p.shape for name, p in saved.parameters.items()}:
        raise UserError("a step is repeated with what the run trains: leave lora as it is")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved.parameters[name])
    learner.tenant.load_optimizer_state(saved.optimiser)
    torch.set_rng_state(saved.rng)
    return learner


def _saved(learner: Learner) -> SavedState:
    parameters = {name: parameter.detach().clone() for name, parameter in learner.tenant.parameters.items()}
    return SavedState(parameters, learner.tenant.optimizer_state(), torch.get_rng_state())


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in published_state(learner).items()}


def _distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((right[name].double() - left[name].double()).square().sum()) for name in left))


def _norm(weights: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in weights.values()))
