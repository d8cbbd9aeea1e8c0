"""A version on its way to disk: a large one is written and hashed by a thread beside the next forward and backward.

Parts: `PreparedVersion`, `prepare_version`. What is written is the live weights, so whoever is about to change them
(the next optimiser step) settles the version first; a pass only reads them. Invariants: the bytes are those of
`publish_version`; the folder appears complete, at the latest when `settle` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from mettle.records.versions import WeightVersion
from mettle.trainer.layout import Index
from mettle.trainer.learner import Learner
from mettle.trainer.publish import version_writer

BESIDE_BYTES = 64 * 2**20
"""A version from this size on is written beside the next step. A smaller one takes less than the hand-over is worth."""


class PreparedVersion:
    """A version that `write` makes, in a thread where it is written `beside` what comes next, else when it settles."""

    def __init__(self, write: Callable[[], WeightVersion], *, is_beside: bool) -> None:
        self._write = write
        self._done: Future[WeightVersion] = Future()
        if is_beside:
            # No daemon: a process that ends in order has either the whole version or the scratch folder removed.
            Thread(target=self._run, name="handover").start()
        self.is_beside = is_beside

    def ready(self) -> bool:
        """True when `settle` would not wait for long."""
        return not self.is_beside or self._done.done()

    def settle(self) -> WeightVersion:
        """The version, published; waits for it. Raises: what kept it from being written."""
        if not self.is_beside and not self._done.done():
            self._run()
        return self._done.result()

    def _run(self) -> None:
        try:
            self._done.set_result(self._write())
        except Exception as error:  # it belongs to whoever settles
            self._done.set_exception(error)


def prepare_version(
    root: Path, version: int, learner: Learner, sequences: list[Index], *, served_as: str | None = None
) -> PreparedVersion | None:
    """Begin to publish what is trained as v{version}. Every rank calls it; rank 0 gets what it has to settle."""
    writer = version_writer(root, version, learner, sequences, served_as=served_as)
    return None if writer is None else PreparedVersion(writer.publish, is_beside=writer.num_bytes >= BESIDE_BYTES)
