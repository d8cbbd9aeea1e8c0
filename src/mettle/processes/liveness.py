"""Who makes no progress: a pure function of the beats of a run and the time.

Parts: `Fault`, `Looks`, `diagnose`, `root_of`. A process that gives no sign of life, whose main loop stands, that is
paused, or that has work and does not move, is at fault by what was measured of it. Whom they ask that is none of them
(a judge) is at fault when it answers nobody. Only where nobody is, and somebody has waited long all the same, the waits
are followed from process to process to the one at their root. Invariant: a process that makes progress is at fault for
nothing, however long others wait for it, and neither is one that waits for an answer from outside.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mettle.processes.beats import GAP_S, Beat, Wait

ENVIRONMENTS = "environments"
"""The target of who waits for rollouts: whichever process the environments' work stands in."""
WORKER_PREFIX = "worker-"
TRAINER = "trainer"
"""Its ranks beat as `trainer`, `trainer-1`, ..."""
REPLICA_PREFIX = "replica-"
"""What a cluster's engines beat under."""
PLACE_PREFIX = "workers-"
"""And its places for environments' workers."""
SANDBOXES_PREFIX = "sandboxes-"
"""And its sandbox services."""
NEEDED_BY_ROLLOUTS = (PLACE_PREFIX, SANDBOXES_PREFIX)
"""While all of one kind are being started again, no rollout can go on, whatever else is there."""
TOLD_S = 10.0
"""No sign of life, an event loop that stands, or a pause, for this long is told."""
STOPPED_RESTART_S = 20.0
"""A process stopped by a signal is ended after this: it may hold the ledger's lock, and nobody writes till then."""
SILENT_RESTART_S = 120.0
"""One that runs and does not beat (a host that swaps, a C call that holds the interpreter) is given longer."""
BLOCKED_RESTART_S = 300.0
"""Code that blocks an event loop now and then is slow; a worker of an environment is given as long by its pool."""
WRITING_RESTART_S = 60.0
"""But not in the middle of a transaction: the others give up waiting for it after 180 s, and the run would end."""
PAUSED_RESTART_S = 60.0
IDLE_TOLD_S = 20.0
IDLE_TOLD_TIMES = 5.0
IDLE_RESTART_S = 300.0
IDLE_RESTART_TIMES = 20.0
"""Work without progress is judged by the longest that the same process has taken before, where there is such a time."""
MAX_GAPS = 256
WAIT_TOLD = 0.25
WAIT_RESTART = 0.5
"""Shares of a wait's budget, where nothing else is known of who is awaited."""

FROZEN, BLOCKED, PAUSED, STUCK, AWAITED, SILENT = "frozen", "blocked", "paused", "stuck", "awaited", "silent"
HALTED = (FROZEN, BLOCKED, PAUSED)


@dataclass(frozen=True, slots=True)
class Fault:
    """`process` is what stands still. `restart_at_s` is the age at which it is worth ending; None if it never is.

    Of somebody outside of the run `process` is what it is called, and `pid` 0.
    """

    process: str
    pid: int
    kind: str
    age_s: float
    text: str
    restart_at_s: float | None

    @property
    def is_due(self) -> bool:
        """True when the process should be ended so that it starts afresh."""
        return self.restart_at_s is not None and self.age_s >= self.restart_at_s


class Looks:
    """When somebody looked, so that the time in which nobody did counts against nobody.

    A host that sleeps, or is so busy that the watcher itself does not run, stops the silent and the watcher alike.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)

    def look(self, now: float) -> None:
        """Somebody looks now; until the next look a moment passes, or a gap opens."""
        if self._last is None:
            self._gaps.append((float("-inf"), now))
        elif now - self._last > GAP_S:
            self._gaps.append((self._last, now))
        self._last = now

    def seconds_since(self, time: float) -> float:
        """From `time` to the newest look, without the gaps."""
        if self._last is None:
            return 0.0
        missed_s = sum(max(0.0, end - max(start, time)) for start, end in self._gaps)
        return max(0.0, self._last - time - missed_s)


def diagnose(
    beats: Mapping[str, Beat],
    now: float,
    *,
    looked_s: Callable[[float], float] | None = None,
    state_of: Callable[[int], str] = lambda pid: "",
    missing: Collection[str] = (),
) -> list[Fault]:
    """What stands still, the longest first; nothing while everything moves.

    `looked_s` says for how long the caller has looked since a time: no silence counts for longer. `state_of` gives the
    kernel's letter for a process (T: stopped, t: traced, D: waits for a device). `missing` are those that beat before
    and do not now: they are being started again, and whoever works with them waits for that.
    """
    seen_s = looked_s or (lambda since: now - since)
    found = [fault for beat in beats.values() if (fault := _own_fault(beat, beats, seen_s, state_of))]
    held = held_by(beats, found, missing)
    faults = [fault for fault in found if fault.kind != STUCK or fault.process not in held]
    deaf = {fault.process for fault in found if fault.kind in HALTED}
    faults += _silent([beat for name, beat in beats.items() if name not in deaf])
    return sorted(faults or _awaited(beats, seen_s, held), key=lambda fault: -fault.age_s)


def root_of(beats: Mapping[str, Beat], wait: Wait) -> tuple[str, ...]:
    """The processes behind a wait, from the one it names to the one that waits for nobody, or waits in a circle."""
    chain: list[str] = []
    target = _resolve(beats, wait)
    while target not in chain:
        chain.append(target)
        beat = beats.get(target)
        if beat is None or not beat.waits:
            break
        target = _resolve(beats, beat.waits[0])
    return tuple(chain)


def process_of(owner: str) -> str:
    """`orchestrator/updater` is a task of the orchestrator's."""
    return owner.partition("/")[0]


