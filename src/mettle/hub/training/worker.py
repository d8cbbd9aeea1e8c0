"""The worker: takes one submitted run after the other, and runs it as `mettle rl run` does.

Each run is a process group of its own, so that it outlives a restart of the Hub: the next worker finds it by its
supervisor and waits for it. One that was cut off goes on with `mettle rl resume`.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from pathlib import Path

from mettle.errors import UserError
from mettle.hub.lab import Lab
from mettle.hub.logs import hide
from mettle.hub.training import jobs, usage
from mettle.hub.training.branching import START, start_folder
from mettle.hub.training.jobs import TrainingJob, run_folder
from mettle.hub.training.submission import as_toml
from mettle.hub.training.told import environment_for, hidden_of
from mettle.processes.ticker import Ticker
from mettle.runs.lock import supervisor_pid
from mettle.storage.claim import FolderClaim
from mettle.storage.run_dir import RunDir

logger = logging.getLogger(__name__)
TICK_S = 1.0
COUNT_EVERY_S = 5.0
"""Between two looks at what a run has taken."""


class QueueWorker(Ticker):
    """A thread that runs jobs until it is closed. Runs go on when it is: they are its Hub's, not the process's."""

    def __init__(self, lab: Lab, *, tick_s: float = TICK_S) -> None:
        super().__init__("submitted runs", self.step, tick_s=tick_s)
        self._lab = lab
        self._claim: FolderClaim | None = None
        self._counted_at: dict[str, float] = {}
        self._child: tuple[str, subprocess.Popen[bytes]] | None = None

    def close(self) -> None:
        """Take no more jobs."""
        super().close()
        if self._claim is not None:
            self._claim.release()

    def step(self) -> None:
        """Look after the run that runs; start the next where there is none. Of several servers' workers one does."""
        if not self._holds_queue():
            return
        with self._lab.database.read() as c:
            running, waiting = jobs.with_status(c, jobs.RUNNING), jobs.with_status(c, jobs.QUEUED)
        for job in running:
            self._count(job)
            self._look_after(job)
        if not running and waiting:
            self._begin(waiting[0])

    def _holds_queue(self) -> bool:
        if self._claim is None:
            with contextlib.suppress(UserError):
                self._claim = FolderClaim(self._lab.folder / "runs")
        return self._claim is not None

    def _count(self, job: TrainingJob, *, is_last: bool = False) -> None:
        """Add what a run has taken since the last look; one that is over its owner's quota is stopped."""
        now = time.monotonic()
        if not is_last and now - self._counted_at.get(job.id, -COUNT_EVERY_S) < COUNT_EVERY_S:
            return
        self._counted_at[job.id] = now
        total = usage.trained_tokens(run_folder(self._lab.folder, job.id) / "run.db")
        if total <= job.num_tokens:
            return
        with self._lab.database.write() as c:
            usage.settle(c, jobs.job_of(c, job.id), total)
            if not is_last and not job.is_stop_wanted and usage.is_over(c, job.owner_id):
                jobs.set_values(c, job.id, is_stop_wanted=True, error="stopped: the month's quota is used up")

    def _begin(self, job: TrainingJob) -> None:
        with self._lab.database.write() as c:
            environment = environment_for(c, self._lab, job)
            jobs.set_status(c, job.id, jobs.RUNNING)
        folder = run_folder(self._lab.folder, job.id)
        folder.parent.mkdir(parents=True, exist_ok=True)
        config = folder.parent / f"{job.id}.toml"
        settings = {"name": job.id, **job.config}
        program, words = ["mettle.cli"], ["run", str(config), "--dir", str(folder)]
        begun = settings.pop(START, None)
        if begun and begun.get("is_branch"):
            source = run_folder(self._lab.folder, begun["run"])
            words = ["branch", str(source), "--step", str(begun["version"]), "--dir", str(folder)]
        elif begun:
            start = start_folder(self._lab.folder, job.id)
            settings["model"] = {**settings["model"], "path": str(start)}
            source = run_folder(self._lab.folder, begun["run"])
            program = ["mettle.hub.training.program", str(source), str(begun["version"]), str(start)]
        config.write_text(as_toml(settings), encoding="utf-8")
        if (folder / "run.db").exists():
            words = ["resume", str(folder)]
        with (folder.parent / f"{job.id}.out").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", *program, "rl", *words, "--json"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, start_new_session=True, env=environment,
            )  # fmt: skip
        self._child = (job.id, process)
        logger.info("started a run", extra={"job": job.id, "pid": process.pid})

    def _look_after(self, job: TrainingJob) -> None:
        from mettle.runs import launch  # all that runs are made of, which no page of a Hub needs

        folder = run_folder(self._lab.folder, job.id)
        is_made = (folder / "run.db").exists()
        if job.is_stop_wanted and is_made:
            launch.stop(folder)
        child = self._child[1] if self._child is not None and self._child[0] == job.id else None
        if child is not None:
            if child.poll() is None:
                if job.is_stop_wanted and not is_made:
                    child.terminate()
                return
        elif is_made and supervisor_pid(RunDir.existing(folder)) is not None:
            return  # started by a Hub that has ended since
        self._child = None
        self._count(job, is_last=True)
        self._counted_at.pop(job.id, None)
        is_done = is_made and launch.is_finished(folder)
        status = jobs.COMPLETED if is_done else jobs.STOPPED if job.is_stop_wanted else jobs.FAILED
        error = (
            job.error  # why it was asked to stop, where a rule has asked
            if status != jobs.FAILED
            else hide(last_words(folder.parent / f"{job.id}.out"), hidden_of(self._lab, job))
        )
        with self._lab.database.write() as c:
            jobs.set_status(c, job.id, status, error=error)
        logger.info("a run has ended", extra={"job": job.id, "status": status})


def last_words(path: Path) -> str:
    """The line in which a run says why it ended."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no output"
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (said or lines or ["it said nothing"])[-1][:500]
