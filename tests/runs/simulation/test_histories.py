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
SERVICES = ["sandboxes-0", "sandboxes-1"]


def run_config(*, is_ray=False, has_places=False, num_services=0, wait_for_room_s=600.0, **orchestrator):
    values = {
        "batch_size": 8, "group_size": 4, "envs": [{"id": "words"}], "eval": {"num_examples": 0},
        "max_empty_batches": 1000, "retry": {"max_failed_groups": 50}, "poll_s": 0.05, **orchestrator,
    }  # fmt: skip
    deployment = {"hub": False, "engine": "ray" if is_ray else "local", "num_trainer_ranks": 2 if is_ray else 1}
    if is_ray:
        ray = {"num_worker_places": 2 if has_places else 0, "num_sandbox_services": num_services}
        deployment["ray"] = {**ray, "wait_for_room_s": wait_for_room_s}
    tree = {"max_steps": 3, "orchestrator": values, "deployment": deployment}
    return RunConfig.model_validate({**tree, "inference": {"replicas": 2 if is_ray else 1}})


def nodes(room=2, *, has_spare=False):
    spare = (SimulatedNode("spare", room, is_there=False),) if has_spare else ()
    return (SimulatedNode("owner", 3, is_owner=True), SimulatedNode("left", room), SimulatedNode("right", room), *spare)


def draw_fault(draw, targets):
    is_ray = "replica-0" in targets
    kind = draw.choice(["frozen", "frozen", "blocked", "killed", "killed", "disk_full", "clock_jump", "suspended",
                        *(["node_lost", "node_lost"] if is_ray else [])])  # fmt: skip
    # Who has not begun to beat is the business of `ready_timeout_s`; the server in front of engines begins last.
    at = draw.uniform(6.5 if is_ray else 4.0, 29.0)
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
    placed = {"is_ray": is_ray, "has_places": has_places}
    cluster = nodes(3 if has_places else 2) if is_ray else ()
    joins = ()
    if number % 12 in (0, 3):
        num_services = draw.choice([1, 2, 2])
        targets = [*targets, *SERVICES[:num_services] * 3]
        placed |= {"num_services": num_services, "wait_for_room_s": draw.choice([60.0, 600.0])}
        has_spare = draw.random() < 0.3
        cluster = nodes((4 if has_places else 2) + draw.choice([0, 1]), has_spare=has_spare)
        joins = (InjectedFault("node_joins", "spare", draw.uniform(10.0, 100.0)),) if has_spare else ()
    config = run_config(**placed, max_lag=max_lag, max_staleness=max_lag + draw.choice([0, 1, 2]))
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
    return History(config, world, (*faults, *joins), cluster)


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
        errors = check_attribution(ledger)
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
            "sandbox errors": errors["sandbox"],
            "services used again": len(used_again(found)),
            **Counter(f"{one.fault.kind} {one.process.partition('-1')[0]}" for one in found.struck),
        }
    )


def check_attribution(ledger):
    """Whatever failed is laid at the boundary that it crossed; returns how many rollouts failed at each."""
    rows = ledger.database.rows("SELECT error_kind, error FROM rollouts WHERE error_kind IS NOT NULL")
    own = {row["error"].split(":")[0] for row in rows if row["error_kind"] == "environment"}
    assert own <= {"the tool broke", "RuntimeError"}, own
    assert all("the worker died" in row["error"] for row in rows if row["error"].startswith("RuntimeError"))
    return Counter(row["error_kind"] for row in rows)


def used_again(found):
    """The sandbox services in whose machines something was run after they had come back."""
    names = [name for name, _, _ in found.sandboxes]
    return {name for at, (name, _, used) in enumerate(found.sandboxes) if used and name in names[:at]}


def check_endings(told, found):
    """A run ends at its end, or with a sentence; only a full disk or a cluster without room makes a person act."""
    *before, (_, last) = found.endings
    assert last is None
    for _, reason in before:
        assert reason
        is_expected = "no space" in reason or "no room" in reason or "has had room" in reason
        assert "\n" not in reason
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


def of_sandboxes(num_services, *faults, room=2, has_spare=False, **placed):
    """A run of six groups whose rollouts each have a sandbox on a cluster, and what came of it."""
    config = run_config(is_ray=True, num_services=num_services, **placed)
    world = SimulatedWorld(rollout_s=2.0, train_s=3.0, limit_s=5000.0)
    told = History(config, world, faults, nodes(room, has_spare=has_spare))
    with tempfile.TemporaryDirectory() as folder:
        found = live_through(told, Path(folder))
        ledger = Ledger(RunDir(Path(folder)).ledger)
        check_accounts(config.orchestrator, SimpleNamespace(trainer=SimpleNamespace(batches=found.batches)), ledger)
        errors, counts = check_attribution(ledger), ledger.task_counts()
        losses = [event.message for event in ledger.journal.events() if event.kind == "services_lost"]
        ledger.close()
    assert found.crashes == found.left_behind == []
    assert len(losses) <= 1
    assert all("none of its tasks is charged: " in loss for loss in losses)
    counts["losses"] = len(losses)
    return found, errors, +Counter(counts)


