"""The machines as people see them: what each has, whether it is heard of, and what it does.

What a machine works on is named to those whose it is; others see that it is busy.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, select

from mettle.hub import tables
from mettle.hub.caller import Caller
from mettle.hub.lab import Lab
from mettle.hub.machines import fleet, leases

LEFT_SHOWN_S = 86_400.0


@dataclass(frozen=True, slots=True)
class MachineWork:
    """One lease. `name` and `link` are empty for work of others."""

    kind: str
    name: str
    link: str
    since: float
    generation: int


@dataclass(frozen=True, slots=True)
class ShownMachine:
    """One machine. `state` is here, silent, leaving or left; sizes in bytes, None where it does not say."""

    id: str
    name: str
    state: str
    address: str
    joined_at: float
    seen_at: float
    silent_s: float
    version: str
    torch: str
    isolation: str
    cores: int | None
    load: float | None
    memory_bytes: int | None
    free_bytes: int | None
    gpus: list[str]
    environments: dict[str, str]
    work: list[MachineWork]

    def to_dict(self) -> dict[str, Any]:
        """As the API answers it."""
        return asdict(self)


def fleet_for(lab: Lab, caller: Caller) -> list[ShownMachine]:
    """Those that are here or have left within a day."""
    now = time.time()
    with lab.database.read() as c:
        found = fleet.list_machines(c, left_after=now - LEFT_SHOWN_S)
        work = {each.id: _work_of(c, caller, each.id) for each in found}
    return [_shown(each, work[each.id], max(0.0, now - each.seen_at), lab.lease_s) for each in found]


def _work_of(c: Connection, caller: Caller, machine_id: str) -> list[MachineWork]:
    j, made = tables.jobs.c, []
    for lease in leases.held_by(c, machine_id):
        row = c.execute(select(j.kind, j.name, j.owner_id, j.result_id, j.id).where(j.id == lease.job_id)).one()
        is_theirs = caller.is_admin or caller.is_member(row.owner_id)
        link = f"/hosted-evaluations/{row.result_id}" if row.result_id else f"/training/{row.id}"
        kind = "evaluation" if row.result_id else "run"
        made.append(
            MachineWork(
                kind, row.name if is_theirs else "", link if is_theirs else "", lease.begun_at, lease.generation
            )
        )
    return made


def _shown(machine: fleet.JoinedMachine, work: list[MachineWork], silent_s: float, lease_s: float) -> ShownMachine:
    """What a machine says of itself is looked at: it is text and numbers, or it is not shown."""
    facts = machine.facts if isinstance(machine.facts, dict) else {}
    states = {fleet.LEFT: "left", fleet.LEAVING: "leaving"}
    gpus, environments = facts.get("gpus"), facts.get("environments")
    state = states.get(machine.state) or ("silent" if silent_s > lease_s else "here")
    return ShownMachine(
        id=machine.id, name=machine.name, state=state, address=machine.address, joined_at=machine.joined_at,
        seen_at=machine.seen_at, silent_s=silent_s, version=_text(facts, "version"), torch=_text(facts, "torch"),
        isolation=_text(facts, "isolation"), cores=_whole(facts, "cores"), load=_figure(facts, "load"),
        memory_bytes=_whole(facts, "memory_bytes"), free_bytes=_whole(facts, "free_bytes"),
        gpus=[str(each)[:100] for each in gpus[:64]] if isinstance(gpus, list) else [],
        environments={str(k)[:100]: str(v)[:60] for k, v in environments.items()}
        if isinstance(environments, dict) else {},
        work=work,
    )  # fmt: skip


def _text(facts: dict[str, Any], name: str) -> str:
    value = facts.get(name)
    return value[:100] if isinstance(value, str) else ""


def _figure(facts: dict[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else None


def _whole(facts: dict[str, Any], name: str) -> int | None:
    value = _figure(facts, name)
    return None if value is None else int(value)
