"""Histories of runs whose rollouts are scored by a judge model, and by tests in sandboxes, each a function of its number.

Of every one is promised what is of the others (`test_histories.py`), and: a rollout has the reward that its judges give
it or none, and without one it trains nothing; a judge that does not answer is named, and nobody in its place; tasks are
not drawn without end for it; the run goes on, or ends in a line that says what failed.
"""

import random
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.orchestrator.journeys.test_simulation import check_accounts, check_batches, ledger_blocks
from tests.runs.simulation.test_histories import LOCAL_TARGETS, RAY_TARGETS, draw_fault, nodes, run_config

from mettle.orchestrator.simulator import SimulatedWorld
from mettle.runs.simulation.histories import History, InjectedFault, live_through
from mettle.runs.simulation.judging import JUDGE, URL, JudgeHabits, reward_of
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import read_group

DAILY, NIGHTLY = 5, 1000
NAME = f"judge {JUDGE} at {URL}"
MAX_FAILED_GROUPS = 8
NAMED_WITHIN_S = 60.0
"""Of a judge: it has to be asked first, and to take longer than five times what it ever took."""


def config(**values):
    ray = {name: values.pop(name) for name in ("is_ray", "num_services") if name in values}
    retry = {"max_failed_groups": MAX_FAILED_GROUPS}
    return run_config(**ray, **{"retry": retry, "max_empty_batches": 10, "rollout_timeout_s": 60.0, **values})


def history(number):
    draw = random.Random(f"judged history {number}")
    is_ray = number % 6 == 0
    max_lag = draw.choice([0, 1, 1, 2])
    placed = {"is_ray": True, "num_services": draw.choice([1, 2])} if is_ray else {}
    options = config(**placed, max_lag=max_lag, max_staleness=max_lag + draw.choice([0, 1]))
    world = SimulatedWorld(
        seed=number,
        pace_seed=number,
        rollout_s=draw.choice([0.5, 2.0]),
        train_s=draw.choice([0.5, 3.0]),
        update_s=draw.choice([0.05, 1.0]),
        equal_rate=draw.choice([0.0, 0.0, 0.2]),
        limit_s=9000.0,
    )
    habits = JudgeHabits(
        answer_s=draw.choice([0.2, 1.0, 4.0]),
        refusal_rate=draw.choice([0.0, 0.0, 0.3]),
        nonsense_rate=draw.choice([0.0, 0.0, 0.15]),
        silence_rate=draw.choice([0.0, 0.0, 0.0, 0.05]),
        is_asked_of_groups=draw.random() < 0.25,
    )
    kind = draw.choice(["frozen", "frozen", "killed", "refusing", "babbling", None])
    faults = []
    if kind is not None:
        faults.append(InjectedFault(kind, JUDGE, draw.uniform(4.0, 20.0), draw.choice([3.0, 20.0, 100.0])))
    if draw.random() < 0.4:
        faults.append(draw_fault(draw, RAY_TARGETS if is_ray else LOCAL_TARGETS))
    return History(options, world, tuple(faults), nodes(3) if is_ray else (), judge=habits)


def lived(told):
    """Live through a history and check it; returns what came of it, and what happened in it."""
    with tempfile.TemporaryDirectory() as folder:
        found = live_through(told, Path(folder))
        assert found.crashes == []
        assert found.left_behind == []
        ledger = Ledger(RunDir(Path(folder)).ledger)
        simulated = SimpleNamespace(trainer=SimpleNamespace(batches=found.batches))
        check_accounts(told.config.orchestrator, simulated, ledger)
        check_batches(told.config.orchestrator, simulated)
        happened = check_rewards(told, found, ledger, Path(folder))
        check_attribution(ledger, found)
        check_draws(told, found, ledger)
        happened["tried again"] = ledger.database.value("SELECT sum(attempts > 1) FROM tasks")
        happened["cut short"] = sum(value for _, value in ledger.journal.metric("staleness/cut_short"))
        ledger.close()
    check_endings(told, found)
    check_blame(told, found)
    happened["judge named"] = sum(one.kind == "stall" and one.process == NAME for one in found.told)
    happened["judge heard of again"] = sum(one.kind == "recovered" and one.process == NAME for one in found.told)
    happened["ended by its judge"] = sum("judge" in (reason or "") for _, reason in found.endings)
    return found, happened