def worker_name(env_id: str, pid: int, place: str = "") -> str:
    """The name under which a worker process of an environment beats. `place` tells it from those of other hosts."""
    return f"{WORKER_PREFIX}{re.sub(r'[^A-Za-z0-9._-]', '-', env_id)}-{f'{place}-' if place else ''}{pid}"


def is_worker(name: str) -> bool:
    """True for a process that an environment runs in."""
    return name.startswith(WORKER_PREFIX)


def is_place(name: str) -> bool:
    """True for what starts environments' workers on a node."""
    return name.startswith(PLACE_PREFIX)


def held_by(beats: Mapping[str, Beat], faults: Collection[Fault], missing: Collection[str] = ()) -> set[str]:
    """Who does not run, as `faults` say, and who waits for one of them, or for what is `missing`.

    With a rank of the trainer all others wait, with an engine or a sandbox service all that roll out, and with a worker
    the orchestrator. What is missing holds up those that can do nothing without it. Whoever has asked somebody outside
    of the run waits for the answer. With one that stopped in the middle of a transaction everybody waits.
    """
    halted = {fault.process for fault in faults if fault.kind in HALTED}
    if any(beats[name].is_writing for name in halted if name in beats):
        return set(beats)  # nobody comes past what is being written
    halted |= {name for name, beat in beats.items() if any(asked.num_open for asked in beat.asked)}
    if _has_none(REPLICA_PREFIX, beats, missing):
        halted.add("inference")
    if any(map(_is_rank, halted)):
        halted |= {name for name in beats if _is_rank(name)}
    is_without = "inference" in missing or any(_has_none(kind, beats, missing) for kind in NEEDED_BY_ROLLOUTS)
    # Whether or not a rollout waited for one of these when it beat last: it may have been given work since.
    if is_without or any(map(_serves_rollouts, halted)):
        halted |= {name for name in beats if is_worker(name) or name == "orchestrator"}
    elif any(map(is_worker, halted)):
        halted.add("orchestrator")
    waiting = {
        name for name, beat in beats.items() if any(halted.intersection(root_of(beats, wait)) for wait in beat.waits)
    }
    return halted | waiting


def _silent(beats: Collection[Beat]) -> list[Fault]:
    """Who is asked by processes that are well, and has answered none of them for longer than it ever took."""
    found: list[Fault] = []
    for target in dict.fromkeys(asked.target for beat in beats for asked in beat.asked):
        known = {beat.name: asked for beat in beats for asked in beat.asked if asked.target == target}
        waiting = {name: asked for name, asked in known.items() if asked.num_open}
        if not waiting:
            continue
        silent_s = max(asked.silent_s for asked in waiting.values())
        silent_s = min([silent_s, *(asked.answered_s for asked in known.values() if asked.answered_s is not None)])
        if silent_s >= max(IDLE_TOLD_S, IDLE_TOLD_TIMES * max(asked.longest_s for asked in known.values())):
            num_open = sum(asked.num_open for asked in waiting.values())
            text = f"{target} has not answered for {silent_s:.0f} s; {num_open} questions of {', '.join(waiting)} wait"
            found.append(Fault(target, 0, SILENT, silent_s, text, None))
    return found


def _serves_rollouts(name: str) -> bool:
    """True for what rollouts ask: engines, and a cluster's sandbox services."""
    return name == "inference" or name.startswith((REPLICA_PREFIX, SANDBOXES_PREFIX))


def _is_rank(name: str) -> bool:
    return name == TRAINER or name.startswith(f"{TRAINER}-")


