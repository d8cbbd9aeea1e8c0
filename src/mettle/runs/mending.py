"""Before a run goes on: what is damaged on its disk is put right from what else is there.

Parts: `mend_ledger` puts the ledger's copy in the place of one that is damaged or gone; `mend_batches` makes the
batches that the trainer will read (those after its newest checkpoint) again from the shards and the ledger. Invariant:
a batch then has the digest that was shipped; what cannot be put right is one error that says what to do, before any
process starts.
"""

from __future__ import annotations

import logging
import sys

from mettle.errors import StorageError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.rebuilding import rebuild_batch
from mettle.storage.batches import read_batch, replace_batch
from mettle.storage.checkpoints import newest_checkpoint, set_aside_after
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import damage_of_ledger, restore_ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import read_config

logger = logging.getLogger(__name__)


def mend_ledger(run_dir: RunDir) -> None:
    """Put the ledger's copy in its place if its file is damaged or gone. What came after the copy is done again.

    Raises: StorageError when there is no copy that is whole.
    """
    damage = damage_of_ledger(run_dir.ledger)
    if damage is None:
        return
    try:
        restore_ledger(run_dir.ledger)
    except StorageError as error:
        raise StorageError(
            f"the ledger {run_dir.ledger} is damaged ({damage}), and {error}. The run cannot go on: put run.db back "
            f"from a backup of your own, or start a new run; the weights that there are stay in {run_dir.weights}"
        ) from error
    ledger = Ledger(run_dir.ledger)
    try:
        step = max((row.step for row in ledger.batches() if row.trainings), default=0)
        lost = set_aside_after(run_dir.checkpoints, step)
        text = f"run.db was damaged ({damage}) and is restored as of step {step}; what came after is done again"
        if lost:
            text += f", so the checkpoints of steps {', '.join(map(str, lost))} are set aside"
        ledger.journal.event("supervisor", "mended", text, step=step)
    finally:
        ledger.close()
    print(f"note: {text}", file=sys.stderr, flush=True)


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
            f"step {step}: {damage}, and it cannot be made again ({error}). The run cannot go past step {step - 1}: "
            f"put the file back from a copy, or start a new run from the state that is left ({_left(run_dir, start)})"
        ) from error
    replace_batch(run_dir.batches, batch)
    text = f"the batch of step {step} was damaged or gone, and was made again from the shards: {damage}"
    logger.warning("%s", text)
    ledger.journal.event("supervisor", "mended", text, step=step)


def _left(run_dir: RunDir, start: int) -> str:
    return f"`--model.path {run_dir.model}`" if start == 0 else f"{run_dir.version(start)} holds the weights"