def check_rewards(told, found, ledger, folder):
    """Each rollout has what its judges say of it, or nothing; what has nothing is in no batch."""
    has_tests = bool(told.config.deployment.ray.num_sandbox_services)
    happened, scored = Counter(), {}
    for draw_id, ref in ledger_blocks(ledger):
        group = read_group(folder / "rollouts", ref)
        for rollout in group.rollouts:
            assert (rollout.reward is None) == (rollout.error_kind is not None), rollout.rollout_id
            if rollout.reward is None:
                assert rollout.credit is None
                happened[f"failed by {rollout.error_kind}"] += 1
                continue
            expected = reward_of(rollout.messages[-1]["content"], has_tests=has_tests)
            assert rollout.reward == pytest.approx(expected, abs=1e-6)
        scored[draw_id] = len(group.rewards)
        has_gap = 0 < len(group.rewards) < len(group.rollouts)
        happened["groups with a gap"] += has_gap
        happened["trained with a gap"] += has_gap and any(draw_id in b.draw_ids for b in found.batches.values())
    for batch in found.batches.values():
        tokens = Counter(batch.token_ids[batch.loss_mask].tolist())
        assert all(tokens[draw_id] <= 4 * scored[draw_id] for draw_id in batch.draw_ids)
    return happened


def check_attribution(ledger, found):
    """What a judge has failed at is laid at it, and nothing at the model that was sampled but what that has done. No group
    runs into its limit for a judge: only an engine or a worker that stands still can cost that."""
    for row in ledger.database.rows("SELECT error_kind, error FROM rollouts WHERE error_kind IS NOT NULL"):
        kind, text = row["error_kind"], row["error"]
        is_judge = text.startswith(("verdict", "compared")) or JUDGE in text
        assert (kind == "judge") == is_judge, (kind, text)
        if kind == "environment":
            assert "the worker died" in text
    if all(one.process == JUDGE for one in found.struck):
        assert "timeout" not in {row["error_kind"] for row in ledger.database.rows("SELECT error_kind FROM rollouts")}


def check_draws(told, found, ledger):
    """Not many more tasks are given up than it takes to find out that all of them fail."""
    num_failed = ledger.task_counts().get("dropped:errors", 0)
    is_by_luck = told.judge.nonsense_rate or told.judge.silence_rate or told.judge.refusal_rate
    most = (MAX_FAILED_GROUPS + 2) * len(found.endings) + (30 if is_by_luck else 0)
    assert num_failed <= most, (num_failed, found.endings)


def check_endings(told, found):
    *before, (_, last) = found.endings
    assert last is None
    for _, reason in before:
        assert reason
        assert "\n" not in reason
        is_judges = "groups in a row; the first error was " in reason or "look at the errors of the rollouts" in reason
        is_expected = "no space" in reason or "no room" in reason or "has had room" in reason
        assert is_judges or is_expected, (told.faults, reason)


def check_blame(told, found):
    """Who stands still is named, a judge that answers nobody too, and nobody else is or is ended."""
    struck = found.struck
    guilty = {one.process for one in struck if one.fault.kind in ("frozen", "blocked") and one.process != JUDGE}
    silenced = [one for one in struck if one.process == JUDGE]
    if silenced or told.judge.silence_rate or told.judge.refusal_rate or told.judge.nonsense_rate:
        guilty.add(NAME)
    for one in found.told:
        if one.kind in ("stall", "recovery"):
            assert one.process in guilty, (told.faults, one)
            assert one.kind == "stall" or one.process != NAME
    for one in silenced:
        is_alone = len(told.faults) == 1 and len(found.endings) == 1
        if is_alone and one.fault.kind == "frozen" and one.fault.for_s >= 100.0 and found.duration_s > one.at + 100.0:
            at = [t.at for t in found.told if t.kind == "stall" and t.process == NAME and t.at > one.at]
            assert at, (told.faults, "the judge was never named")
            assert min(at) - one.at <= NAMED_WITHIN_S, (told.faults, at)