def _own_fault(
    beat: Beat,
    beats: Mapping[str, Beat],
    looked_s: Callable[[float], float],
    state_of: Callable[[int], str],
) -> Fault | None:
    silent_s = looked_s(beat.at)
    where = f" in {beat.where}" if beat.where else ""
    who = f"{beat.name} (pid {beat.pid}{f' on {beat.host}' if beat.host else ''})"
    if silent_s >= TOLD_S:
        state = "" if beat.host else state_of(beat.pid)
        how = {"T": "is stopped by a signal", "t": "is held by a debugger", "D": "waits for a disk or a device"}
        text = f"{who} {how.get(state, 'does not run its threads')}: no sign of life for {silent_s:.0f} s"
        limits: dict[str, float | None] = {"T": STOPPED_RESTART_S, "t": None}
        limit = limits.get(state, SILENT_RESTART_S)
        if beat.host and is_worker(beat.name):  # its pool ends it, where nobody else can
            limit = None
        return Fault(beat.name, beat.pid, FROZEN, silent_s, text, limit)
    if beat.late_s >= TOLD_S:
        text = f"{who}: its main loop is blocked for {beat.late_s:.0f} s{where}"
        limit = None if is_worker(beat.name) else BLOCKED_RESTART_S  # its pool ends a worker
        limit = WRITING_RESTART_S if beat.is_writing else limit
        return Fault(beat.name, beat.pid, BLOCKED, beat.late_s, text, limit)
    if beat.paused_s >= TOLD_S:
        text = f"{who} was told to pause (POST /admin/pause) and has not sampled for {beat.paused_s:.0f} s"
        return Fault(beat.name, beat.pid, PAUSED, beat.paused_s, text, PAUSED_RESTART_S)
    idle_s = _idle_s(beat, beats)
    if idle_s >= max(IDLE_TOLD_S, IDLE_TOLD_TIMES * beat.longest_idle_s):
        text = f"{who} has work and has finished no {beat.unit} for {idle_s:.0f} s{where}"
        has_history = beat.longest_idle_s > 0.0 and not is_worker(beat.name)
        limit = max(IDLE_RESTART_S, IDLE_RESTART_TIMES * beat.longest_idle_s) if has_history else None
        return Fault(beat.name, beat.pid, STUCK, idle_s, text, limit)
    return None


def _idle_s(beat: Beat, beats: Mapping[str, Beat]) -> float:
    """How long a process has had work of its own and not moved. Who rolls out moves with the engine, too."""
    if not beat.has_work or _is_held_up(beat, beats):
        return 0.0
    if is_worker(beat.name) or beat.name == "orchestrator":
        engine = beats.get("inference")
        return beat.idle_s if engine is None else min(beat.idle_s, engine.still_s)
    return beat.idle_s


def _has_none(kind: str, beats: Mapping[str, Beat], missing: Collection[str]) -> bool:
    """True while all of a cluster's processes of a kind are being started again."""
    return any(name.startswith(kind) for name in missing) and not any(name.startswith(kind) for name in beats)


def _is_held_up(beat: Beat, beats: Mapping[str, Beat]) -> bool:
    """True when somebody else has the work of this process: rollouts wait for the model, the orchestrator for them."""
    behind = [beats[name] for name in _behind_rollouts(beats) if name in beats]
    if beat.name == "orchestrator":
        return any(other is not beat for other in behind)
    if beat.name == "inference":  # in front of a cluster's engines it has no work but theirs
        return any(name.startswith(REPLICA_PREFIX) for name in beats)
    return is_worker(beat.name) and any(other.name == "inference" for other in behind)


def _awaited(beats: Mapping[str, Beat], looked_s: Callable[[float], float], held: Collection[str]) -> list[Fault]:
    """Waits that have used up a share of their budget, laid at the root; in a circle, at whom the longest waits for."""
    found: dict[frozenset[str], Fault] = {}
    for wait in (wait for beat in beats.values() for wait in beat.waits):
        waited_s = looked_s(wait.since)
        if waited_s < WAIT_TOLD * wait.budget_s:
            continue
        chain = root_of(beats, wait)
        name = chain[-1]
        root = beats.get(name)
        key = frozenset({name})
        if root is not None and root.waits:
            name, key = chain[0], frozenset(chain)
        elif root is not None and root.has_work:
            continue  # it moves, or `_own_fault` would have said so: slow is not dead
        if name in held:
            continue
        known = found.get(key)
        if known is None or known.age_s < waited_s:
            text = f"{wait.owner} has waited {waited_s:.0f} s of {wait.budget_s:.0f} s for {' -> '.join(chain)}"
            pid = beats[name].pid if name in beats else 0
            found[key] = Fault(name, pid, AWAITED, waited_s, f"{text}: {wait.awaits}", WAIT_RESTART * wait.budget_s)
    return list(found.values())


def _resolve(beats: Mapping[str, Beat], wait: Wait) -> str:
    if wait.target != ENVIRONMENTS:
        return wait.target
    behind = _behind_rollouts(beats)
    return behind[0] if behind else "orchestrator"


def _behind_rollouts(beats: Mapping[str, Beat]) -> list[str]:
    """Where the rollouts under way are: in the engine, else in the workers that run them, the longest at it first."""
    engine = beats.get("inference")
    if engine is not None and (engine.has_work or engine.paused_s):
        return ["inference"]
    workers = [beat for beat in beats.values() if is_worker(beat.name) and beat.has_work]
    return [beat.name for beat in sorted(workers, key=lambda beat: -beat.idle_s)]
