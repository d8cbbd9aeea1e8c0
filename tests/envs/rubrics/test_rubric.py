"""Rewards: what a function is given, how scores add up, and what is no score."""

from __future__ import annotations

import asyncio
import gc
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mettle.envs as vf
from mettle.envs.state import new_state
from mettle.errors import JudgeError


def state_of(answer="a", completion="a", **row):
    state = new_state({"question": "q", "prompt": [], "answer": answer, **row}, None, "m", {}, [])
    state["completion"] = [vf.AssistantMessage(content=completion)]
    return state


async def test_functions_get_what_they_name():
    seen = {}

    def wants(prompt, completion, answer, state, info, task, parser, judge, difficulty):
        seen.update(locals())
        return True

    async def everything(**kwargs):
        seen["kwargs"] = sorted(kwargs)
        return 0.5

    rubric = vf.Rubric([wants, everything], [1.0, 2.0])
    rubric.add_class_object("judge", "J")
    state = state_of(difficulty=3, info='{"x": 1}')
    await rubric.score_rollout(state)
    assert (seen["judge"], seen["difficulty"], seen["info"], seen["answer"]) == ("J", 3, {"x": 1}, "a")
    assert {"difficulty", "judge", "state", "question"} <= set(seen["kwargs"])
    assert (state["reward"], state["metrics"]) == (2.0, {"wants": 1.0, "everything": 0.5})


def raises(**_):
    raise ZeroDivisionError("oh")


async def raises_later(**_):
    raise ZeroDivisionError("oh")


def asks_for_what_is_not_there(completion, colour):
    return 1.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raises, "raises: ZeroDivisionError: oh"),
        (raises_later, "raises_later: ZeroDivisionError: oh"),
        (asks_for_what_is_not_there, "colour"),
        (lambda **_: "good", "'good', which is no number"),
        (lambda **_: None, "NoneType"),
        (lambda **_: math.nan, "no finite number"),
        (lambda **_: math.inf, "no finite number"),
        (lambda **_: [1.0], "no number"),
    ],
)
async def test_what_is_no_score_leaves_the_rollout_without_a_reward(function, says):
    fine = lambda completion: 1.0  # noqa: E731
    fine.__name__ = "fine"
    state, sibling = state_of(), state_of()
    await vf.Rubric([fine, function]).score_group([state])
    assert isinstance(state["error"], JudgeError)
    assert says in str(state["error"])
    assert (state["reward"], state["advantage"], state["metrics"]) == (None, None, {"fine": 1.0})
    await vf.Rubric([fine, function], [1.0, 0.0]).score_group([sibling])
    assert (sibling["reward"], sibling["error"], sibling["metrics"]) == (1.0, None, {"fine": 1.0})


async def test_a_failed_rollout_is_not_scored_and_does_not_shift_its_siblings():
    calls = []

    def seen(state):
        calls.append(state["answer"])
        return float(len(calls))

    states = [state_of("a"), state_of("b"), state_of("c")]
    states[1]["error"] = vf.ModelError("down")
    await vf.Rubric([seen]).score_group(states)
    assert calls == ["a", "c"]
    assert [state["reward"] for state in states] == [1.0, None, 2.0]
    assert [state["advantage"] for state in states] == [-0.5, None, 0.5]


async def test_group_functions_are_known_by_parameter_or_return_type():
    def by_name(completions, answers):
        return [
            float(completion[-1]["content"] == answer) for completion, answer in zip(completions, answers, strict=True)
        ]

    async def by_type(state) -> list[float]:
        return [1.0]

    rubric = vf.Rubric([by_name, by_type], [1.0, 0.0])
    assert rubric.has_group_funcs()
    assert not vf.Rubric([raises]).has_group_funcs()
    states = [state_of("a", "a"), state_of("a", "b")]
    await vf.Rubric([by_name]).score_group(states)
    assert [state["reward"] for state in states] == [1.0, 0.0]
    lone = state_of("a", "a")
    await vf.Rubric([by_name]).score_rollout(lone)
    assert lone["reward"] == 1.0


