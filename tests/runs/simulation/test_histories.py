"""Histories of whole runs with their supervisor, in simulated time, each a function of its number.

What is promised of every one: it ends; no task is lost and none trained twice; who froze is named within 30 s at the
default budgets, and nobody else ever is; when the supervisor has ended, nothing of the run is left.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.orchestrator.journeys.test_simulation import check_accounts, check_batches

from mettle.orchestrator.simulator import SimulatedWorld
from mettle.processes.virtual_time import Deadlock
from mettle.runs.config import RunConfig
from mettle.runs.simulation.cluster import SimulatedNode
from mettle.runs.simulation.histories import LASTING, History, InjectedFault, live_through
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

DAILY, NIGHTLY = 144, 4000
CHUNKS = 4
NAMED_WITHIN_S = 30.0
LOCAL_TARGETS = ["trainer", "inference", "orchestrator", "worker-words"]
RAY_TARGETS = [*LOCAL_TARGETS, "trainer-1", "replica-0", "replica-1"]


PLACE_TARGETS = [*RAY_TARGETS, "workers-0", "workers-1"]


def run_config(*, is_ray=False, has_places=False, **orchestrator):
    values = {
        "batch_size": 8, "group_size": 4, "envs": [{"id": "words"}], "eval": {"num_examples": 0},
        "max_empty_batches": 1000, "retry": {"max_failed_groups": 50}, "poll_s": 0.05, **orchestrator,
    }  # fmt: skip
    deployment = {"hub": False, "engine": "ray" if is_ray else "local", "num_trainer_ranks": 2 if is_ray else 1}
    if has_places:
        deployment["ray"] = {"num_worker_places": 2}
    tree = {"max_steps": 3, "orchestrator": values, "deployment": deployment}
    return RunConfig.model_validate({**tree, "inference": {"replicas": 2 if is_ray else 1}})


def nodes(room=2):
    return (SimulatedNode("owner", 3, is_owner=True), SimulatedNode("left", room), SimulatedNode("right", room))


def draw_fault(draw, targets):
    is_ray = targets is not LOCAL_TARGETS
    kind = draw.choice(["frozen", "frozen", "blocked", "killed", "killed", "disk_full", "clock_jump", "suspended",
                        *(["node_lost", "node_lost"] if is_ray else [])])  # fmt: skip
    at = draw.uniform(4.0, 29.0)  # who has not begun to beat is the business of `ready_timeout_s`
    match kind:
        case "frozen":
            target = draw.choice([*targets, "supervisor"])
            for_s = draw.choice([8.0, 40.0, LASTING])
            # Nobody looks after a supervisor: one that is stopped for ever stops its run.
            return InjectedFault(kind, target, at, min(for_s, 90.0) if target == "supervisor" else for_s)
        case "blocked":
            return InjectedFault(kind, draw.choice(["inference", "orchestrator"]), at, draw.choice([5.0, 40.0, 60.0]))
        case "killed":
            return InjectedFault(kind, draw.choice(targets), at)
        case "node_lost":
            return InjectedFault(kind, draw.choice(["left", "right"]), at, draw.choice([30.0, 200.0]))
        case "clock_jump":
            return InjectedFault(kind, "host", at, draw.choice([-86400.0, -600.0, 7200.0]))
    return InjectedFault(kind, "host", at, draw.uniform(10.0, 60.0))


def history(number):
    draw = random.Random(f"supervised history {number}")
    is_ray, has_places = number % 3 == 0, number % 6 == 0
    targets = PLACE_TARGETS if has_places else RAY_TARGETS if is_ray else LOCAL_TARGETS
    max_lag = draw.choice([0, 1, 1, 2])
    config = run_config(
        is_ray=is_ray, has_places=has_places, max_lag=max_lag, max_staleness=max_lag + draw.choice([0, 1, 2])
    )
    world = SimulatedWorld(
        seed=number,
        pace_seed=number,
        rollout_s=draw.choice([0.5, 2.0]),
        train_s=draw.choice([0.5, 3.0]),
        update_s=draw.choice([0.05, 1.0]),
        error_rate=draw.choice([0.0, 0.1]),
        equal_rate=draw.choice([0.0, 0.3]),
        limit_s=5000.0,
    )
    faults = tuple(draw_fault(draw, targets) for _ in range(draw.choice([1, 1, 2])))
    return History(config, world, faults, nodes(3 if has_places else 2) if is_ray else ())


def lived(number):
    """Live through a history and check it; returns what happened in it."""
    told = history(number)
    with tempfile.TemporaryDirectory() as folder:
        found = live_through(told, Path(folder))
        assert found.crashes == [], number
        assert found.left_behind == [], number
        ledger = Ledger(RunDir(Path(folder)).ledger)
        simulated = SimpleNamespace(trainer=SimpleNamespace(batches=found.batches))
        check_accounts(told.config.orchestrator, simulated, ledger)
        check_batches(told.config.orchestrator, simulated)
        ledger.close()
    check_endings(told, found)
    check_blame(told, found)
    return Counter(
        {
            "histories": 1,
            "named": len({one.process for one in found.told if one.kind == "stall"}),
            "ended for standing still": sum(one.kind == "recovery" for one in found.told),
            "started again": sum(one.kind == "restart" for one in found.told),
            "resumed by a person": len(found.endings) - 1,
            **Counter(f"{one.fault.kind} {one.process.partition('-1')[0]}" for one in found.struck),
        }
    )


def check_endings(told, found):
    """A run ends at its end, or with a sentence; only a full disk or a cluster without room makes a person act."""
    *before, (_, last) = found.endings
    assert last is None
    for _, reason in before:
        assert reason
        is_expected = "no space" in reason or "no room" in reason or "has had room" in reason
        assert is_expected, (told.faults, reason)


def check_blame(told, found):
    struck = [one for one in found.struck if one.fault.kind in ("frozen", "blocked")]
    guilty = {one.process for one in struck}
    for one in found.told:
        if one.kind in ("stall", "recovery"):
            assert one.process in guilty, (told.faults, one)
    quiet = [one for one in found.struck if one.fault.kind == "suspended" or one.process == "supervisor"]
    for one in struck:
        end = min(one.at + one.fault.for_s, found.ended_at.get(one.pid, LASTING), found.endings[-1][0])
        is_watched = all(other.at + other.fault.for_s < one.at or other.at > end for other in quiet)
        is_watched &= not any(one.at <= at <= end for at, _ in found.endings[:-1])
        if one.process == "supervisor" or end - one.at < NAMED_WITHIN_S or not is_watched:
            continue
        at = [t.at for t in found.told if t.kind == "stall" and t.process == one.process and t.at > one.at]
        assert at, (told.faults, one, "was never named")
        assert min(at) - one.at <= NAMED_WITHIN_S, (told.faults, one, at)


def test_a_history_without_an_end_is_an_error_and_no_hang():
    world = SimulatedWorld(limit_s=60.0)
    stopped = History(run_config(), world, (InjectedFault("frozen", "supervisor", 3.0),))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Deadlock, match="not finished after 60 s"):
        live_through(stopped, Path(folder))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_gross_of_histories_a_day_keep_every_promise(chunk):
    total = Counter()
    for number in range(chunk, DAILY, CHUNKS):
        total += lived(number)
    assert total["started again"]
    assert total["named"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(40))
def test_four_thousand_histories_a_night_keep_every_promise(chunk):
    total = Counter()
    for number in range(DAILY + chunk, NIGHTLY, 40):
        total += lived(number)
    assert total["ended for standing still"]
