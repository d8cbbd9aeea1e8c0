"""Properties of reward arithmetic, over any mixture of scores, failures, weights and rubrics; and scoring in the time that
a group has: what hangs fails by itself, and early enough for the others."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.envs.errors import RolloutTimeout
from mettle.envs.rubrics import scoring
from mettle.envs.rubrics.scoring import limit_s, score_states, scored_by, set_advantages
from mettle.envs.state import new_state
from mettle.errors import JudgeError
from mettle.processes.virtual_time import run_virtually

numbers = st.floats(-1e6, 1e6)
outcomes = st.one_of(numbers, st.booleans(), st.sampled_from([math.nan, math.inf, "0.5", None, "raise"]))
weights = st.floats(-10, 10)


def _state():
    state = new_state({"prompt": [], "answer": ""}, None, "m", {}, [])
    state["completion"] = []
    state["trajectory"] = [
        vf.TrajectoryStep(reward=None, advantage=None),
        vf.TrajectoryStep(reward=0.25, advantage=None),
    ]
    return state


def _function(column):
    """A reward function that gives `column[i]` to the rollout whose `index` is i."""

    async def score(state):
        value = column[state["index"]]
        if value == "raise":
            raise ValueError("raised")
        return value

    return score


def _scored(rubric, num_states):
    states = [_state() for _ in range(num_states)]
    for index, state in enumerate(states):
        state["index"] = index
    asyncio.run(rubric.score_group(states))
    return states


def _is_number(value):
    return value is not None and not isinstance(value, str) and math.isfinite(value)


@st.composite
def tables(draw):
    num_states, num_functions = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    columns = [draw(st.lists(outcomes, min_size=num_states, max_size=num_states)) for _ in range(num_functions)]
    return num_states, columns, [draw(weights) for _ in range(num_functions)]


@given(tables(), st.booleans())
def test_a_reward_is_the_weighted_sum_or_an_error_and_never_anything_else(table, side_by_side):
    num_states, columns, chosen = table
    rubric = vf.Rubric([_function(column) for column in columns], chosen, parallelize_scoring=side_by_side)
    for index, state in enumerate(_scored(rubric, num_states)):
        values = [column[index] for column in columns]
        needed = [value for value, weight in zip(values, chosen, strict=True) if weight != 0]
        assert len(state["metrics"]) == sum(map(_is_number, values))
        assert len(state.get("reward_errors") or {}) == len(values) - len(state["metrics"])
        if all(map(_is_number, needed)):
            expected = sum(w * float(v) for v, w in zip(values, chosen, strict=True) if _is_number(v))
            assert state["reward"] == pytest.approx(expected, abs=1e-6)
            assert state["error"] is None
        else:
            assert state["reward"] is None
            assert isinstance(state["error"], JudgeError)
            assert state["advantage"] is None


@given(tables())
def test_failures_do_not_move_the_baseline_of_their_siblings(table):
    num_states, columns, chosen = table
    rubric = vf.Rubric([_function(column) for column in columns], chosen)
    states = _scored(rubric, num_states)
    alive = [state for state in states if state["reward"] is not None]
    mean = math.fsum(state["reward"] for state in alive) / len(alive) if alive else 0.0
    for state in alive:
        assert state["advantage"] == state["reward"] - mean
        inherited = {"reward": state["reward"], "advantage": state["advantage"], "has_own_reward": False}
        assert state["trajectory"][0] == inherited
        assert state["trajectory"][1]["reward"] == 0.25
    assert math.fsum(state["advantage"] for state in alive) == pytest.approx(0.0, abs=1e-4)


@given(tables(), st.integers(1, 4))
def test_splitting_functions_over_rubrics_changes_no_reward(table, at):
    num_states, columns, chosen = table
    functions = [_function(column) for column in columns]
    whole = _scored(vf.Rubric(functions, chosen), num_states)
    halves = [(functions[:at], chosen[:at]), (functions[at:], chosen[at:])]
    group = vf.RubricGroup([vf.Rubric(part, part_weights) for part, part_weights in halves])
    for one, split in zip(whole, _scored(group, num_states), strict=True):
        if one["reward"] is None:
            assert split["reward"] is None
        else:
            assert split["reward"] == pytest.approx(one["reward"], abs=1e-6)
            assert split["advantage"] == pytest.approx(one["advantage"], abs=1e-5)


@given(st.lists(numbers, min_size=1, max_size=6), st.lists(outcomes, max_size=8))
def test_a_group_function_scores_everybody_or_nobody(completions, returned):
    async def group(states):
        if "raise" in returned:
            raise ValueError("raised")
        return returned

    states = _scored(vf.Rubric([group]), len(completions))
    fits = "raise" not in returned and len(returned) == len(states)
    for index, state in enumerate(states):
        assert (state["reward"] is not None) == (fits and _is_number(returned[index]))


@pytest.mark.parametrize("weight", [math.nan, math.inf, "1", None])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ValueError, match="a weight is a finite number"):
        vf.Rubric([_function([])], [weight])
    with pytest.raises(ValueError, match="a weight is a finite number"):
        vf.Rubric().add_reward_func(_function([]), weight)


def test_a_sum_that_overflows_is_an_error():
    (state,) = _scored(vf.Rubric([_function([1e308]), _function([1e308])], [10.0, 1.0]), 1)
    assert state["reward"] is None
    assert "the weighted sum" in str(state["error"])


def test_a_function_without_a_weight_is_named_as_such():
    rubric = vf.Rubric([_function([1.0])])
    rubric.funcs.append(_function([1.0]))
    with pytest.raises(ValueError, match="2 functions and 1 weights"):
        _scored(rubric, 1)


async def test_scored_independently_a_group_function_says_what_it_sees(caplog):
    def compare(completions):
        return [1.0] * len(completions)

    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric([compare]))
    for _ in range(2):
        state = _state()
        await env.rubric.score_rollout(state)
        assert state["reward"] == 1.0
    assert [record.message for record in caplog.records if "groups of one" in record.message] == [
        "['compare'] compare a group's rollouts; scored independently they see groups of one"
    ]


class Ranked(vf.Rubric):
    """The best of a group gets 1: what a group is worth is said by the class and by no function."""

    async def score_group(self, states, **kwargs):
        best = max(len(state["completion"][-1]["content"]) for state in states)
        for state in states:
            state["reward"] = float(len(state["completion"][-1]["content"]) == best)
            state["metrics"] = {"group": float(len(states))}


class RankedSince018(vf.Rubric):
    async def score_group(self, states, score_sem):
        async with score_sem:
            await Ranked.score_group(self, states)


@pytest.mark.parametrize("kind", [Ranked, RankedSince018])
@pytest.mark.parametrize("make", [vf.SingleTurnEnv, vf.ToolEnv], ids=["alone", "in a rubric group"])
@pytest.mark.parametrize("is_grouped", [False, True])
async def test_a_class_that_says_how_groups_are_scored_is_asked(scripted, make, kind, is_grouped):
    env = make(dataset=[{"question": "q"}], rubric=kind())
    env = vf.EnvGroup([env]) if is_grouped else env
    said = iter(["a", "abc", "ab"])
    assert env.requires_group_rollouts
    results = await env.evaluate(scripted(lambda _: next(said)), "m", rollouts_per_example=3)
    assert sorted(results.reward) == [0.0, 0.0, 1.0]
    assert [row["metrics"]["group"] for row in results.outputs] == [3.0, 3.0, 3.0]
    alone = await env.evaluate(scripted("a"), "m", rollouts_per_example=2, independent_scoring=True)
    assert alone.reward == [1.0, 1.0]
    assert [row["metrics"]["group"] for row in alone.outputs] == [1.0, 1.0]


async def test_a_class_that_scores_rollouts_and_groups_is_asked_for_what_is_scored(scripted):
    class Both(Ranked):
        async def score_rollout(self, state, **kwargs):
            state["reward"], state["metrics"] = 0.25, {}

    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=Both())
    alone = await env.evaluate(scripted("a"), "m", rollouts_per_example=2, independent_scoring=True)
    assert alone.reward == [0.25, 0.25]
    assert (await env.evaluate(scripted("a"), "m", rollouts_per_example=2)).reward == [1.0, 1.0]


async def test_an_environment_without_a_rubric_is_scored_independently_too(scripted):
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}])
    results = await env.evaluate(scripted("a"), "m", rollouts_per_example=2, independent_scoring=True)
    assert results.reward == [0.0, 0.0]


async def test_a_teardown_that_fails_does_not_keep_the_others_from_running():
    done = []

    class Torn(vf.Rubric):
        @vf.teardown(priority=1)
        async def first(self):
            raise OSError("gone")

        @vf.teardown
        def second(self):
            done.append("second")

        @vf.cleanup
        async def after_each(self, state):
            done.append(state["answer"])

    group = vf.RubricGroup([Torn(), Torn()])
    await group.cleanup(_state())
    await group.teardown()
    assert done == ["", "", "second", "second"]


async def nothing(state):
    """A cleanup that has nothing to do."""


def _states(number):
    return [_state() for _ in range(number)]


async def test_without_a_score_a_rollout_that_ended_well_is_worth_nothing_and_one_that_failed_has_no_reward():
    fine, failed = _states(2)
    failed["error"] = vf.ModelError("down")
    await score_states([fine, failed], None, nothing, timeout_s=None)
    assert (fine["reward"], fine["metrics"]) == (0.0, {})
    assert (failed["reward"], failed["metrics"]) == (None, {})


async def test_scoring_is_timed_from_its_start_to_its_end(monkeypatch):
    now = iter([10.0, 15.0, 16.0])
    monkeypatch.setattr(scoring, "steady_time", lambda: next(now))
    states = _states(2)
    await score_states(states, None, nothing, timeout_s=None)
    assert [(state["timing"].scoring.start, state["timing"].scoring.end) for state in states] == [
        (10.0, 15.0),
        (10.0, 16.0),
    ]


async def test_a_score_that_takes_too_long_fails_all_and_says_so():
    states = _states(2)
    states[0]["metrics"] = {"kept": 1.0}

    async def never():
        await asyncio.sleep(1000)

    await score_states(states, never, nothing, timeout_s=0.01)
    assert [type(state["error"]) for state in states] == [RolloutTimeout, RolloutTimeout]
    assert str(states[0]["error"]) == "scoring took longer than 0.01 s"
    assert [(state["reward"], state["advantage"]) for state in states] == [(None, None)] * 2
    assert [state["metrics"] for state in states] == [{"kept": 1.0}, {}]


async def test_a_timeout_of_the_score_itself_is_its_own_failure():
    (state,) = _states(1)

    async def gives_up():
        raise TimeoutError("the judge's own limit")

    await score_states([state], gives_up, nothing, timeout_s=None)
    assert isinstance(state["error"], JudgeError)
    assert not isinstance(state["error"], RolloutTimeout)
    assert "the judge's own limit" in str(state["error"])


async def test_a_score_that_raises_leaves_an_earlier_error_as_it_is():
    first, second = _states(2)
    first["error"] = earlier = vf.ModelError("down")

    async def raises():
        raise KeyError("colour")

    await score_states([first, second], raises, nothing, timeout_s=5.0)
    assert first["error"] is earlier
    assert isinstance(second["error"], JudgeError)
    assert "scoring: KeyError: 'colour'" in str(second["error"])
    assert (first["reward"], second["reward"]) == (None, None)


async def test_a_failed_rollout_has_no_reward_whatever_the_score_gave_it():
    (state,) = _states(1)

    async def generous():
        state["reward"], state["error"] = 1.0, vf.ModelError("down")

    await score_states([state], generous, nothing, timeout_s=None)
    assert state["reward"] is None


async def test_a_cleanup_that_fails_is_noted_and_the_next_one_is_run():
    states, cleaned = _states(2), []

    async def cleanup(state):
        cleaned.append(state)
        if state is states[0]:
            raise OSError("gone")

    await score_states(states, None, cleanup, timeout_s=None)
    assert [state.get("cleanup_error") for state in states] == ["rubric: OSError: gone", None]
    assert len(cleaned) == 2
    assert [state["reward"] for state in states] == [0.0, 0.0]


def test_what_a_step_has_of_its_own_is_kept_and_the_rest_inherited():
    states = [
        {"reward": 1.0, "trajectory": [{"advantage": 9.0, "reward": None}, {"advantage": None, "reward": 3.0}]},
        {"reward": 0.0},
        {"reward": None, "trajectory": [{"advantage": None, "reward": None}]},
    ]
    set_advantages(states)
    assert [state["advantage"] for state in states] == [0.5, -0.5, None]
    inherited = {"advantage": 9.0, "reward": 1.0, "has_own_reward": False}
    assert states[0]["trajectory"] == [inherited, {"advantage": 0.5, "reward": 3.0}]
    assert states[2]["trajectory"] == [{"advantage": None, "reward": None}]


async def on_all_but_one(state):
    """A judge that never answers for one of them."""
    await (asyncio.Event().wait() if state["answer"] == "hangs" else asyncio.sleep(1.0))
    return 1.0


async def afterwards(state):
    await asyncio.sleep(5.0)
    return 0.5


class Said(vf.Client):
    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        await asyncio.sleep(20.0)
        return vf.Response(id="x", created=0, model=model, usage=None, message=vf.ResponseMessage(content="a"))


def scored(*answers, limit=100.0, run="run_group", **options):
    """(seconds that it took, states) of a group; nothing of it may run in a thread, whose time is another."""

    async def play():
        env = vf.SingleTurnEnv(dataset=[{"question": "q", "answer": ""}], **options)
        env.rubric = vf.Rubric(funcs=[on_all_but_one, afterwards])
        env.group_timeout_seconds = limit
        rows = [{"prompt": [vf.UserMessage(content="q")], "answer": answer, "example_id": 0} for answer in answers]
        if run == "run_group":
            states = await env.run_group(rows, Said(), "m")
        else:
            states = [await env.run_rollout(row, Said(), "m") for row in rows]
        return asyncio.get_running_loop().time(), states

    return run_virtually(play())


@pytest.mark.parametrize("run", ["run_group", "run_rollout"])
def test_a_rollout_whose_judge_never_answers_fails_alone_before_its_group_is_ended(run):
    if run == "run_group":
        took_s, states = scored("a", "hangs", "b")
        assert took_s == pytest.approx(97.0)  # 20 s of sampling, .9 of the 80 s that were left, and the other function
        assert [state["reward"] for state in states] == [1.5, None, 1.5]
        assert [state["advantage"] for state in states] == [0.0, None, 0.0]
        states = states[1:2]
    else:
        _, states = scored("hangs", run=run)
    assert [(type(s["error"]), str(s["error"])) for s in states] == [
        (JudgeError, "on_all_but_one: no score within 72.0 s")
    ]


def test_one_that_is_quick_enough_is_not_limited():
    took_s, states = scored("a", "b")
    assert took_s == pytest.approx(26.0)
    assert [state["reward"] for state in states] == [1.5, 1.5]


def test_a_limit_of_its_own_that_is_shorter_goes_first():
    async def play():
        now = asyncio.get_running_loop().time()
        assert (limit_s(7.0), limit_s(None)) == (7.0, None)
        with scored_by(None):
            assert limit_s(None) is None
        with scored_by(now + 100.0):
            assert limit_s(7.0) == 7.0
            assert limit_s(None) == limit_s(1e9) == pytest.approx(90.0)
        with scored_by(now - 5.0):
            assert limit_s(7.0) == 0.0
        assert limit_s(7.0) == 7.0

    run_virtually(play())
