"""When a run compares engine and trainer, and what it tells of it.

A look at every `interval`-th step, before it is trained: the network holds v{step-1} then, and the tokens of older
versions are compared under those versions' published weights. A cause is told once, as an event, until it is gone
again; every look leaves its figures in the metrics and its table in the run's facts. Weights and random state stay as
they are, so a run with and without looks makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from mettle.errors import StorageError
from mettle.records.tokens import Batch
from mettle.storage.journal import Journal
from mettle.trainer.config import MismatchConfig
from mettle.trainer.learner import Learner
from mettle.trainer.mismatch.diagnosis import Comparer, MismatchFound, readable_folders
from mettle.trainer.mismatch.tokens import choose

logger = logging.getLogger(__name__)

FACT = "mismatch"
EVENT, GONE = "mismatch", "mismatch_gone"


class MismatchMonitor:
    """Looks for one trainer. `weights` is where its versions are published."""

    def __init__(self, config: MismatchConfig, learner: Learner, weights: Path, *, seed: int) -> None:
        self._config = config
        self._learner = learner
        self._weights = weights
        self._seed = seed
        self._told = ""

    def is_due(self, step: int) -> bool:
        """Whether it is time, and what the ranks compute can be compared with an engine's."""
        interval = self._config.interval
        # The first steps are looked at, too: what is set up wrong is wrong from the start.
        return interval > 0 and (step <= 2 or step % interval == 0) and self._is_comparable()

    def _is_comparable(self) -> bool:
        if self._learner.world.size == 1:
            return True
        policy = self._learner.policy
        return policy.dtype == torch.float32 or policy.computes_short

    def look(self, step: int, batch: Batch) -> MismatchFound | None:
        """Compare, where it is time. Every rank calls it and finds what all of them found."""
        if not self.is_due(step):
            return None
        sequences = choose(batch, self._config.num_sequences, seed=self._seed)
        # Rank 0 removes versions: what it sees is there on every rank.
        world = self._learner.world
        folders = world.share(readable_folders(self._weights) if world.is_main else None)
        comparer = Comparer(self._learner, step - 1, folders)
        try:
            return comparer.compare(sequences, self._config.tolerance)
        except StorageError as error:
            logger.warning("engine and trainer were not compared at step %d: %s", step, error)
            return None

    def tell(self, journal: Journal, step: int, found: MismatchFound) -> None:
        """Leave what was found for those who look at the run. Within a transaction of the caller's."""
        journal.set_fact(FACT, {"step": step, **dataclasses.asdict(found)})
        if found.cause == self._told:
            return
        if found.cause:
            text = mismatch_text(step, found)
            logger.warning("%s", text)
            journal.event("trainer", EVENT, text, step=step, cause=found.cause)
        else:
            journal.event("trainer", GONE, f"step {step}: engine and trainer agree again", step=step)
        self._told = found.cause


def figures(found: MismatchFound) -> dict[str, float]:
    """The metrics of a look."""
    return {
        "mismatch/same_weights_mean_abs": found.mean_abs,
        "mismatch/same_weights_max_abs": found.max_abs,
        "mismatch/tokens_compared": float(found.num_tokens),
    }


def mismatch_text(step: int, found: MismatchFound) -> str:
    """One line that names the cause."""
    return (
        f"step {step}: engine and trainer disagree on the same tokens by {found.mean_abs:.2g} nats on average "
        f"({found.affected} of {found.num_sequences} sequences): {found.cause}: {found.detail}"
    )
