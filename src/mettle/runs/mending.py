"""Before a run goes on: what is damaged on its disk is put right from what else is there.

The batches that the trainer will read (those after its newest checkpoint) are checked, and one that is damaged or gone
is made again from the shards and the ledger. Invariant: what stands there afterwards has the digest that was shipped;
what cannot be made again is one error that says what to do, before any process is started.
"""

from __future__ import annotations

import logging

from mettle.errors import StorageError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.rebuilding import rebuild_batch
from mettle.storage.batches import read_batch, replace_batch
from mettle.storage.checkpoints import newest_checkpoint
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import read_config

logger = logging.getLogger(__name__)


def mend_batches(run_dir: RunDir, ledger: Ledger) -> list[int]:
    """Make the batches that are needed whole again; returns the steps of those that were not.

    Raises: StorageError for one that cannot be.
    """
    checkpoint = newest_checkpoint(run_dir.checkpoints)
    start = checkpoint.step if checkpoint else 0
    mended = []
    for row in ledger.batches(after=start):
        try:
            read_batch(run_dir.batches, row.digest)
        except StorageError as damage:
            _rebuild(run_dir, ledger, row.step, start, damage)
            mended.append(row.step)
    return mended


def _rebuild(run_dir: RunDir, ledger: Ledger, step: int, start: int, damage: StorageError) -> None:
    config = read_config(run_dir.config("orchestrator"), OrchestratorConfig)
    try:
        batch = rebuild_batch(run_dir, ledger, config, step)
    except StorageError as error:
        raise StorageError(
            f"{damage}, and it cannot be made again ({error}). The run cannot go past step {step - 1}: put the file "
            f"back from a copy, or start a new run from the state that is left ({_left(run_dir, start)})"
        ) from error
    replace_batch(run_dir.batches, batch)
    text = f"the batch of step {step} was damaged or gone, and was made again from the shards: {damage}"
    logger.warning("%s", text)
    ledger.journal.event("supervisor", "mended", text, step=step)


def _left(run_dir: RunDir, start: int) -> str:
    return f"`--model.path {run_dir.model}`" if start == 0 else f"{run_dir.version(start)} holds the weights"
