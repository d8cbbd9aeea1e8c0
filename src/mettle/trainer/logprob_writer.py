"""The trainer's log-probabilities on their way to the disk, beside the next step.

Parts: `LogprobWriter`. Invariant: a step waits for nothing but those of the step before, and none fails for them: they
are for people to look at.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mettle.errors import MettleError
from mettle.records.tokens import Batch, FloatArray
from mettle.storage.trained_logprobs import write_trained_logprobs
from mettle.trainer.layout import Index

logger = logging.getLogger(__name__)


class LogprobWriter:
    """Writes into a folder of batches, one file at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="logprobs")
        self._under_way: Future[None] | None = None

    def write(self, digest: str, batch: Batch, members: Index, logprobs: FloatArray) -> None:
        """Begin to write those of a batch."""
        self.settle()
        self._under_way = self._executor.submit(self._write, digest, batch, members, logprobs)

    def settle(self) -> None:
        """Wait until the newest are written."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _write(self, digest: str, batch: Batch, members: Index, logprobs: FloatArray) -> None:
        try:
            write_trained_logprobs(self._folder, digest, batch, members, logprobs)
        except MettleError as error:
            logger.warning("log-probabilities were not kept", extra={"step": batch.step, "error": str(error)})
