"""Tuning on a file of preference pairs, offline: chosen and rejected answers in, a model or an adapter out.

Parts: `PreferenceTuning` (what is asked for), `read_pairs`, `tune`. A step has two verbs of the learner: `accumulate`
without a gradient tells the log-probability of every answer, `preferences` what each is to change by, and `accumulate`
with that as weights of a cross-entropy gives the gradient. The reference is the model as it was read; its
log-probabilities are computed once, before the first step, and kept beside the checkpoints. Invariants are those of
`finetuning`: the model is left alone, and a killed tuning goes on to the same bytes.

Legend: P pairs of a step; its 2 P answers are P chosen ones and then P rejected ones.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import storage_errors, write_atomic
from mettle.trainer.demonstrations import Demonstration, batch_of, shuffled_places
from mettle.trainer.finetuning import FineTuning, asked_of, config_of, example_of, write_trained
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner, learning_rate
from mettle.trainer.loop import make_learner
from mettle.trainer.preferences import Pairs, PreferenceLoss, Values
from mettle.trainer.process import setup_torch
from mettle.trainer.saves import Saves, Unfinished
from mettle.trainer.sum_losses import CrossEntropySum
from mettle.trainer.tenant import OptimParams
from mettle.trainer.world import join_world

logger = logging.getLogger(__name__)

KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, each with what of it trains."""

    chosen: Demonstration
    rejected: Demonstration


@dataclass(frozen=True, slots=True)
class PreferenceTuning(FineTuning):
    """A fine-tuning whose examples are pairs."""

    loss: PreferenceLoss = field(default_factory=PreferenceLoss)


def tune(task: PreferenceTuning, tell: Callable[[int, int, dict[str, float]], None]) -> dict[str, Any]:
    """Train and write `task.to`; `tell` hears of each step. Returns figures of the first and the last step.

    Raises: UserError when a line, the model or the adapters do not fit.
    """
    if task.to.exists():
        raise UserError(f"{task.to} is there already; name a folder that is not")
    pairs = read_pairs(task.data, Renderer.from_directory(task.model))
    unfinished = Unfinished(task.to)
    with unfinished.begun(asked_of(task) | {"loss": asdict(task.loss)}):
        done = _train(task, pairs, unfinished, tell)
        unfinished.remove()
    return done


def read_pairs(path: Path, renderer: Renderer) -> list[AnswerPair]:
    """Every line of a JSONL file: `{"prompt": ..., "chosen": ..., "rejected": ...}` as texts or messages, or whole
    chats as `chosen` and `rejected`.

    Raises: UserError that names the line which does not fit.
    """
    with storage_errors(path, "reading"):
        lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_pair(json.loads(line), renderer))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is no pair: {error!r}") from error
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no pairs")
    return found


def _pair(row: dict[str, Any], renderer: Renderer) -> AnswerPair:
    missing = [key for key in KEYS[1:] if key not in row]
    if missing:
        raise UserError(f"a pair has {', '.join(KEYS)}; this one has {', '.join(row) or 'nothing'}")
    if "prompt" in row:
        rows = [{"prompt": row["prompt"], "completion": row[key]} for key in KEYS[1:]]
    else:
        rows = [{"messages": row[key], "tools": row.get("tools")} for key in KEYS[1:]]
    chosen, rejected = (example_of(each, renderer) for each in rows)
    if chosen.token_ids.tobytes() == rejected.token_ids.tobytes():
        raise UserError("chosen and rejected are the same, which prefers nothing")
    return AnswerPair(chosen, rejected)


