"""The queue of evaluations as the Hub's own machine works on it: straight on the database and the folder.

The lock of the background work says that one such worker is there, so that what runs, is leased to no machine and is
not this worker's was left by a Hub that has ended.
"""

from __future__ import annotations

import time

from mettle.hub.evaluating.outcome import end_as, end_evaluation, evaluation_folder, keep_to_quota
from mettle.hub.evaluating.program import ORDER
from mettle.hub.evaluating.source import EvaluationWork, LeaseWord
from mettle.hub.lab import Lab
from mettle.hub.machines import leases
from mettle.hub.results import pushed
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.told import environment_for
from mettle.hub.training.worker import COUNT_EVERY_S
from mettle.storage.files import write_json


class LocalQueue:
    """See `EvaluationSource`."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._counted_at = -COUNT_EVERY_S

    def take(self) -> EvaluationWork | None:
        with self._lab.database.read() as c:
            leased = leases.leased_jobs(c)
            left = [job for job in jobs.with_status(c, jobs.RUNNING, jobs.EVAL) if job.id not in leased]
            waiting = jobs.with_status(c, jobs.QUEUED, jobs.EVAL)
        for job in left:
            if not job.is_stop_wanted:
                return self._begun(job)
            end_as(self._lab, job, jobs.STOPPED, pushed.CANCELLED)
        for job in waiting:
            with self._lab.database.write() as c:
                is_ours = jobs.claim(c, job.id)
            if is_ours:
                return self._begun(job)
        return None

    def _begun(self, job: TrainingJob) -> EvaluationWork:
        folder = evaluation_folder(self._lab.folder, job.id)
        folder.mkdir(parents=True, exist_ok=True)
        with leases.alone_in(self._lab, job.id):  # after the last write of a machine that had it before
            write_json(folder / ORDER, job.config)
        with self._lab.database.write() as c:
            environment = environment_for(c, self._lab, job)
            pushed.set_status(c, job.result_id, pushed.RUNNING)
        return EvaluationWork(job.id, folder, environment)

    def report(self, work: EvaluationWork) -> LeaseWord:
        """Now and then, also count what it has taken."""
        job = self._job(work)
        now = time.monotonic()
        if now - self._counted_at >= COUNT_EVERY_S:
            self._counted_at = now
            keep_to_quota(self._lab, job)
        return LeaseWord.STOP if job.is_stop_wanted else LeaseWord.GO_ON

    def end(self, work: EvaluationWork, code: int) -> None:
        end_evaluation(self._lab, self._job(work), code)

    def give_back(self, work: EvaluationWork) -> None:
        """It stays RUNNING, and the next Hub of this folder goes on with it."""

    def _job(self, work: EvaluationWork) -> TrainingJob:
        with self._lab.database.read() as c:
            return jobs.job_of(c, work.job_id)
