"""Tuning on a file of preferences, offline: chosen and rejected answers in, a model or an adapter out.

Parts: `PreferenceTuning` (what is asked for), `read_pairs`, `tune`; the loop is that of `epochs`, and tuning on answers
that come one by one is `unpaired_tuning`. A step has two verbs of the learner: `accumulate` without a gradient tells
the log-probability of every answer, `preferences` what each is to change by, and `accumulate` with that as weights of a
cross-entropy gives the gradient (`follow`). The reference is the model as it was read; its log-probabilities are
computed once, before the first step, and kept beside the checkpoints.

Legend: P pairs of a step; its 2 P answers are P chosen ones and then P rejected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import storage_errors, write_atomic
from mettle.trainer.demonstrations import Demonstration, batch_of
from mettle.trainer.epochs import Figures, Tell, TunedStep, Tuning, check_place, tune_in_epochs
from mettle.trainer.finetuning import example_of, read_rows
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner, learning_rate
from mettle.trainer.preferences import Pairs, PreferenceLoss, Values
from mettle.trainer.sum_losses import CrossEntropySum
from mettle.trainer.tenant import OptimParams

KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one prompt, each with what of it trains."""

    chosen: Demonstration
    rejected: Demonstration


@dataclass(frozen=True, slots=True)
class PreferenceTuning(Tuning):
    """A tuning whose examples are pairs."""

    loss: PreferenceLoss = field(default_factory=PreferenceLoss)


def tune(task: PreferenceTuning, tell: Tell) -> dict[str, Any]:
    """Train and write `task.to`; `tell` hears of each step. Returns figures of the first and the last step.

    Raises: UserError when a line, the model or the adapters do not fit.
    """
    check_place(task)
    pairs = read_pairs(task.data, Renderer.from_directory(task.model))

    def begin(learner: Learner, folder: Path) -> TunedStep:
        reference = np.zeros((2, len(pairs)))
        if task.loss.has_reference:
            answers = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
            reference = reference_sums(learner, answers, folder / "reference.npy", task.batch_size).reshape(2, -1)

        def take(places: Sequence[int], step: int) -> Figures:
            return take_step(learner, task.loss, [pairs[i] for i in places], reference[:, places], step)

        return take

    kept, asked = ("loss", "accuracy", "margin"), {"loss": asdict(task.loss)}
    return {"pairs": len(pairs), **tune_in_epochs(task, len(pairs), begin, tell, kept=kept, asked=asked)}


def read_pairs(path: Path, renderer: Renderer) -> list[AnswerPair]:
    """Every line of a JSONL file: `{"prompt": ..., "chosen": ..., "rejected": ...}` as texts or messages, or whole
    chats as `chosen` and `rejected`.

    Raises: UserError that names the line which does not fit.
    """
    return read_rows(path, lambda row: pair_of(row, renderer), "pair")


def pair_of(row: dict[str, Any], renderer: Renderer) -> AnswerPair:
    """A row's two answers. Raises: UserError for one that is no pair."""
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


def take_step(
    learner: Learner, loss: PreferenceLoss, pairs: Sequence[AnswerPair], reference: Values, step: int
) -> Figures:
    """One optimiser step on pairs, whose `reference` sums are [2, P]; its figures."""
    sequences = sequences_of([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)], step)
    sums, counts = summed_logprobs(learner, sequences)
    found = loss.of(Pairs(*np.split(sums, 2), *reference, *np.split(counts, 2)))
    optim = follow(learner, sequences, np.concatenate([found.by_chosen, found.by_rejected]), step)
    chosen, rejected = np.split(sums / counts, 2)
    return optim | {
        "loss": found.loss,
        "accuracy": float((found.margins > 0).mean()),
        "margin": float(found.margins.mean()),
        "logprob/chosen": float(chosen.mean()),
        "logprob/rejected": float(rejected.mean()),
    }


# What any loss of whole answers needs


def sequences_of(answers: Sequence[Demonstration], step: int) -> Sequences:
    """Answers in the form that a learner takes."""
    return Sequences.of(batch_of(answers, step))


def summed_logprobs(learner: Learner, sequences: Sequences) -> tuple[Values, Values]:
    """([S] the log-probability of each answer under the policy as it is, [S] its tokens)."""
    done = learner.accumulate(sequences, CrossEntropySum(), is_forward_only=True)
    owners = np.repeat(np.arange(len(sequences.starts)), sequences.num_members)
    sums: Values = np.bincount(owners, done.logprobs.astype(np.float64), len(sequences.starts)).astype(np.float64)
    return sums, sequences.num_members.astype(np.float64)


def follow(learner: Learner, sequences: Sequences, by_sum: Values, step: int) -> Figures:
    """The optimiser step of a loss whose derivatives by the answers' sums are `by_sum` [S]; the optimiser's figures."""
    # The derivative of -w l by l is -w, and that of the loss is the same for all tokens of an answer.
    weights = -np.repeat(by_sum, sequences.num_members)
    weighted = replace(sequences, columns={**sequences.columns, "ce_weights": weights.astype(np.float32)})
    learner.accumulate(weighted, CrossEntropySum())
    recipe = learner.recipe
    rate = learning_rate(step, recipe.scheduler, peak=recipe.optim.lr, max_steps=recipe.max_steps)
    own = recipe.optim
    return learner.step(OptimParams(rate, own.betas, own.eps, own.weight_decay, own.max_grad_norm))


def reference_sums(learner: Learner, answers: Sequence[Demonstration], path: Path, batch_size: int) -> Values:
    """[number of answers] their sums under the model as it was read, from `path` where they were computed before."""
    if path.exists():
        with storage_errors(path, "reading"):
            kept: Values = np.frombuffer(path.read_bytes(), np.float64)
        return kept
    parts = [
        summed_logprobs(learner, sequences_of(answers[first : first + 2 * batch_size], 0))[0]
        for first in range(0, len(answers), 2 * batch_size)
    ]
    found = np.concatenate(parts)
    if learner.world.is_main:
        write_atomic(path, found.tobytes())
    return found
