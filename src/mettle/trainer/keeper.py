"""A run's checkpoints while it trains: when one is written, what is deleted then, and who waits for it.

    save ──► a small state, or `asynchronous` is off: written at once, training waits
      │
      └────► a large one: copied to memory (the only wait), written by a thread beside the next steps
                  │ its files are on disk, and its step is committed
                  ▼
             settle: other half, manifest, rename; then old checkpoints and spent batches go

One checkpoint is under way at a time: the next one waits for it. Invariants: the manifest is written last, and after
the ledger has the step; what an older checkpoint would need is deleted only when a newer one is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mettle.storage.batches import batch_path
from mettle.storage.checkpoints import FileNote, OpenCheckpoint, remove_checkpoints, write_checkpoint
from mettle.storage.ledger import Ledger
from mettle.storage.ledger_copy import LedgerCopier
from mettle.storage.run_dir import RunDir
from mettle.storage.trained_logprobs import logprobs_path
from mettle.trainer.checkpoint import import_writer, outcome, save_learner, save_learner_beside
from mettle.trainer.config import CheckpointConfig
from mettle.trainer.handover import BESIDE_BYTES
from mettle.trainer.learner import Learner

logger = logging.getLogger(__name__)

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class SaveUnderWay:
    """`notes` are of the files, on rank 0 alone; on the others it tells that the files are written."""

    step: int
    notes: Future[dict[str, FileNote]]
    checkpoint: OpenCheckpoint | None


class CheckpointKeeper:
    """The checkpoints of one run. Every rank has one; `ledger` is None on all but rank 0.

    `settle_step` commits the newest step if it is not yet: a checkpoint must not be of a step that the ledger lacks.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: CheckpointConfig,
        learner: Learner,
        ledger: Ledger | None,
        settle_step: Callable[[], None],
    ) -> None:
        self.step = 0
        """Of the newest checkpoint, complete or under way."""
        self._run_dir = run_dir
        self._config = config
        self._learner = learner
        self._ledger = ledger
        self._settle_step = settle_step
        self._under_way: SaveUnderWay | None = None
        self._copier = LedgerCopier(run_dir.ledger)
        self._spent = 0  # the batches up to this step have been deleted

    def prepare(self) -> None:
        """Import what writes a checkpoint while the first batch is still being sampled, and not while one is due."""
        if self._is_beside() or (self._learner.world.size > 1 and self._learner.tenant.is_base):
            import_writer()

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after `step`, or begin to. Every rank calls it."""
        started = time.perf_counter()
        self.settle()
        self.step = step
        is_beside = self._is_beside()
        if is_beside:
            self._under_way = self._begin(step)
        else:
            self._settle_step()
            self._write(step)
        seconds = round(time.perf_counter() - started, 3)
        logger.info("checkpoint", extra={"step": step, "waited_s": seconds, "is_beside": is_beside})

    def let_go(self) -> None:
        """Forget whose checkpoints these are; nothing is written any more."""
        self._settle_step = lambda: None

    def ready(self) -> bool:
        """True when there is something to settle, and `settle` would not wait for the disk."""
        return self._under_way is not None and self._under_way.notes.done()

    def settle(self) -> None:
        """Wait until the checkpoint that is under way is complete. Raises: what kept it from being written."""
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        if begun.checkpoint is None:
            begun.notes.result()
            return
        self._settle_step()
        begun.checkpoint.complete(begun.notes.result, self._orchestrator_state(begun.step))
        self._clean_up(begun.step)

    def _is_beside(self) -> bool:
        """The same on every rank: a sharded parameter counts as a whole one."""
        tenant = self._learner.tenant
        weights_bytes = FLOAT_BYTES * sum(parameter.numel() for parameter in tenant.trained)
        return self._config.asynchronous and tenant.is_base and weights_bytes >= BESIDE_BYTES

    def _begin(self, step: int) -> SaveUnderWay:
        learner = self._learner
        checkpoint = OpenCheckpoint(self._run_dir.checkpoints, step) if learner.world.is_main else None
        folder = learner.world.share(None if checkpoint is None else checkpoint.trainer)
        files = save_learner_beside(folder, learner, step)

        def written() -> dict[str, FileNote]:
            outcome(files)
            return {} if checkpoint is None else checkpoint.digests()

        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        notes = executor.submit(written)
        executor.shutdown(wait=False)
        return SaveUnderWay(step, notes, checkpoint)

    def _write(self, step: int) -> None:
        learner = self._learner
        if not learner.world.is_main:
            save_learner(learner.world.share(None), learner, step)
            return
        write_checkpoint(
            self._run_dir.checkpoints,
            step,
            lambda folder: save_learner(learner.world.share(folder), learner, step),
            self._orchestrator_state(step),
        )
        self._clean_up(step)

    # On rank 0

    def _orchestrator_state(self, step: int) -> dict[str, object]:
        assert self._ledger is not None, "only rank 0 has the ledger"
        row = self._ledger.batch(step)
        assert row is not None, f"step {step} was trained, so it has a batch"
        return row.orchestrator_state

    def _clean_up(self, step: int) -> None:
        self._copier.copy(step)
        remove_checkpoints(self._run_dir.checkpoints, keep_last=self._config.keep_last, keep_step=self._copier.step)
        self._remove_spent_batches()

    def _remove_spent_batches(self) -> None:
        assert self._ledger is not None, "only rank 0 has the ledger"
        kept = [int(f.name.removeprefix("step-")) for f in self._run_dir.checkpoints.glob("step-*/")]
        oldest = min(kept, default=0)
        for digest in self._ledger.batch_digests(self._spent, oldest):
            batch_path(self._run_dir.batches, digest).unlink(missing_ok=True)
            logprobs_path(self._run_dir.batches, digest).unlink(missing_ok=True)
        self._spent = max(self._spent, oldest)
