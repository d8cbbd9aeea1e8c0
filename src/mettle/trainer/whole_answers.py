"""What any loss of whole answers needs: their summed log-probabilities, and the step along its derivatives by those.

Parts: `sequences_of`, `summed_logprobs`, `reference_sums`, `follow`. Legend: S answers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mettle.storage.files import storage_errors, write_atomic
from mettle.trainer.demonstrations import Demonstration, batch_of
from mettle.trainer.epochs import Figures
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner, learning_rate
from mettle.trainer.preferences import Values
from mettle.trainer.sum_losses import CrossEntropySum
from mettle.trainer.tenant import OptimParams


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