@pytest.mark.parametrize("value", [[1.0], "xy", None])
async def test_a_group_function_that_does_not_score_everybody_scores_nobody(value):
    def group(states):
        return value

    states = [state_of(), state_of(), state_of()]
    await vf.Rubric([group]).score_group(states)
    assert all(state["reward"] is None and isinstance(state["error"], JudgeError) for state in states)


async def test_rubrics_in_a_group_add_up():
    def one(completion):
        return 1.0

    def shared(completion):
        return 0.25

    group = vf.RubricGroup([vf.Rubric([one, shared]), vf.Rubric([shared], [2.0])])
    group.add_metric(lambda completion: 7.0)
    states = [state_of(), state_of()]
    states[0]["trajectory"] = [vf.TrajectoryStep(reward=None, advantage=None)]
    await group.score_group(states)
    assert states[0]["reward"] == 1.75
    assert states[0]["metrics"] == {"one": 1.0, "shared": 0.5, "<lambda>": 7.0}
    assert states[0]["trajectory"][0] == {"reward": 1.75, "advantage": 0.0, "has_own_reward": False}
    assert group.get_reward_func_names() == ["one", "shared", "<lambda>", "shared"]
    with pytest.raises(ValueError, match="at least one"):
        vf.RubricGroup([])


async def test_one_failing_rubric_leaves_the_whole_group_of_rubrics_without_a_reward():
    group = vf.RubricGroup([vf.Rubric([lambda completion: 1.0]), vf.Rubric([raises])])
    state = state_of()
    await group.score_rollout(state)
    assert state["reward"] is None
    assert state["metrics"] == {"<lambda>": 1.0}


def test_weights_must_match_functions():
    with pytest.raises(ValueError, match="2 functions and 1 weights"):
        vf.Rubric([raises, raises], [1.0])


scores = st.one_of(st.floats(-5, 5), st.just(math.nan), st.just("x"), st.booleans())


@given(st.lists(scores, min_size=1, max_size=8), st.floats(-2, 2))
def test_advantages_sum_to_zero_over_exactly_the_rollouts_with_a_number(values, weight):
    import asyncio

    states = [state_of(score=value) for value in values]

    def given_score(score):
        return score

    asyncio.run(vf.Rubric([given_score], [weight or 1.0]).score_group(states))
    for state, value in zip(states, values, strict=True):
        is_number = not isinstance(value, str) and math.isfinite(value)
        assert (state["reward"] is not None) == is_number == (state["error"] is None)
    advantages = [state["advantage"] for state in states if state["advantage"] is not None]
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-9)


def test_each_function_has_a_name_of_its_own_even_the_third_of_one():
    def same(completion):
        return 1.0

    def same_2(completion):
        return 1.0

    assert vf.Rubric([same, same_2, same, same]).get_reward_func_names() == ["same", "same_2", "same_3", "same_4"]


def test_what_is_added_and_set_is_what_is_got():
    rubric = vf.Rubric(parser=vf.XMLParser(["answer"]), flavour="sour")
    assert rubric.flavour == "sour"
    assert rubric.class_objects == {"parser": rubric.parser}
    rubric.add_reward_func(raises)
    rubric.add_reward_func(raises_later, 0.5)
    rubric.add_metric(asks_for_what_is_not_there)
    assert rubric.get_reward_funcs() == rubric.reward_funcs == [raises, raises_later, asks_for_what_is_not_there]
    assert rubric.get_reward_weights() == rubric.reward_weights == [1.0, 0.5, 0.0]
    rubric.reward_funcs, rubric.reward_weights = (raises,), (2.0,)
    assert (rubric.funcs, rubric.weights) == ([raises], [2.0])
    assert list(rubric.func_stats()) == ["raises"]
    assert isinstance(vf.Rubric().parser, vf.Parser)
    assert not vf.Rubric().parallelize_scoring
    assert vf.Rubric().func_timeout_seconds == 1800.0