def story(*faults, habits=None, world=None, **values):
    """A run of six groups whose rollouts are judged, and what came of it."""
    world = world or SimulatedWorld(rollout_s=2.0, train_s=1.0, limit_s=9000.0)
    cluster = nodes(3) if values.get("is_ray") else ()
    return lived(History(config(**values), world, faults, cluster, judge=habits or JudgeHabits()))


def told_of(found):
    return [(one.kind, one.process) for one in found.told if one.kind in ("stall", "recovery", "recovered")]


def test_a_judge_that_freezes_for_a_while_is_named_and_waited_for():
    found, happened = story(InjectedFault("frozen", JUDGE, 6.0, 30.0))
    assert told_of(found) == [("stall", NAME), ("recovered", NAME)]
    (stall,) = [one for one in found.told if one.kind == "stall"]
    assert stall.text.startswith(f"{NAME} has not answered for 2")
    assert happened["failed by judge"] == 0


def test_a_judge_that_says_nothing_about_some_rollouts_takes_them_and_not_their_groups():
    found, happened = story(habits=JudgeHabits(silence_rate=0.1), rollout_timeout_s=30.0)
    assert happened["failed by judge"] >= happened["groups with a gap"] >= happened["trained with a gap"] > 0
    assert {process for _, process in told_of(found)} <= {NAME}
    assert found.duration_s < 200.0


@pytest.mark.parametrize("is_asked_of_groups", [False, True])
def test_a_run_whose_judge_is_away_ends_in_a_line_that_names_it_and_goes_on_when_it_is_back(is_asked_of_groups):
    habits = JudgeHabits(is_asked_of_groups=is_asked_of_groups)
    found, _ = story(InjectedFault("killed", JUDGE, 6.0, 200.0), habits=habits)
    (_, reason), (_, last) = found.endings
    assert "failed every rollout of 8 groups in a row; the first error was judge: " in reason
    assert f"POST {URL}/chat/completions" in reason
    assert last is None


def test_an_answer_that_comes_after_its_group_was_cut_short_changes_nothing():
    """Some of the groups wait for the judge when the batch that they would be too stale for has been shipped."""
    world = SimulatedWorld(rollout_s=0.5, train_s=0.1, update_s=0.05, limit_s=9000.0)
    _, happened = story(
        habits=JudgeHabits(answer_s=4.0), world=world, max_lag=1, max_staleness=1, max_inflight_groups=6
    )
    assert happened["cut short"] > 0
    assert happened["failed by judge"] == 0


@pytest.mark.parametrize("kind", ["killed", "frozen"])
def test_code_is_judged_at_the_other_service_when_one_is_lost(kind):
    found, happened = story(InjectedFault(kind, "sandboxes-0", 7.5), is_ray=True, num_services=2)
    assert [reason for _, reason in found.endings] == [None]
    assert sum(used for _, _, used in found.sandboxes) >= 24
    assert happened["failed by judge"] == 0
    assert {process for _, process in told_of(found)} == ({"sandboxes-0"} if kind == "frozen" else set())


def test_code_that_no_service_judges_has_no_reward_of_0():
    """Its only service freezes, and is ended after 120 s; groups are given up for it before, and tried again."""
    fault = InjectedFault("frozen", "sandboxes-0", 7.5)
    found, happened = story(fault, is_ray=True, num_services=1, rollout_timeout_s=600.0)
    assert happened["tried again"] > 0
    assert [reason for _, reason in found.endings] == [None]


def test_a_judged_history_is_a_function_of_its_number():
    """One with judges of both kinds."""
    found = [lived(history(6))[0] for _ in range(2)]
    assert found[0].told == found[1].told
    assert found[0].duration_s == found[1].duration_s
    assert found[0].sandboxes == found[1].sandboxes != []


def test_five_judged_histories_a_day_keep_every_promise():
    total = Counter()
    for number in range(DAILY):
        total += lived(history(number))[1]
    assert total["failed by judge"]
    assert total["judge named"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(20))
def test_a_thousand_judged_histories_a_night_keep_every_promise(chunk):
    total = Counter()
    for number in range(DAILY + chunk, NIGHTLY, 20):
        total += lived(history(number))[1]
    assert min(total[what] for what in ("groups with a gap", "trained with a gap", "judge named")) > 0
