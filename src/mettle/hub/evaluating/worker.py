"""The worker of evaluations: one at a time, wherever it gets them from.

An evaluation ends with its worker; whoever takes it next goes on with what is there, as `mettle eval run --resume`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mettle.errors import MettleError
from mettle.hub.evaluating.source import LOG, EvaluationSource, EvaluationWork, LeaseWord
from mettle.processes.child import import_path
from mettle.processes.orphans import tie_to_thread
from mettle.processes.ticker import Ticker

logger = logging.getLogger(__name__)
TICK_S = 1.0
GRACE_S = 10.0


class EvaluationWorker(Ticker):
    """Runs the evaluations of a source, in a thread of its own or in that which calls `step`.

    When it ends, what runs is given back.
    """

    def __init__(self, source: EvaluationSource, *, tick_s: float = TICK_S) -> None:
        # Children end with the thread that started them, so that all is done in one.
        super().__init__("evaluations", self.step, tick_s=tick_s, at_end=self.drop)
        self._source = source
        self._child: tuple[EvaluationWork, subprocess.Popen[bytes]] | None = None
        self._asked_at: float | None = None

    @property
    def doing(self) -> EvaluationWork | None:
        """What it works on."""
        return None if self._child is None else self._child[0]

    def step(self) -> None:
        """Look after the one that runs; start the next where there is none."""
        if self._child is None:
            work = self._source.take()
            if work is not None:
                self._begin(work)
            return
        work, process = self._child
        code = process.poll()
        if code is not None:
            self._kill()  # what it has started
            self._source.end(work, code)
            self._child = None
            return
        word = self._source.report(work)
        if word is LeaseWord.LOST:
            logger.warning("this evaluation was given to another", extra={"job": work.job_id})
            self._kill()
            self._child = None
        elif word is LeaseWord.STOP:
            self._ask_to_end()

    def drop(self) -> None:
        """End what runs and give it back."""
        if self._child is None:
            return
        self._kill()
        work, self._child = self._child[0], None
        try:
            self._source.give_back(work)
        except MettleError as error:  # it is found to be left when nobody reports of it
            logger.warning("an evaluation could not be given back", extra={"job": work.job_id, "error": str(error)})

    def _begin(self, work: EvaluationWork) -> None:
        # Its own folder is where it is, so that what it remembers of places stays there.
        here = [str(Path.cwd() / "environments"), work.environment.get("METTLE_ENVIRONMENTS", "")]
        places = {"METTLE_ENVIRONMENTS": os.pathsep.join(filter(None, here)), "PYTHONPATH": import_path()}
        with (work.folder / LOG).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "mettle.hub.evaluating.program", str(work.folder)], stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True, env=work.environment | places, cwd=work.folder,
                preexec_fn=functools.partial(tie_to_thread, os.getpid()),
            )  # fmt: skip
        self._child, self._asked_at = (work, process), None
        logger.info("started an evaluation", extra={"job": work.job_id, "pid": process.pid})

    def _ask_to_end(self) -> None:
        assert self._child is not None, "looked at before"
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            os.killpg(self._child[1].pid, signal.SIGTERM)
        elif time.monotonic() - self._asked_at > GRACE_S:
            self._kill()

    def _kill(self) -> None:
        assert self._child is not None, "looked at before"
        process = self._child[1]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