def stalls(found):
    return {one.process for one in found.told if one.kind in ("stall", "recovery")}


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_rollouts_with_a_sandbox_at_a_service_that_is_lost_are_run_again_at_the_other(kind):
    found, errors, counts = of_sandboxes(2, InjectedFault(kind, "sandboxes-0", 7.5))
    assert errors["sandbox"] > 0
    assert set(counts) == {"trained"}
    assert found.endings[-1][1] is None
    assert len(found.endings) == 1
    assert stalls(found) == ({"sandboxes-0"} if kind == "frozen" else set())
    assert [used > 0 for name, _, used in found.sandboxes if name == "sandboxes-1"] == [True]


def test_the_only_service_is_named_when_it_freezes_and_ended_and_used_again():
    found, _, _ = of_sandboxes(1, InjectedFault("frozen", "sandboxes-0", 7.5))
    assert stalls(found) == {"sandboxes-0"}
    (named, ended) = [one.at for one in found.told if one.kind in ("stall", "recovery")]
    assert named - 7.5 <= 11.0
    assert 119.0 <= ended - 7.5 <= 122.0
    assert used_again(found) == {"sandboxes-0"}
    assert [reason for _, reason in found.endings] == [None]


def test_every_service_may_be_killed_at_once():
    found, errors, counts = of_sandboxes(2, *(InjectedFault("killed", name, 7.5) for name in SERVICES))
    assert errors["sandbox"] > 0
    assert set(counts) == {"trained"}
    assert [reason for _, reason in found.endings] == [None]
    assert used_again(found)
    assert stalls(found) == set()


def test_no_task_is_dropped_for_services_that_are_gone_for_longer_than_all_its_attempts_take():
    found, _, counts = of_sandboxes(2, *(InjectedFault("frozen", name, 7.5) for name in SERVICES))
    assert set(counts) == {"trained", "losses"}
    assert [reason for _, reason in found.endings] == [None]
    assert used_again(found)


def test_a_service_whose_node_is_lost_comes_back_on_one_that_joins():
    """What is left has room for the engine that was lost with it, and for no more."""
    faults = InjectedFault("node_lost", "right", 7.5, 1000.0), InjectedFault("node_joins", "spare", 30.0)
    found, _, _ = of_sandboxes(1, *faults, has_spare=True)
    assert [(name, node) for name, node, _ in found.sandboxes] == [("sandboxes-0", "right"), ("sandboxes-0", "spare")]
    assert used_again(found) == {"sandboxes-0"}
    assert [reason for _, reason in found.endings] == [None]
    assert stalls(found) == set()


def test_a_run_whose_last_service_finds_no_room_ends_in_one_line_and_goes_on_when_there_is_some():
    found, _, _ = of_sandboxes(1, InjectedFault("node_lost", "right", 7.5, 200.0), wait_for_room_s=60.0)
    why = "no node of the Ray cluster has had room for sandboxes-0 (1 CPU) for 60 s; add one and resume"
    first, *others, last = [reason for _, reason in found.endings]
    assert (first, last) == (why, None)
    assert all("has no room for sandboxes-0" in reason for reason in others)  # who resumes it was too early
    assert [node for _, node, _ in found.sandboxes] == ["right", "right"]
    assert used_again(found) == {"sandboxes-0"}
    assert stalls(found) == set()


def test_with_another_service_there_one_waits_for_room_as_long_as_it_takes():
    found, _, counts = of_sandboxes(2, InjectedFault("node_lost", "right", 7.5, 1000.0), wait_for_room_s=5.0)
    assert [reason for _, reason in found.endings] == [None]
    assert len(found.sandboxes) == 2
    assert any("waits for a node with room for sandboxes-" in one.text for one in found.told)
    assert set(counts) == {"trained"}


def test_a_history_is_a_function_of_its_number():
    """One with sandboxes, over which clients and services decide by chance, and by the clock."""
    found = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            found.append(live_through(history(27), Path(folder)))
    assert found[0].told == found[1].told
    assert found[0].duration_s == found[1].duration_s
    assert found[0].sandboxes == found[1].sandboxes != []


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
