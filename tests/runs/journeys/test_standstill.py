"""Faults in the real processes of a run at its default budgets: who stands still is named, and it goes on.

After how many seconds stands in docs/explanation/liveness.md; `METTLE_STANDSTILL_LOG` names a file for new figures.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from standstill import LIMIT_S, PLACES, WARM_UP, FaultyRun, note
from stories import mettle_in, published

from mettle.processes.beats import read_beats
from mettle.processes.child import process_state

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Fault:
    """What is done to a run, which words name it, whom they name, and who ends it (nobody: the test takes it away)."""

    inject: Callable[[FaultyRun], None]
    words: str
    process: str
    is_left: bool = False
    places: tuple[str, ...] = PLACES
    overrides: tuple[str, ...] = ("--orchestrator.env_workers", "1")
    who: str = "(pid {pid})"


def frozen(name: str, **options: object) -> Fault:
    return Fault(lambda run: run.stop_process(name), "is stopped by a signal", name, is_left=True, **options)


def blocked(name: str, **options: object) -> Fault:
    return Fault(lambda run: run.block(name), "sitecustomize.py", name, **options)


def killed(name: str) -> Fault:
    words = f"{name} was ended by SIGKILL; restarting"
    return Fault(lambda run: os.kill(run.pid(name), signal.SIGKILL), words, name, is_left=True, who="")


def clock(seconds: float) -> Fault:
    return Fault(lambda run: run.begin("clock", str(seconds)), "clock", "")


IN_THE_ORCHESTRATOR = ("--orchestrator.env_workers", "0")
TWO_RANKS = ("--deployment.num_trainer_ranks", "2")
BEHIND_THE_PAGE = ("event", "terminal")
FAULTS = {
    "frozen trainer": frozen("trainer"),
    "frozen inference": frozen("inference"),
    "frozen rank 0 of two": frozen("trainer", overrides=TWO_RANKS),
    "frozen rank 1 of two": frozen("trainer-1", overrides=TWO_RANKS),
    "frozen orchestrator": frozen("orchestrator"),
    "frozen worker": frozen("worker"),
    "frozen page": frozen("hub", places=BEHIND_THE_PAGE),
    "frozen supervisor": frozen("supervisor", places=("event", "page")),  # it cannot write to its terminal
    "blocked trainer": blocked("trainer"),
    "blocked inference": blocked("inference"),
    "blocked orchestrator": blocked("orchestrator"),
    "blocked worker": blocked("worker"),
    "blocked page": blocked("hub", places=BEHIND_THE_PAGE),
    "blocked supervisor": blocked("supervisor"),
    "an environment holds the loop of the orchestrator": Fault(
        lambda run: run.begin("holds-loop"), "at_will.py", "orchestrator", overrides=IN_THE_ORCHESTRATOR
    ),
    "an environment holds the loop of its worker": Fault(lambda run: run.begin("holds-loop"), "at_will.py", "worker"),
    "an environment in the orchestrator never answers": Fault(
        lambda run: run.begin("never-answers"), "no rollouts", "orchestrator", overrides=IN_THE_ORCHESTRATOR
    ),
    "an environment in a worker never answers": Fault(lambda run: run.begin("never-answers"), "no rollouts", "worker"),
    "killed trainer": killed("trainer"),
    "killed inference": killed("inference"),
    "killed orchestrator": killed("orchestrator"),
    "killed page": killed("hub"),  # which tells of it itself, when it is back
    "killed worker": Fault(
        lambda run: os.kill(run.pid("worker"), signal.SIGKILL), "SIGKILL", "worker", is_left=True, who="worker {pid}"
    ),
    "paused engine": Fault(lambda run: run.admin("/admin/pause"), "told to pause", "inference", is_left=True),
    "clock a day ahead": clock(86_400.0),
    "clock a day back": clock(-86_400.0),
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FaultyRun]]:
    made: list[FaultyRun] = []

    def begin(*overrides: str, **options: object) -> FaultyRun:
        made.append(FaultyRun(tmp_path, *overrides, **options))
        return made[-1]

    yield begin
    for run in made:
        run.heal()
        run.close()


@pytest.mark.parametrize("name", FAULTS)
def test_who_stands_still_is_named_and_the_run_goes_on(name, start):
    fault = FAULTS[name]
    run = start(*fault.overrides)
    run.wait_for(published(3), limit_s=800.0)
    before = {event.event_id for event in run.events()}
    pid = run.pid(fault.process) if fault.process else 0
    fault.inject(run)
    injected = time.monotonic()
    who = fault.who.format(pid=pid)
    seen = run.watch(lambda text: fault.words in text and (not fault.process or who in text), places=fault.places)
    figures = {place: getattr(seen, place) for place in fault.places}
    note(name, {**figures, "told": [e.message for e in run.events() if e.event_id not in before]})
    assert not seen.missing(fault.places), (figures, run.said())
    blamed = {event.data["process"] for event in run.events() if event.event_id not in before and event.kind == "stall"}
    assert {("worker" if name.startswith("worker") else name) for name in blamed} <= {fault.process}
    if not fault.is_left:
        run.heal()
    run.goes_on()
    note(name, {"goes_on_s": time.monotonic() - injected})
    run.finish()


def test_a_killed_supervisor_takes_its_run_along_and_is_named_where_the_run_goes_on(tmp_path, start):
    run = start("--orchestrator.env_workers", "1")
    run.wait_for(published(3), limit_s=800.0)
    pid, others = run.pid("supervisor"), [beat.pid for beat in read_beats(run.run_dir.beats).values()]
    run.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    run.process.wait()
    while any(process_state(other) for other in others):
        assert time.monotonic() - killed < LIMIT_S, "processes of a run outlive its supervisor"
        time.sleep(0.05)
    gone_s = time.monotonic() - killed
    listed = mettle_in(tmp_path, "rl", "list", "--dir", tmp_path, "--json")
    assert [row["state"] for row in json.loads(listed.stdout)] == ["interrupted"], listed
    resumed = time.monotonic()
    run.resume()
    seen = run.watch(lambda text: f"the supervisor (pid {pid}) was killed" in text)
    assert not seen.missing(), (seen, run.said())
    run.goes_on()
    figures = {place: getattr(seen, place) for place in PLACES}
    note("killed supervisor", {**figures, "gone_s": gone_s, "goes_on_s": time.monotonic() - resumed})
    run.finish()


@pytest.mark.parametrize("name", ["inference", "orchestrator", "trainer"])
def test_a_loop_that_stays_blocked_is_ended_and_the_run_goes_on(name, start):
    run = start("--orchestrator.env_workers", "1")
    run.wait_for(published(3), limit_s=800.0)
    run.block(name)
    injected = time.monotonic()
    places = ("event", "terminal")
    seen = run.watch(lambda text: f"ending {name} after" in text, places=places, limit_s=800.0)
    assert not seen.missing(places), (seen, run.said())
    run.goes_on()
    note(
        f"{name} stays blocked",
        {"event": seen.event, "terminal": seen.terminal, "goes_on_s": time.monotonic() - injected},
    )
    run.finish()


def test_a_loop_that_is_blocked_in_the_middle_of_a_transaction_is_ended_before_the_others_give_up(start):
    run = start("--orchestrator.env_workers", "1")
    run.wait_for(published(3), limit_s=800.0)
    run.block("orchestrator", is_writing=True)
    injected = time.monotonic()
    seen = run.watch(lambda text: "ending orchestrator after 6" in text, places=("terminal",), limit_s=400.0)
    note("orchestrator blocked while it writes", {"terminal": seen.terminal})
    assert not seen.missing(("terminal",)), (seen, run.said())
    run.goes_on()
    note("orchestrator blocked while it writes", {"goes_on_s": time.monotonic() - injected})
    run.finish()


@pytest.mark.parametrize(("name", "words"), [("frozen", "is stopped by a signal"), ("blocked", "sitecustomize.py")])
def test_a_warm_up_that_stands_still_is_named(name, words, start):
    run = start(text=WARM_UP)
    run.wait_for(lambda ledger: len(ledger.journal.metric("sft/loss")) >= 3, limit_s=400.0)
    pid = run.pid("sft")
    run.stop_process("sft") if name == "frozen" else run.block("sft")
    injected = time.monotonic()
    seen = run.watch(lambda text: words in text and f"sft (pid {pid})" in text)
    note(f"{name} warm-up", {place: getattr(seen, place) for place in PLACES})
    assert not seen.missing(), (seen, run.said())
    if name == "frozen":
        run.wait_for(lambda ledger: {p.name: p.restarts for p in ledger.journal.processes()}["sft"] == 1)
        note(f"{name} warm-up", {"goes_on_s": time.monotonic() - injected})
    run.heal()
    run.finish()


@pytest.mark.parametrize(("workers", "process"), [("1", "worker"), ("0", "orchestrator")])
def test_an_environment_that_never_loads_is_named(workers, process, start):
    run = start("--orchestrator.env_workers", workers, loads=False)
    run.wait_for(lambda _: any(name.startswith(process) for name in read_beats(run.run_dir.beats)), limit_s=400.0)
    seen = run.watch(lambda text: "at_will.py" in text and process in text)
    note(f"an environment that never loads, {workers} workers", {place: getattr(seen, place) for place in PLACES})
    assert not seen.missing(), (seen, run.said())
    run.heal()
    run.goes_on(3)
    run.finish()
