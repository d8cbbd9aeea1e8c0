"""The machines of all clients: whose they are, what they are called, and when they end.

Parts: `MachineRecord`, one machine with its jobs; `Register`, all of them. Invariant: a machine belongs to one token
and is unknown to others; its share of the quota is given back when it ends, however it ends; one that has ended is
remembered for a while, so that whoever asks is told why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mettle.errors import SandboxError, UserError
from mettle.processes.clock import steady_time
from mettle.processes.host import free_memory_mb
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.machines.endings import EndCause, EndReason, MachineLost, cause_of
from mettle.sandbox.machines.files import fill
from mettle.sandbox.protocols import Job, Machine, Machines
from mettle.sandbox.service.faults import NoJob, NoMachine, ServiceBusy
from mettle.sandbox.service.metrics import ServiceMetrics
from mettle.sandbox.service.quotas import ROUNDING, Quotas
from mettle.sandbox.service.tokens import Holder

logger = logging.getLogger(__name__)

DELETED: Final = EndReason("it was deleted", EndCause.DELETED)
_MAX_ENDED: Final = 10_000
_MAX_JOBS: Final = 1000
MAX_PAGE: Final = 1000
_MAX_ABOUT: Final = 64 << 10


@dataclass
class MachineRecord:
    """One machine and what its client has said about it."""

    number: int
    machine: Machine
    owner: str
    client: str
    give_back: Callable[[], None]
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=steady_time)
    jobs: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    ended: float | None = None
    why: str = ""

    @property
    def id(self) -> str:
        return self.machine.id

    @property
    def status(self) -> str:
        return "running" if self.ended is None else "ended"

    def add_job(self, job: Job) -> str:
        """Keep a job under the last part of its id; of many, the oldest that have ended are forgotten."""
        name = job.id.rpartition("/")[2]
        self.jobs[name] = job
        if len(self.jobs) > _MAX_JOBS:
            done = [known for known, held in self.jobs.items() if held.poll() is not None]
            for known in done[: len(self.jobs) - _MAX_JOBS]:
                del self.jobs[known]
        return name

    def job(self, name: str) -> Job:
        known = self.jobs.get(name)
        if known is None:
            raise NoJob(f"machine {self.id} has no job {name!r}; it has {', '.join(list(self.jobs)[-5:]) or 'none'}")
        return known

    def as_dict(self) -> dict[str, Any]:
        """What clients see."""
        config = self.machine.config
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "why_ended": self.why,
            "labels": dict(config.labels),
            "memory_mb": config.memory_mb,
            "disk_mb": config.disk_mb,
            "created": self.created,
            "age_s": round((self.ended or steady_time()) - self.created, 3),
            "lifetime_s": config.lifetime_s,
            "idle_s": config.idle_s,
            "grade": self.machine.isolation.grade,
            "jobs": list(self.jobs),
        }


class Register:
    """All machines of a service."""

    def __init__(
        self,
        pool: Machines,
        quotas: Quotas,
        metrics: ServiceMetrics,
        spare_memory_mb: int | None = None,
        max_cpus: float | None = None,
    ) -> None:
        """`spare_memory_mb` has to stay free on this host, and `max_cpus` processors are given out; None where machines
        live elsewhere."""
        self.pool = pool
        self._max_cpus = max_cpus
        self._spare_memory_mb = spare_memory_mb
        self.on_change: Callable[[str, MachineRecord], object] = lambda what, record: None
        """Called with "create" or "end"."""
        self._quotas = quotas
        self._metrics = metrics
        self._records: dict[str, MachineRecord] = {}
        self._ended: OrderedDict[str, MachineRecord] = OrderedDict()
        self._num_made = 0
        self._num_making = 0

    @property
    def num_running(self) -> int:
        return len(self._records)

    @property
    def num_making(self) -> int:
        return self._num_making

    @property
    def max_cpus(self) -> float | None:
        """Processors that are given out at most; None where machines live elsewhere."""
        return self._max_cpus

    @property
    def alive(self) -> list[MachineRecord]:
        """Those of all tokens that run, oldest first."""
        self.sweep()
        return list(self._records.values())

    async def create(self, holder: Holder, client: str, config: MachineConfig, **about: Any) -> MachineRecord:
        """A new machine of this token.

        Raises: QuotaExceeded; ServiceBusy while the host has not the memory or the processors; SandboxError if it
        cannot be made.
        """
        _check_size(config)
        give_back = self._quotas.take_machine(holder, config)
        started = time.monotonic()
        self._num_making += 1
        try:
            self._admit(config)
            machine = await self._make(config)
        except BaseException:
            give_back()
            raise
        finally:
            self._num_making -= 1
        self._metrics.add_time("create_seconds", time.monotonic() - started)
        self._num_made += 1
        record = MachineRecord(self._num_made, machine, holder.name, client, give_back, **about)
        self._records[record.id] = record
        self.on_change("create", record)
        return record

    def _admit(self, config: MachineConfig) -> None:
        """Files live in memory, too: all that the machine may use has to be free now. It has been counted already."""
        given_out = self._quotas.cpus
        if self._max_cpus is not None and given_out > self._max_cpus + ROUNDING:
            wanted = config.cpus or self._quotas.uncapped_cpus
            raise ServiceBusy(
                f"this host has {self._max_cpus:g} processors to give out (cpus_per_core for each of its cores), of "
                f"which {given_out - wanted:.4g} are, and the machine asks for {wanted:.4g}: ask for less, or come "
                "back when others have ended"
            )
        free_mb = None if self._spare_memory_mb is None else free_memory_mb()
        wanted_mb = config.memory_mb + config.disk_mb
        if free_mb is not None and wanted_mb + (self._spare_memory_mb or 0) > free_mb:
            raise ServiceBusy(
                f"this host has {free_mb:,} MB of memory free, of which {self._spare_memory_mb} MB stay so, and the "
                f"machine may use {wanted_mb:,} MB (memory_mb and disk_mb): ask for less, or come back when others "
                "have ended"
            )

    async def _make(self, config: MachineConfig) -> Machine:
        """What is remembered of it, also when it has ended, is without its first files."""
        machine = await self.pool.create(replace(config, files={}))
        await fill(machine, config.files)
        return machine

    def find(self, holder: Holder, machine_id: str) -> MachineRecord:
        """A machine of this token that may have ended. Raises: NoMachine."""
        record = self._records.get(machine_id) or self._ended.get(machine_id)
        if record is None or record.owner != holder.name:
            raise NoMachine(f"there is no machine {machine_id!r}; it has ended, or never was")
        if record.ended is None and not record.machine.is_alive:
            self._note_ended(record)
        return record

    def running(self, holder: Holder, machine_id: str) -> MachineRecord:
        """A machine of this token. Raises: NoMachine; MachineLost, which says why it has ended."""
        record = self.find(holder, machine_id)
        if record.ended is not None:
            raise MachineLost(f"machine {record.id} has ended: {record.why}", why=record.why)
        return record

    def select(self, holder: Holder, labels: Mapping[str, str], status: str | None = None) -> list[MachineRecord]:
        """Those of a token that have all the labels, oldest first; a label without a value asks for its name."""
        if status not in (None, "running", "ended"):
            raise UserError(f"status is {status!r}; it must be running or ended")
        sources: list[Iterable[MachineRecord]] = []
        if status != "running":
            sources.append(self._ended.values())
        if status != "ended":
            sources.append(self._records.values())
        found = [
            record
            for source in sources
            for record in source
            if record.owner == holder.name and _has_labels(record.machine.config.labels, labels)
        ]
        return sorted(found, key=lambda record: record.number)

    def page(
        self, holder: Holder, labels: Mapping[str, str], status: str | None, limit: int, cursor: str | None
    ) -> tuple[list[MachineRecord], str | None]:
        """At most `limit` of them after the cursor, and the cursor of the rest (None when there is none)."""
        try:
            after = int(cursor, 36) if cursor else 0
        except ValueError:
            raise UserError(f"{cursor!r} is not a cursor; give back `next_cursor` as it came") from None
        if not 1 <= limit <= MAX_PAGE:
            raise UserError(f"limit is {limit}; it must be from 1 to {MAX_PAGE}")
        found = [record for record in self.select(holder, labels, status) if record.number > after]
        is_more = len(found) > limit
        found = found[:limit]
        return found, _base36(found[-1].number) if is_more else None

    def of_client(self, owner: str, client: str) -> list[MachineRecord]:
        return [record for record in self._records.values() if (record.owner, record.client) == (owner, client)]

    def ended_of_client(self, owner: str, client: str) -> dict[str, str]:
        """Why the client's machines have ended, by id, as far as is remembered."""
        return {r.id: r.why for r in self._ended.values() if (r.owner, r.client) == (owner, client)}

    async def delete(self, record: MachineRecord, why: EndReason = DELETED) -> None:
        """End a machine; doing it twice is harmless."""
        if record.ended is not None:
            return
        self._note_ended(record, why)
        await record.machine.delete(why)

    async def delete_all(self, records: Iterable[MachineRecord], why: EndReason = DELETED) -> None:
        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(self._delete_quietly(record, why))

    def sweep(self) -> None:
        """Notice those that have ended by themselves."""
        for record in [record for record in self._records.values() if not record.machine.is_alive]:
            self._note_ended(record)

    async def close(self) -> None:
        await self.delete_all(
            list(self._records.values()), EndReason("the sandbox service was shut down", EndCause.SHUTDOWN)
        )

    async def _delete_quietly(self, record: MachineRecord, why: EndReason) -> None:
        try:
            await self.delete(record, why)
        except (SandboxError, OSError) as error:
            logger.warning("a machine could not be deleted", extra={"machine": record.id, "why": str(error)})

    def _note_ended(self, record: MachineRecord, why: str = "") -> None:
        record.why = why or getattr(record.machine, "why_ended", "") or "its process 1 ended"
        record.ended = steady_time()
        record.give_back()
        record.jobs = OrderedDict((name, job) for name, job in record.jobs.items() if _has_result(job))
        self._records.pop(record.id, None)
        self._ended[record.id] = record
        self._metrics.count("machines_ended_total", cause=cause_of(record.why))
        self.on_change("end", record)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _check_size(config: MachineConfig) -> None:
    """Of what is remembered for as long as the machine is. Raises: UserError."""
    num_characters = sum(len(word) for held in (config.labels, config.env) for pair in held.items() for word in pair)
    if num_characters > _MAX_ABOUT:
        raise UserError(f"a machine's labels and variables have {num_characters:,} characters; {_MAX_ABOUT:,} will do")


def _has_result(job: Job) -> bool:
    with contextlib.suppress(SandboxError):
        return job.poll() is not None
    return False


def _has_labels(held: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in held and value in ("", held[name]) for name, value in wanted.items())


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, last = divmod(number, 36)
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[last] + digits
    return digits or "0"