def _train(
    task: PreferenceTuning,
    pairs: Sequence[AnswerPair],
    unfinished: Unfinished,
    tell: Callable[[int, int, dict[str, float]], None],
) -> dict[str, Any]:
    setup_torch(task.num_threads, task.seed)
    num_steps = max(1, math.ceil(len(pairs) * task.epochs / task.batch_size))
    size = min(task.batch_size, len(pairs))
    with join_world("auto") as world:
        learner = make_learner(config_of(task, num_steps), task.model, world)
        reference = _reference(learner, task, pairs, unfinished.folder / "reference.npy")
        saves = Saves(unfinished.checkpoints, learner, task.checkpoint_s)
        found = saves.restore(logger.warning)
        first = 0 if found is None else found.step
        ends = {} if found is None else found.orchestrator
        for step, chosen in islice(enumerate(shuffled_places(len(pairs), size, task.seed), start=1), first, num_steps):
            figures = take_step(learner, task.loss, [pairs[i] for i in chosen], reference[:, chosen], step)
            kept = {name: figures[name] for name in ("loss", "accuracy", "margin")}
            ends = {"first": ends.get("first", kept), "last": kept}
            tell(step, num_steps, figures)
            saves.save_if_due(step, ends)
        write_trained(task, learner)
    return {"steps": num_steps, "pairs": len(pairs), "resumed_after": first, **ends}


def take_step(
    learner: Learner, loss: PreferenceLoss, pairs: Sequence[AnswerPair], reference: Values, step: int
) -> dict[str, float]:
    """One optimiser step on pairs, whose `reference` sums are [2, P]; its figures."""
    sequences = _answers(pairs, step)
    sums, counts = _sums(learner, sequences)
    found = loss.of(Pairs(*np.split(sums, 2), *reference, *np.split(counts, 2)))
    # The derivative of -w l by l is -w, and that of the loss is the same for all tokens of an answer.
    weights = -np.repeat(np.concatenate([found.by_chosen, found.by_rejected]), sequences.num_members)
    weighted = replace(sequences, columns={**sequences.columns, "ce_weights": weights.astype(np.float32)})
    learner.accumulate(weighted, CrossEntropySum())
    recipe = learner.recipe
    rate = learning_rate(step, recipe.scheduler, peak=recipe.optim.lr, max_steps=recipe.max_steps)
    own = recipe.optim
    optim = learner.step(OptimParams(rate, own.betas, own.eps, own.weight_decay, own.max_grad_norm))
    chosen, rejected = np.split(sums / counts, 2)
    return optim | {
        "loss": found.loss,
        "accuracy": float((found.margins > 0).mean()),
        "margin": float(found.margins.mean()),
        "logprob/chosen": float(chosen.mean()),
        "logprob/rejected": float(rejected.mean()),
    }


def _answers(pairs: Sequence[AnswerPair], step: int) -> Sequences:
    return Sequences.of(batch_of([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], step))


def _sums(learner: Learner, sequences: Sequences) -> tuple[Values, Values]:
    """([2 P] the log-probability of each answer under the policy as it is, [2 P] its tokens)."""
    done = learner.accumulate(sequences, CrossEntropySum(), is_forward_only=True)
    owners = np.repeat(np.arange(len(sequences.starts)), sequences.num_members)
    sums: Values = np.bincount(owners, done.logprobs.astype(np.float64), len(sequences.starts)).astype(np.float64)
    return sums, sequences.num_members.astype(np.float64)


def _reference(learner: Learner, task: PreferenceTuning, pairs: Sequence[AnswerPair], path: Path) -> Values:
    """[2, number of pairs] sums under the model as it was read; zeros for a loss that asks no reference."""
    if not task.loss.has_reference:
        return np.zeros((2, len(pairs)))
    if path.exists():
        with storage_errors(path, "reading"):
            kept: Values = np.frombuffer(path.read_bytes(), np.float64).reshape(2, len(pairs))
        return kept
    parts = [
        _sums(learner, _answers(pairs[first : first + task.batch_size], 0))[0].reshape(2, -1)
        for first in range(0, len(pairs), task.batch_size)
    ]
    found = np.concatenate(parts, axis=1)
    if learner.world.is_main:
        write_atomic(path, found.tobytes())
    return found
