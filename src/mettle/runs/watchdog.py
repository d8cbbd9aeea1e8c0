"""The watchdog: what stands still is told once and, when that lasts, ended once so that it starts afresh.

Parts: `Watchdog` (what was told and done), `Report` (what to do now). Who stands still is found in
`mettle.processes.liveness` from the beats; this remembers. Invariant: a silence counts only while the watchdog itself
looked without a gap, so that whoever was stopped together with everybody else ends nobody on waking up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mettle.processes.beats import Beat, waits_of
from mettle.processes.liveness import (
    AWAITED,
    IDLE_TOLD_S,
    SILENT,
    STUCK,
    WAIT_RESTART,
    WAIT_TOLD,
    Fault,
    Looks,
    diagnose,
    held_by,
    root_of,
)

SHOWN_WAITS = 3
MIN_SHOWN_S = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """Something new about a process: a `stall` to tell, a `recovery` (end it), or that it has `recovered` by itself."""

    kind: str
    fault: Fault
    text: str


@dataclass(slots=True)
class Watchdog:
    """One a supervisor. Each stall is told once and acted on once."""

    _told: dict[tuple[str, int, str], Fault] = field(default_factory=dict)
    _acted: set[tuple[str, int, str]] = field(default_factory=set)
    _looks: Looks = field(default_factory=Looks)
    _known: set[str] = field(default_factory=set)
    _held: dict[str, float] = field(default_factory=dict)
    """When each process last waited for one that did not run."""

    def check(
        self,
        beats: Mapping[str, Beat],
        now: float,
        *,
        state_of: Callable[[int], str] = lambda pid: "",
        age_of: Callable[[str], float] = lambda name: float("inf"),
    ) -> list[Report]:
        """What is new since the last call, which should come every second or so.

        `age_of` says for how long a process runs: a wait for its predecessor is not held against it, by telling or by
        ending it; nor is one for somebody who held it up.
        """
        self._looks.look(now)
        self._known |= beats.keys()
        missing = self._known - beats.keys()
        found = diagnose(beats, now, looked_s=self._looks.seconds_since, state_of=state_of, missing=missing)
        self._held |= dict.fromkeys(held_by(beats, found, missing), now)

        def age_s(name: str) -> float:
            """For how long it runs, and has been able to go on."""
            return min(age_of(name), now - self._held.get(name, float("-inf")))

        faults = [fault for fault in found if not _is_before_its_time(fault, age_s(fault.process))]
        reports: list[Report] = []
        for fault in faults:
            key = (fault.process, fault.pid, fault.kind)
            if key not in self._told:
                graph = "".join(f"; {line}" for line in wait_graph(beats, now)[:SHOWN_WAITS])
                reports.append(Report("stall", fault, fault.text + graph))
            self._told[key] = fault
            is_young = fault.kind == AWAITED and age_s(fault.process) < (fault.restart_at_s or 0.0)
            if fault.is_due and not is_young and key not in self._acted:
                self._acted.add(key)
                text = f"ending {fault.process} after {fault.age_s:.0f} s so that it starts afresh"
                reports.append(Report("recovery", fault, text))
        present = {(fault.process, fault.pid, fault.kind) for fault in faults}
        for key in [key for key in self._told if key not in present]:
            fault = self._told[key]
            if fault.kind == SILENT and not _has_answered(beats, fault):
                continue  # nobody has asked it again
            del self._told[key]
            if fault.kind == SILENT:
                text = f"{fault.process} answers again after {fault.age_s:.0f} s"
                reports.append(Report("recovered", fault, text))
            beat = beats.get(fault.process)
            if beat is not None and beat.pid == fault.pid and key not in self._acted:
                text = f"{fault.process} (pid {fault.pid}) goes on after {fault.age_s:.0f} s ({fault.kind})"
                reports.append(Report("recovered", fault, text))
        return reports


def _is_before_its_time(fault: Fault, age_s: float) -> bool:
    """A wait for its predecessor, or for one that held it up, is not held against a process; nor is work that it has
    just been let go on with."""
    if fault.kind == STUCK:
        return age_s < IDLE_TOLD_S
    told_at_s = (fault.restart_at_s or 0.0) * WAIT_TOLD / WAIT_RESTART
    return fault.kind == AWAITED and age_s < told_at_s


def _has_answered(beats: Mapping[str, Beat], fault: Fault) -> bool:
    """True when somebody has had an answer since the silence began for which it was told."""
    known = [asked.answered_s for beat in beats.values() for asked in beat.asked if asked.target == fault.process]
    return any(answered_s is not None and answered_s < fault.age_s for answered_s in known)


def wait_graph(beats: Mapping[str, Beat], now: float) -> list[str]:
    """Who waits for whom, over whom for whom in turn, and since when; the longest wait first, for people."""
    return [
        f"{wait.owner} waits {now - wait.since:.0f} s for {' -> '.join(root_of(beats, wait))} ({wait.awaits})"
        for wait in waits_of(dict(beats))
        if now - wait.since >= MIN_SHOWN_S
    ]
