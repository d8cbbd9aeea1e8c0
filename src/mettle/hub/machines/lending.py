"""What a machine hears at the Hub: which of its leases go on, and the next work, where some is for it.

Parts: `hear` (a beat), `held_alone`, `end_work`, `give_back`, `leave`, `remove`.
Work is for a machine that has its environments in the very releases that the Hub has, and PyTorch where it is to serve
the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection

from mettle.hub.accounts import audit
from mettle.hub.evaluating.outcome import end_evaluation
from mettle.hub.evaluating.source import LeaseWord
from mettle.hub.lab import Lab
from mettle.hub.machines import fleet, leases
from mettle.hub.machines.fleet import JoinedMachine
from mettle.hub.machines.holdings import inputs_of, needs_torch, work_folder
from mettle.hub.machines.leases import WorkLease
from mettle.hub.machines.work_files import stored_files
from mettle.hub.results import pushed
from mettle.hub.training import jobs
from mettle.hub.training.jobs import TrainingJob
from mettle.hub.training.submission import local_name
from mettle.hub.training.told import told_values


@dataclass(frozen=True, slots=True)
class LentWork:
    """Everything that a machine needs of one evaluation; files with their sizes in bytes."""

    lease: str
    generation: int
    job: str
    order: dict[str, Any]
    environment: dict[str, str]
    files: dict[str, int]
    inputs: dict[str, int]


@dataclass(slots=True)
class HubAnswer:
    """What a beat is answered: the machine's state, a word for each lease it named, and perhaps work."""

    state: str
    leases: dict[str, str] = field(default_factory=dict)
    work: LentWork | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def hear(
    lab: Lab, machine: JoinedMachine, named: list[str], *, is_asking: bool, facts: dict[str, Any] | None, address: str
) -> HubAnswer:
    """Hear a machine that says which leases it has, and whether it asks for work."""
    now = time.time()
    with lab.database.read() as c:
        held = leases.held_by(c, machine.id)
        wanted = {lease.id: jobs.job_of(c, lease.job_id).is_stop_wanted for lease in held}
    overdue = [lease for lease in held if lease.id in named and lease.expires_at - now < 0.7 * lab.lease_s]
    unknown = [lease for lease in held if lease.id not in named]
    if overdue or unknown or facts is not None or now - machine.seen_at > fleet.SEEN_EVERY_S:
        with lab.database.write() as c:
            fleet.seen(c, machine.id, address, facts)
            for lease in overdue:
                leases.renew(c, lab, lease)
            for lease in unknown:
                leases.take_back(c, lease, leases.BACK, f"the machine {machine.name} was started again")
    words = {each: LeaseWord.LOST for each in named}
    words |= {each: LeaseWord.STOP if is_wanted else LeaseWord.GO_ON for each, is_wanted in wanted.items()}
    answer = HubAnswer(machine.state, {each: words[each].value for each in named})
    if is_asking and not named and machine.state == fleet.ACTIVE:
        answer.work = _next(lab, machine, machine.facts if facts is None else facts)
    return answer


def _next(lab: Lab, machine: JoinedMachine, facts: dict[str, Any]) -> LentWork | None:
    with lab.database.read() as c:
        waiting = jobs.with_status(c, jobs.QUEUED, jobs.EVAL)
    for job in waiting:
        if not why_not(job, facts):
            with lab.database.write() as c:
                lease = leases.lend(c, lab, machine.id, job.id)
                if lease is None:
                    continue
                environment = told_values(c, lab, job)
                pushed.set_status(c, job.result_id, pushed.RUNNING)
                audit.note(
                    c, f"machine {machine.name}"[:100], "lease.begin", job.name, detail=f"no. {lease.generation}"
                )
            folder = work_folder(lab, job)
            with leases.alone_in(lab, job.id):  # after the last write of whoever had it before
                folder.mkdir(parents=True, exist_ok=True)
                files = stored_files(folder)
            inputs = {name: path.stat().st_size for name, path in inputs_of(job).items()}
            return LentWork(lease.id, lease.generation, job.id, job.config, environment, files, inputs)
    return None


def why_not(job: TrainingJob, facts: dict[str, Any]) -> str:
    """Why a machine with these facts cannot do a job; empty when it can."""
    from mettle.envs.packages.registry import find_environment

    has = facts.get("environments")
    has = has if isinstance(has, dict) else {}
    for said in job.environments:
        name = local_name(said)
        version = find_environment(name).version
        if has.get(name) != version:
            return f"it has {name} {has[name]}, not {version}" if name in has else f"it lacks {name} {version}"
    if needs_torch(job) and not facts.get("torch"):
        return "it has no PyTorch to serve the model with"
    return ""


def end_work(lab: Lab, machine: JoinedMachine, lease_id: str, code: int) -> None:
    """Its process has ended with a code; all files are here. Raises: HttpError 409 when it is another's by now."""
    with held_alone(lab, machine, lease_id) as (lease, job):
        if job.status not in jobs.OVER:  # a Hub may have been killed right behind this
            end_evaluation(lab, job, code)
        with lab.database.write() as c:
            leases.end_lease(c, lease, leases.ENDED)


def give_back(lab: Lab, machine: JoinedMachine, lease_id: str) -> None:
    """It was not done, and waits again. Raises: HttpError 409 when it is another's by now."""
    with held_alone(lab, machine, lease_id) as (lease, _), lab.database.write() as c:
        leases.take_back(c, lease, leases.BACK, f"the machine {machine.name} gave it back")


@contextmanager
def held_alone(lab: Lab, machine: JoinedMachine, lease_id: str) -> Iterator[tuple[WorkLease, TrainingJob]]:
    """A machine's lease and its job, with nobody else in the job's folder. Raises: HttpError as `live_lease`."""
    with lab.database.read() as c:
        lease = leases.live_lease(c, machine.id, lease_id)
    with leases.alone_in(lab, lease.job_id):
        with lab.database.read() as c:
            lease = leases.live_lease(c, machine.id, lease_id)
            job = jobs.job_of(c, lease.job_id)
        yield lease, job


def leave(lab: Lab, machine: JoinedMachine, *, is_over: bool, actor: str, address: str) -> str:
    """Give it no more work; when it `is_over`, what it has waits for another. Answers its state."""
    with lab.database.write() as c:
        held = leases.held_by(c, machine.id)
        if is_over:
            for lease in held:
                leases.take_back(c, lease, leases.BACK, f"the machine {machine.name} has left")
        state = fleet.LEFT if is_over else fleet.LEAVING
        fleet.set_state(c, machine.id, state)
        audit.note(c, actor, "machine.left" if is_over else "machine.leave", machine.name, address=address)
    return state


def remove(c: Connection, machine: JoinedMachine) -> None:
    """Close it out for good; what it has waits for another."""
    for lease in leases.held_by(c, machine.id):
        leases.take_back(c, lease, leases.BACK, f"the machine {machine.name} was removed")
    fleet.set_state(c, machine.id, fleet.REMOVED)
