"""How a reward function is run: where, for how long, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import signal
import sys
import threading
import time
import warnings
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import mettle.envs as vf
from mettle.envs.rubrics.function import NUM_TRIED, RewardFunction
from mettle.envs.rubrics.threads import MAX_ABANDONED
from mettle.errors import JudgeError


async def _score(rubric, *states):
    await rubric.score_group(list(states))
    return [state["reward"] for state in states]


def quick(completion):
    return 1.0


def blocks(completion):
    time.sleep(0.02)
    return 1.0


async def _turns_during(work) -> int:
    """How often the loop turned while `work` went on: counted, because time is what a busy machine has none of."""
    num_turns, task = 0, asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    await task
    return num_turns


async def _until_on_the_loop(rubric, name, finished) -> None:
    for _ in range(200):
        await rubric.score_rollout(finished())
        if rubric.func_stats()[name]["runs_in"] == "loop":
            return
    pytest.fail(f"{name} is quick and still runs elsewhere")


async def test_a_quick_function_moves_to_the_loop_and_stays(finished):
    rubric = vf.Rubric([quick])
    await _until_on_the_loop(rubric, "quick", finished)
    threads = []

    def notes(completion):
        threads.append(threading.get_ident())
        return 1.0

    rubric = vf.Rubric([notes])
    await _until_on_the_loop(rubric, "notes", finished)
    assert threading.get_ident() not in threads
    await _score(rubric, finished())
    assert threads[-1] == threading.get_ident()


async def test_a_function_that_only_begins_slowly_moves_to_the_loop_too(finished):
    calls = []

    def imports_something(completion):
        calls.append(1)
        time.sleep(0.06 if len(calls) == 1 else 0)
        return 1.0

    await _until_on_the_loop(vf.Rubric([imports_something]), "imports_something", finished)
    assert len(calls) > NUM_TRIED


async def test_a_blocking_function_never_stalls_the_loop(finished):
    rubric = vf.Rubric([blocks])
    states = [finished() for _ in range(20)]
    assert await _turns_during(rubric.score_group(states)) > 60
    assert all(state["reward"] == 1.0 for state in states)
    stats = rubric.func_stats()["blocks"]
    assert (stats["runs_in"], stats["num_calls"]) == ("thread", 20)
    assert stats["p50_ms"] >= 20


async def test_a_function_that_becomes_slow_leaves_the_loop_after_one_stall(finished):
    pause = [0.0]

    def moody(completion):
        time.sleep(pause[0])
        return 1.0

    rubric = vf.Rubric([moody])
    await _until_on_the_loop(rubric, "moody", finished)
    pause[0] = 0.06
    await _score(rubric, finished())
    assert rubric.func_stats()["moody"]["runs_in"] == "thread"
    pause[0] = 0.0
    for _ in range(40):
        await _score(rubric, finished())
    assert rubric.func_stats()["moody"]["runs_in"] == "thread"


async def test_a_function_in_its_thread_never_runs_beside_itself(finished):
    running, most = [0], [0]

    def counts(completion):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.006)
        running[0] -= 1
        return 1.0

    await _score(vf.Rubric([counts]), *(finished() for _ in range(10)))
    assert most == [1]
    side_by_side = vf.run_in("thread", max_parallel=4)(counts)
    await _score(vf.Rubric([side_by_side]), *(finished() for _ in range(12)))
    assert most == [4]


async def test_a_hanging_function_is_a_failure_that_names_it_and_its_siblings_go_on(finished):
    release = threading.Event()

    def hangs(answer):
        if answer == "hang":
            release.wait(30)
        return 1.0

    async def hangs_too(answer):
        await asyncio.sleep(30 if answer == "wait" else 0)
        return 1.0

    rubric = vf.Rubric([hangs, hangs_too], func_timeout_seconds=0.5)
    states = [finished(answer) for answer in ("fine", "hang", "fine", "wait", "fine")]
    await rubric.score_group(states)
    release.set()
    assert [state["reward"] for state in states] == [2.0, None, 2.0, None, 2.0]
    assert str(states[1]["error"]) == "hangs: no score within 0.5 s"
    assert str(states[3]["error"]) == "hangs_too: no score within 0.5 s"
    assert states[1]["metrics"] == {"hangs_too": 1.0}
    assert [state["advantage"] for state in states] == [0.0, None, 0.0, None, 0.0]


async def test_a_function_that_hangs_again_and_again_is_not_called_any_more(finished):
    calls, release = [], threading.Event()

    def hangs(completion):
        calls.append(1)
        release.wait(30)

    rubric = vf.Rubric([hangs], func_timeout_seconds=0.01)
    states = [finished() for _ in range(MAX_ABANDONED + 4)]
    for state in states:
        await rubric.score_rollout(state)
    release.set()
    async with asyncio.timeout(60):
        while len(calls) < MAX_ABANDONED:  # noqa: ASYNC110 - a thread may have taken its call up and not come to it
            await asyncio.sleep(0.001)
    assert len(calls) == MAX_ABANDONED
    assert "hung 8 times and is not called any more" in str(states[-1]["error"])


async def test_cancelling_the_scoring_frees_the_thread_for_others(finished):
    release = threading.Event()

    def hangs(answer):
        if answer == "hang":
            release.wait(30)
        return 1.0

    rubric = vf.Rubric([hangs])
    task = asyncio.create_task(rubric.score_rollout(finished("hang")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await _score(rubric, finished()) == [1.0]
    release.set()


async def cancels_itself(completion):
    raise asyncio.CancelledError("mine")


def exits(completion):
    sys.exit(2)


def stops(completion):
    raise StopIteration


def own_timeout(completion):
    raise TimeoutError("mine")


@pytest.mark.parametrize("function", [cancels_itself, exits, stops, own_timeout])
async def test_whatever_a_function_raises_ends_its_own_rollout_only(finished, function):
    rubric = vf.Rubric([function, quick])
    for _ in range(NUM_TRIED + 2):
        state = finished()
        await rubric.score_rollout(state)
        assert isinstance(state["error"], JudgeError)
        assert str(state["error"]).startswith(f"{function.__name__}: ")
        assert "\n" not in str(state["error"])
        assert (state["reward"], state["metrics"]) == (None, {"quick": 1.0})
        assert list(state["reward_errors"]) == [function.__name__]


class Picky(vf.SandboxError):
    def __init__(self, code: int, *, where: str):
        super().__init__(f"{code} {where}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (vf.SandboxError("no machine"), vf.SandboxError),
        (vf.ModelError("grader down"), vf.ModelError),
        (Picky(3, where="here"), JudgeError),
        (OSError("disk"), JudgeError),
    ],
)
async def test_a_failure_that_says_already_who_failed_keeps_its_kind(finished, error, kind):
    async def needs_a_machine(completion):
        raise error

    state = finished()
    await vf.Rubric([needs_a_machine]).score_rollout(state)
    assert type(state["error"]) is kind
    assert str(state["error"]).startswith("needs_a_machine: ")
    assert state["error"].__cause__ is error
    assert state["reward"] is None


async def test_functions_that_only_work_on_the_main_thread_or_on_the_loop_get_there(finished):
    def alarmed(completion):
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    async def later():
        return 0.5

    def makes_a_task(completion):
        return asyncio.ensure_future(later())

    def returns_a_coroutine(completion):
        return later()

    rubric = vf.Rubric([alarmed, makes_a_task, returns_a_coroutine])
    for _ in range(3):
        assert await _score(rubric, finished()) == [2.0]
    assert {stats["runs_in"] for stats in rubric.func_stats().values()} == {"loop"}


async def test_context_variables_reach_a_function_in_its_thread(finished):
    variable = contextvars.ContextVar("variable")
    variable.set(0.25)
    assert await _score(vf.Rubric([lambda completion: variable.get()]), finished()) == [0.25]


class Callable:
    async def __call__(self, completion):
        return 0.5


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, 1.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
    ],
)
async def test_numbers_of_every_kind_are_scores(finished, value, score):
    assert await _score(vf.Rubric([lambda completion: value]), finished()) == [score]
    assert await _score(vf.Rubric([lambda states: [value]]), finished()) == [score]


class Rude:
    def __float__(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("nor this")


@pytest.mark.parametrize(
    "value", ["1.0", b"1", None, [1.0], (1.0,), {"score": 1}, np.array([1.0]), 1j, 10**400, Rude(), object, np.nan]
)
async def test_what_is_no_number_is_no_score(finished, value):
    state, member = finished(), finished()
    await vf.Rubric([lambda completion: value]).score_rollout(state)
    await vf.Rubric([lambda states: [value]]).score_rollout(member)
    for scored in (state, member):
        assert scored["reward"] is None
        assert str(scored["error"]).startswith("<lambda> returned ")


async def test_partials_and_callable_objects_have_names(finished):
    state = finished()
    await vf.Rubric([functools.partial(quick), Callable()]).score_rollout(state)
    assert state["metrics"] == {"quick": 1.0, "Callable": 0.5}


async def test_two_functions_of_one_name_keep_a_metric_each(finished):
    def one(value):
        def correct(completion):
            return value

        return correct

    rubric = vf.Rubric([one(1.0), one(0.5), one(0.25)], [1.0, 1.0, 0.0])
    state = finished()
    await rubric.score_rollout(state)
    assert state["metrics"] == {"correct": 1.0, "correct_2": 0.5, "correct_3": 0.25}
    assert state["reward"] == 1.5
    assert rubric.get_reward_func_names() == list(state["metrics"])


@vf.run_in("process", timeout_s=5)
def in_a_process(completion, answer):
    import calls

    return calls.double(len(completion[-1].content) * int(answer))


async def test_a_function_may_run_in_a_process(finished, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import test_function  # the name under which a worker can import this file

    rubric = vf.Rubric([test_function.in_a_process])
    state, wrong = finished("3", "abc"), finished("three", "abc")
    await rubric.score_group([state, wrong])
    assert state["reward"] == 18.0
    assert str(wrong["error"]).startswith("in_a_process: ValueError: invalid literal")
    assert rubric.func_stats()["in_a_process"]["runs_in"] == "process"


def test_a_place_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="not 'gpu'"):
        vf.run_in("gpu")


async def test_a_call_on_the_loop_costs_microseconds():
    function = RewardFunction(quick, 10.0)
    function.place = "loop"
    started = time.process_time()
    for _ in range(10_000):
        function.start({"completion": "a"})
    assert (time.process_time() - started) / 10_000 < 20e-6


def test_a_score_ended_before_it_began_leaves_nothing_unawaited():
    function = RewardFunction(blocks, 10.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        score = function.start({"completion": "x"})
        score.close()  # as a task does that is cancelled before its first step, when a run ends
        del score
        gc.collect()
    assert [str(warning.message) for warning in said] == []
