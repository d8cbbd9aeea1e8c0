"""Tuning on a file of answers that are each good or bad (KTO): a model or an adapter out.

Parts: `UnpairedTuning` (what is asked for), `read_judged`, `tune_unpaired`; the loop is that of `epochs`, the loss that
of `unpaired`. Pairs are taken too, as two answers each. Legend: E answers of a step.
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
from mettle.trainer.preference_tuning import pair_of
from mettle.trainer.preferences import Values
from mettle.trainer.unpaired import Answers, UnpairedLoss, divergence_of
from mettle.trainer.whole_answers import follow, reference_sums, sequences_of, summed_logprobs


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """An answer to a prompt, with what of it trains, and whether it is good."""

    answer: Demonstration
    is_good: bool


@dataclass(frozen=True, slots=True)
class UnpairedTuning(Tuning):
    """A tuning whose examples are judged answers."""

    loss: UnpairedLoss = field(default_factory=UnpairedLoss)


def tune_unpaired(task: UnpairedTuning, tell: Tell) -> dict[str, Any]:
    """Train and write `task.to`; `tell` hears of each step. Returns figures of the first and the last step.

    Raises: UserError when a line, the model or the adapters do not fit.
    """
    check_place(task)
    judged = read_judged(task.data, Renderer.from_directory(task.model))
    strangers = with_strange_answers([each.answer for each in judged])

    def begin(learner: Learner, folder: Path) -> TunedStep:
        both = [*(each.answer for each in judged), *strangers]
        reference = reference_sums(learner, both, folder / "reference.npy", task.batch_size).reshape(2, -1)

        def take(places: Sequence[int], step: int) -> Figures:
            chosen, mismatched = [judged[i] for i in places], [strangers[i] for i in places]
            return take_unpaired_step(learner, task.loss, chosen, mismatched, reference[:, places], step)

        return take

    kept, asked = ("loss", "accuracy", "margin"), {"loss": asdict(task.loss)}
    done = tune_in_epochs(task, len(judged), begin, tell, kept=kept, asked=asked)
    return {"answers": len(judged), "good": sum(each.is_good for each in judged), **done}


def read_judged(path: Path, renderer: Renderer) -> list[JudgedAnswer]:
    """Every line of a JSONL file: `{"prompt": ..., "completion": ..., "label": true or false}`, whole chats as
    `messages` with a label, or pairs.

    Raises: UserError that names the line which does not fit, or says that one of the two kinds is missing.
    """
    found = [each for row in read_rows(path, lambda row: _judged(row, renderer), "answer") for each in row]
    for is_good, word in ((True, "good"), (False, "bad")):
        if all(each.is_good is not is_good for each in found):
            raise UserError(f'{path} holds no {word} answer ("label": {str(is_good).lower()}), and kto wants both')
    return found


def _judged(row: dict[str, Any], renderer: Renderer) -> list[JudgedAnswer]:
    if "chosen" in row or "rejected" in row:
        pair = pair_of(row, renderer)
        return [JudgedAnswer(pair.chosen, True), JudgedAnswer(pair.rejected, False)]
    if not isinstance(row.get("label"), bool):
        raise UserError(f"a label is true or false; this one is {row.get('label')!r}")
    return [JudgedAnswer(example_of(row, renderer), row["label"])]


def with_strange_answers(answers: Sequence[Demonstration]) -> list[Demonstration]:
    """Each prompt with the answer of the next one in the file."""
    found = []
    for own, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        before, after = (int(np.flatnonzero(each.is_trained)[0]) for each in (own, other))
        found.append(
            Demonstration(
                np.concatenate([own.token_ids[:before], other.token_ids[after:]]),
                np.concatenate([own.is_trained[:before], other.is_trained[after:]]),
            )
        )
    return found


def take_unpaired_step(
    learner: Learner,
    loss: UnpairedLoss,
    judged: Sequence[JudgedAnswer],
    strangers: Sequence[Demonstration],
    reference: Values,
    step: int,
) -> Figures:
    """One optimiser step on E answers; `reference` [2, E] are sums of the answers and of the strange ones."""
    sequences = sequences_of([each.answer for each in judged], step)
    sums, _ = summed_logprobs(learner, sequences)
    strange, _ = summed_logprobs(learner, sequences_of(strangers, step))
    baseline = divergence_of(strange, reference[1])
    is_good = np.array([each.is_good for each in judged])
    found = loss.of(Answers(sums, reference[0], is_good, baseline))
    optim = follow(learner, sequences, found.by_sum, step)
    means = [float(found.rewards[kind].mean()) if kind.any() else baseline for kind in (is_good, ~is_good)]
    return optim | {
        "loss": found.loss,
        "accuracy": float(((found.rewards > baseline) == is_good).mean()),
        "margin": loss.beta * (means[0] - means[1]),
        "divergence": baseline,
    }