@pytest.mark.parametrize("side_by_side", [False, True])
async def test_functions_run_in_turn_unless_they_are_asked_to_run_side_by_side(side_by_side):
    running, most = 0, 0

    async def one(completion):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    async def two(completion):
        return await one(completion)

    states = [state_of(), state_of()]
    await vf.Rubric([one, two], parallelize_scoring=side_by_side).score_group(states)
    assert [state["reward"] for state in states] == [2.0, 2.0]
    assert most == (4 if side_by_side else 2)


async def test_the_first_failure_that_counts_is_the_error_and_all_are_noted():
    states = [state_of(), state_of()]
    await vf.Rubric([raises, raises_later, asks_for_what_is_not_there], [0.0, 1.0, 1.0]).score_group(states)
    for state in states:
        assert str(state["error"]).startswith("raises_later")
        assert list(state["reward_errors"]) == ["raises", "raises_later", "asks_for_what_is_not_there"]


async def test_a_negative_weight_takes_away():
    state = state_of()
    await vf.Rubric([lambda completion: 1.0, lambda completion: 0.25], [1.0, -2.0]).score_group([state])
    assert state["reward"] == 0.5


async def test_a_metric_of_a_rollout_that_failed_before_is_kept():
    state = state_of()
    state["error"], state["metrics"] = vf.ModelError("down"), {"turns": 2.0}
    await vf.Rubric([raises]).score_group([state])
    assert (state["reward"], state["metrics"]) == (None, {"turns": 2.0})


async def test_some_wait_and_some_do_not_and_each_rollout_gets_its_own():
    async def waits():
        await asyncio.sleep(0)
        return 0.5

    def mixed(answer):
        return waits() if answer == "later" else 1.0

    for answers in (["later", "now", "later"], ["now", "later"], ["now", "now"]):
        states = [state_of(answer) for answer in answers]
        await vf.Rubric([mixed]).score_group(states)
        assert [state["reward"] for state in states] == [0.5 if answer == "later" else 1.0 for answer in answers]


async def test_a_group_function_gets_every_column_of_the_group():
    seen = {}

    def group(prompts, completions, answers, states, tasks, infos, judge):
        seen.update(locals())
        return [1.0] * len(states)

    rubric = vf.Rubric([group])
    rubric.add_class_object("judge", "J")
    states = [state_of("a", "x", info='{"n": 1}'), state_of("b", "y")]
    await rubric.score_group(states)
    assert (seen["answers"], seen["judge"]) == (["a", "b"], "J")
    assert seen["infos"][0] == {"n": 1}
    assert [completion[0]["content"] for completion in seen["completions"]] == ["x", "y"]
    assert [len(seen[name]) for name in ("prompts", "states", "tasks")] == [2, 2, 2]


async def test_marked_methods_are_called_with_what_they_name():
    called = []

    class Marked(vf.Rubric):
        @vf.cleanup
        async def after(self, state, task):
            called.append((state["answer"], task))

        @vf.teardown
        async def at_the_end(self):
            called.append("end")

    rubric, state = Marked(), state_of("b")
    await rubric.cleanup(state)
    await rubric.teardown()
    assert called == [("b", state.get("task")), "end"]


def test_weights_may_be_left_out_and_are_one_each():
    assert vf.Rubric([raises, raises_later]).weights == [1.0, 1.0]
    with pytest.raises(ValueError, match="1 functions and 2 weights"):
        vf.Rubric([raises], [1.0, 1.0])


async def test_scoring_that_is_cancelled_leaves_no_function_half_made(recwarn):
    async def hangs(state):
        await asyncio.Event().wait()

    scoring = asyncio.ensure_future(vf.Rubric(funcs=[hangs, hangs]).score_rollout(state_of()))
    await asyncio.sleep(0)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    del scoring
    gc.collect()
    assert [str(one.message) for one in recwarn] == []
