"""The worker of hosted evaluations: one at a time, beside the run that trains; results go to the pushed ones.

An evaluation ends with its Hub; the next Hub goes on with what is there, as `mettle eval run --resume` does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mettle.errors import MettleError
from mettle.evals.reader import EvaluationReader
from mettle.hub.evaluating.program import ORDER
from mettle.hub.lab import Lab
from mettle.hub.logs import hide
from mettle.hub.results import pushed
from mettle.hub.training import jobs, usage
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.told import environment_for, hidden_of
from mettle.hub.training.worker import COUNT_EVERY_S, last_words
from mettle.processes.child import import_path
from mettle.processes.orphans import tie_to_thread
from mettle.storage.files import write_json
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
TICK_S = 1.0
GRACE_S = 10.0
LOG = "log"
PIECE_ROWS = 500


def evaluation_folder(root: Path, job_id: str) -> Path:
    """Where an evaluation's order, log and rollouts lie."""
    return root / "evaluations" / job_id


class EvaluationWorker:
    """A thread that runs evaluations until it is closed."""

    def __init__(self, lab: Lab, *, tick_s: float = TICK_S) -> None:
        self._lab, self._tick_s = lab, tick_s
        self._over = threading.Event()
        self._child: tuple[str, subprocess.Popen[bytes]] | None = None
        self._asked_at: float | None = None
        self._counted_at = -COUNT_EVERY_S
        self._thread = threading.Thread(target=self._work, name="evaluations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End what runs; the next Hub goes on with it."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        # Children end with the thread that started them, so that all is done in this one.
        while not self._over.wait(self._tick_s):
            try:
                self.step()
            except MettleError as error:  # a full disk passes
                logger.warning("evaluations wait", extra={"error": str(error)})
            except Exception:
                logger.exception("the worker of evaluations failed")
        self._kill()

    def step(self) -> None:
        """Look after the one that runs; start the next where there is none."""
        with self._lab.database.read() as c:
            running = jobs.with_status(c, jobs.RUNNING, jobs.EVAL)
            waiting = jobs.with_status(c, jobs.QUEUED, jobs.EVAL)
        for job in running:
            self._look_after(job)
        if not running and waiting:
            self._begin(waiting[0])

    def _begin(self, job: TrainingJob) -> None:
        folder = evaluation_folder(self._lab.folder, job.id)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / ORDER, job.config)
        with self._lab.database.write() as c:
            environment = environment_for(c, self._lab, job)
            jobs.set_status(c, job.id, jobs.RUNNING)
            pushed.set_status(c, job.result_id, pushed.RUNNING)
        # Its own folder is where it is, so that what it remembers of places stays there.
        here = [str(Path.cwd() / "environments"), environment.get("METTLE_ENVIRONMENTS", "")]
        environment |= {"METTLE_ENVIRONMENTS": os.pathsep.join(filter(None, here)), "PYTHONPATH": import_path()}
        with (folder / LOG).open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "mettle.hub.evaluating.program", str(folder)], stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True, env=environment, cwd=folder,
                preexec_fn=functools.partial(tie_to_thread, os.getpid()),
            )  # fmt: skip
        self._child, self._asked_at = (job.id, process), None
        logger.info("started an evaluation", extra={"job": job.id, "pid": process.pid})

    def _look_after(self, job: TrainingJob) -> None:
        if self._child is None or self._child[0] != job.id:  # of a Hub that has ended
            if job.is_stop_wanted:
                self._end(job, jobs.STOPPED, pushed.CANCELLED)
            else:
                self._begin(job)
            return
        code = self._child[1].poll()
        if code is None:
            self._keep_to_quota(job)
            if job.is_stop_wanted:
                self._ask_to_end()
            return
        self._kill()
        self._count(job)
        if job.is_stop_wanted:
            self._end(job, jobs.STOPPED, pushed.CANCELLED, job.error)
        elif code:
            self._end(job, jobs.FAILED, pushed.FAILED, self._last_words(job))
        else:
            try:
                self._keep(job)
            except (MettleError, HttpError) as error:
                self._end(job, jobs.FAILED, pushed.FAILED, str(error))

    def _ask_to_end(self) -> None:
        assert self._child is not None, "looked at before"
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            os.killpg(self._child[1].pid, signal.SIGTERM)
        elif time.monotonic() - self._asked_at > GRACE_S:
            self._kill()

    def _kill(self) -> None:
        if self._child is None:
            return
        process = self._child[1]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._child = None

    def _last_words(self, job: TrainingJob) -> str:
        return hide(last_words(evaluation_folder(self._lab.folder, job.id) / LOG), hidden_of(self._lab, job))

    def _count(self, job: TrainingJob) -> None:
        """Add what it has taken, where this machine has served its model."""
        settings = job.config.get("settings") or {}
        if settings.get("api_base_url") or settings.get("provider"):
            return
        found = evaluation_folder(self._lab.folder, job.id).glob("results/*/*/run.db")
        total = sum(usage.played_tokens(each) for each in found)
        with self._lab.database.write() as c:
            usage.settle(c, jobs.job_of(c, job.id), total)

    def _keep_to_quota(self, job: TrainingJob) -> None:
        """Now and then, count what it has taken so far, and ask for its end where its owner's month is used up."""
        now = time.monotonic()
        if now - self._counted_at < COUNT_EVERY_S:
            return
        self._counted_at = now
        self._count(job)
        with self._lab.database.write() as c:
            if not job.is_stop_wanted and usage.is_over(c, job.owner_id):
                jobs.set_values(c, job.id, is_stop_wanted=True, error="stopped: the month's quota is used up")

    def _end(self, job: TrainingJob, status: str, shown: str, error: str = "") -> None:
        with self._lab.database.write() as c:
            jobs.set_status(c, job.id, status, error=error)
            pushed.set_status(c, job.result_id, shown)
        logger.info("an evaluation has ended", extra={"job": job.id, "status": status})

    def _keep(self, job: TrainingJob) -> None:
        """Put its rollouts where pushed ones are: all of them, and as completed, or none."""
        folder = evaluation_folder(self._lab.folder, job.id)
        found = next(iter(sorted(folder.glob("results/*/*/metadata.json"))), None)
        if found is None:
            raise HttpError(409, "it has left no results")
        reader = EvaluationReader(found.parent)
        with self._lab.database.write() as c:
            pushed.begin_again(c, job.result_id)
            for piece in _pieces(reader.rows()):
                pushed.add_samples(c, self._lab.folder, pushed.result_of(c, job.result_id), piece)
            result = pushed.result_of(c, job.result_id)
            told = {key: value for key, value in reader.metadata.items() if key not in ("stats", "path_to_save")}
            pushed.complete(c, self._lab.folder, result, {}, told)
            jobs.set_status(c, job.id, jobs.COMPLETED)
        logger.info("an evaluation has ended", extra={"job": job.id, "status": jobs.COMPLETED})


def _pieces(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    piece: list[dict[str, Any]] = []
    for row in rows:
        piece.append(row)
        if len(piece) >= PIECE_ROWS:
            yield piece
            piece = []
    if piece:
        yield piece
