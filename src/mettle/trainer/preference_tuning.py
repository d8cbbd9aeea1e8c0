"""Tuning on a file of preferences, offline: chosen and rejected answers in, a model or an adapter out.

Parts: `PreferenceTuning` (what is asked for), `read_pairs`, `tune`; the loop is that of `epochs`, and tuning on answers
that come one by one is `unpaired_tuning`. A step has two verbs of the learner: `accumulate` without a gradient tells
the log-probability of every answer, `preferences` what each is to change by, and `accumulate` with that as weights of a
cross-entropy gives the gradient (`whole_answers`). The reference is the model as it was read; its log-probabilities are
computed once, before the first step, and kept beside the checkpoints.

Legend: P pairs of a step; its 2 P answers are P chosen ones and then P rejected ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.trainer.demonstrations import Demonstration
from mettle.trainer.epochs import Figures, Tell, TunedStep, Tuning, check_place, tune_in_epochs
from mettle.trainer.finetuning import example_of, read_rows
from mettle.trainer.learner import Learner
from mettle.trainer.preferences import Pairs, PreferenceLoss, Values
from mettle.trainer.whole_answers import follow, reference_sums, sequences_of, summed_logprobs

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
