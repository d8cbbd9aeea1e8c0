"""The sandboxes that run, as people see them: whose each is, what it may use, and what the host has given out in all.

Parts: `SandboxBoard`, everything that the page shows; `board_of`, which reads it from the service; `end_sandbox`.
Invariants: people see their own machines and the sums of all, admins see everybody's; a machine of somebody else is one
that is not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from mettle.hub import tables
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.processes.host import free_memory_mb, total_memory_mb
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.machines.endings import EndCause, EndReason
from mettle.sandbox.service.machines import MachineRecord
from mettle.sandbox.service.quotas import Account
from mettle.sandbox.service.state import SandboxService
from mettle.sandbox.service.tokens import Holder
from mettle.web.problems import HttpError


@dataclass(frozen=True, slots=True)
class ShownSandbox:
    """One machine. `created_at` in seconds since the epoch, sizes in bytes; `cpus` None is without limit.

    `runs` is the image that was asked for, or what the backend has of its own.
    """

    id: str
    name: str
    owner: str
    is_own: bool
    runs: str
    reach: str
    labels: list[str]
    created_at: float
    lifetime_s: float | None
    memory_bytes: int
    disk_bytes: int
    cpus: float | None
    num_jobs: int
    grade: str


@dataclass(frozen=True, slots=True)
class Share:
    """How much of something is given out. `most` None: nobody says how much there is."""

    what: str
    used: float
    most: float | None
    is_bytes: bool = False

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        return min(1.0, self.used / self.most) if self.most else 0.0


@dataclass(frozen=True, slots=True)
class JudgePool:
    """What judges code. Counts since the service began, but `num_running`, `num_waiting` and `num_warm`."""

    grade: str
    num_running: int
    num_waiting: int
    num_slots: int
    num_warm: int
    num_judged: int
    num_lost: int


@dataclass(frozen=True, slots=True)
class SandboxBoard:
    """All that the page shows. `shares` are of the host, `own` of the caller's quota."""

    backend: str
    machines: list[ShownSandbox] = field(default_factory=list)
    num_alive: int = 0
    shares: list[Share] = field(default_factory=list)
    own: list[Share] = field(default_factory=list)
    isolation: IsolationReport | None = None
    judge: JudgePool | None = None
    free_bytes: int | None = None


def owners_named(lab: Lab, ids: Collection[str]) -> dict[str, str]:
    """What people are called, by their ids."""
    o = tables.owners.c
    with lab.database.read() as c:
        return {row.id: row.slug for row in c.execute(select(o.id, o.slug).where(o.id.in_(ids)))}


def board_of(service: SandboxService, caller: Caller, names: Mapping[str, str]) -> SandboxBoard:
    """What the service has now. `names` are those of owners by id."""
    assert caller.person is not None, "the page is for people who are signed in"
    register, person = service.register, caller.person.id
    alive = register.alive
    shown = [each for each in alive if caller.is_admin or each.owner == person]
    return SandboxBoard(
        backend=service.config.sandbox.backend,
        machines=[_shown(each, names.get(each.owner, each.owner), each.owner == person) for each in shown],
        num_alive=len(alive),
        shares=_of_the_host(service, alive),
        own=_of_the_quota(service.quotas.of(Holder(person, service.config.quota))),
        isolation=register.pool.isolation,
        judge=_judge(service),
        free_bytes=None if register.max_cpus is None else _bytes(free_memory_mb()),
    )


async def end_sandbox(service: SandboxService, caller: Caller, machine_id: str) -> None:
    """End a machine of the caller's, for an admin anybody's. Raises: HttpError 404."""
    found = next((each for each in service.register.alive if each.id == machine_id), None)
    is_theirs = found is not None and caller.person is not None and found.owner == caller.person.id
    if found is None or not (is_theirs or caller.is_admin):
        raise HttpError(404, f"there is no sandbox {machine_id[:60]!r}; it has ended, or never was")
    await service.register.delete(found, EndReason(f"{caller.name} ended it on the Hub's page", EndCause.DELETED))


def _shown(record: MachineRecord, owner: str, is_own: bool) -> ShownSandbox:
    config, reach = record.machine.config, record.machine.config.reach()
    labels = [f"{name}={value}" if value else name for name, value in config.labels.items()]
    return ShownSandbox(
        id=record.id, name=record.name, owner=owner, is_own=is_own, runs=config.image or "the host's own",
        reach="nothing" if reach is None else "what it was allowed", labels=labels[:8], created_at=record.created,
        lifetime_s=config.lifetime_s, memory_bytes=config.memory_mb << 20, disk_bytes=config.disk_mb << 20,
        cpus=config.cpus, num_jobs=len(record.jobs), grade=record.machine.isolation.grade,
    )  # fmt: skip


def _of_the_host(service: SandboxService, alive: list[MachineRecord]) -> list[Share]:
    """Disks of machines are in memory where machines live on this host, so that both come out of one thing."""
    max_cpus = service.register.max_cpus
    memory, disk = (sum(getattr(each.machine.config, name) for each in alive) for name in ("memory_mb", "disk_mb"))
    if max_cpus is None:
        given = [Share("memory", memory << 20, None, True), Share("disks", disk << 20, None, True)]
    else:
        given = [Share("memory and disks", (memory + disk) << 20, _bytes(total_memory_mb()), True)]
    return [*given, Share("processors", service.quotas.cpus, max_cpus)]


def _of_the_quota(account: Account) -> list[Share]:
    quota = account.quota
    return [
        Share("machines", account.num_machines, quota.max_machines),
        Share("memory", account.memory_mb << 20, _bytes(quota.max_memory_mb), True),
        Share("disks", account.disk_mb << 20, _bytes(quota.max_disk_mb), True),
        Share("processors", account.cpus, quota.max_cpus),
        Share("judgements", account.num_judging, quota.max_judging),
    ]


def _judge(service: SandboxService) -> JudgePool | None:
    """A judge of another backend counts nothing of its own."""
    if service.judge is None:
        return None
    stats: Any = getattr(service.judge, "stats", None)
    running = int(getattr(stats, "num_running", service.num_judging))
    return JudgePool(
        grade=service.judge.isolation.grade,
        num_running=running,
        num_waiting=max(0, service.num_judging - running),
        num_slots=service.config.sandbox.max_running,
        num_warm=int(getattr(stats, "num_warm", 0)),
        num_judged=int(getattr(stats, "num_judged", 0)),
        num_lost=int(getattr(stats, "num_cells_lost", 0)),
    )


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20
