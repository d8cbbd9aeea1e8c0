"""Scoring in the time that a group has: what hangs fails by itself, and early enough for the others."""

import asyncio

import pytest

import mettle.envs as vf
from mettle.envs.rubrics.deadline import limit_s, scored_by
from mettle.errors import JudgeError
from mettle.processes.virtual_time import run_virtually


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
