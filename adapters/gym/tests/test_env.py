"""Gym environments: rows, episodes, rewards, errors, and what runs where."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import ClassVar

import pytest

import mettle.envs as vf
from mettle.errors import EnvironmentFault, UserError


class Walk:
    """Walk to `goal`; the start is drawn by the seed. Every step costs 0.1, the goal gives 1."""

    made: ClassVar[list[Walk]] = []

    def __init__(self, goal: int = 5, style: int = 5, fault: str | None = None) -> None:
        self.goal, self.style, self.fault = goal, style, fault
        self.is_closed = False
        self.threads: set[str] = set()
        self.num_resets = 0
        Walk.made.append(self)

    def reset(self, seed=None):
        self.num_resets += 1
        self.threads.add(threading.current_thread().name)
        if self.fault == "reset":
            raise ValueError("no reset today")
        self.at = random.Random(seed).randint(-3, 3)
        return (f"at {self.at}", {}) if self.style == 5 else f"at {self.at}"

    def step(self, action):
        self.threads.add(threading.current_thread().name)
        if self.fault == "step":
            raise KeyError("lost")
        if self.fault == "shape":
            return 1, 2, 3
        if self.fault == "nan":
            return "?", float("nan"), True, False, {}
        if self.fault == "hang":
            time.sleep(1.5)
        self.at += action
        done, reward = self.at == self.goal, (1.0 if self.at == self.goal else 0.0) - 0.1
        if self.style == 4:
            return f"at {self.at}", reward, done, {"at": self.at}
        return f"at {self.at}", reward, done, self.at > 50, {"at": self.at}

    def close(self):
        self.is_closed = True


@pytest.fixture(autouse=True)
def _forget():
    Walk.made = []


def right(prompt):
    """Says a step to the right, once for each observation."""
    return "+1"


def walk_env(**options):
    chosen = {"env_cls": Walk, "action_parser": int, "num_train_episodes": 8, "num_eval_episodes": 4, **options}
    return vf.GymEnv(**chosen)


async def play(env, scripted, say=right, row=0):
    client = scripted(say)
    return await env.run_rollout(env.get_dataset()[row], client, "m"), client


def test_a_thousand_episodes_are_made_without_a_reset():
    env = vf.GymEnv(Walk, num_train_episodes=1_000_000)
    assert Walk.made == []
    assert len(env.get_dataset()) == 1_000_000
    assert [walk.num_resets for walk in Walk.made] == [1]


def test_rows_are_seeds_and_splits_apart():
    env = walk_env(seed=7)
    train, held_out = env.get_dataset(), env.get_eval_dataset()
    assert train["answer"] == [str(seed) for seed in range(7, 15)]
    assert held_out["answer"] == ["15", "16", "17", "18"]
    start = random.Random(7).randint(-3, 3)
    assert train[0]["prompt"] == [{"role": "user", "content": f"at {start}"}]
    assert len(Walk.made) == 1
    assert walk_env(num_eval_episodes=0).eval_dataset is None


@pytest.mark.parametrize("style", [4, 5])
async def test_an_episode_is_played_to_its_end(scripted, style):
    env = walk_env(env_kwargs={"goal": 4, "style": style}, system_prompt="Walk.")
    state, client = await play(env, scripted)
    start = int(state["prompt"][-1]["content"].removeprefix("at "))
    num_steps = 4 - start
    assert (state["stop_condition"], state["error"]) == ("is_done", None)
    assert len(state["trajectory"]) == num_steps == len(client.calls), "after the end the model is not asked again"
    assert [step["reward"] for step in state["trajectory"]] == [pytest.approx(-0.1)] * (num_steps - 1) + [
        pytest.approx(0.9)
    ]
    assert state["reward"] == pytest.approx(1 - 0.1 * num_steps)
    assert state["completion"][-1] == {"role": "user", "content": "at 4"}
    assert state["trajectory"][-1]["extras"]["gym_info"] == {"at": 4}
    assert state["prompt"][0] == {"role": "system", "content": "Walk."}
    assert all(walk.is_closed for walk in Walk.made[1:])


async def test_the_last_action_that_the_limit_allows_is_carried_out(scripted):
    env = walk_env(max_episode_steps=1, env_kwargs={"goal": 40})
    state, client = await play(env, scripted)
    assert (state["stop_condition"], len(client.calls)) == ("max_turns_reached", 1)
    assert state["trajectory"][0]["reward"] == state["reward"] == pytest.approx(-0.1)
    assert state["completion"][-1]["role"] == "user"
    env = walk_env(env_kwargs={"goal": 40}, max_total_completion_tokens=6)
    state, client = await play(env, scripted)
    assert (state["stop_condition"], len(client.calls)) == ("max_total_completion_tokens_reached", 2)
    assert state["reward"] == pytest.approx(-0.2)


async def test_an_action_that_cannot_be_read_ends_the_episode_or_is_said(scripted):
    state, client = await play(walk_env(), scripted, "left")
    assert (state["reward"], state["stop_condition"], len(client.calls)) == (0.0, "is_done", 1)
    assert state["completion"][-1]["content"].startswith("Action Parsing Error: invalid literal")
    said = iter(["left", "1", "1", "1", "1", "1", "1", "1", "1"])
    state, _ = await play(walk_env(retry_bad_actions=True), scripted, lambda _: next(said))
    assert state["reward"] == pytest.approx(1 - 0.1 * (len(state["trajectory"]) - 1))


@pytest.mark.parametrize(
    ("fault", "says"),
    [("step", r"Walk.step\(1\): KeyError: 'lost'"), ("shape", "returned a tuple of 3; it returns 4 or 5")],
)
async def test_what_the_environment_raises_is_the_error_of_its_rollout(scripted, fault, says):
    state, _ = await play(walk_env(env_kwargs={"fault": fault}), scripted)
    assert isinstance(state["error"], EnvironmentFault)
    assert state["reward"] is None
    with pytest.raises(EnvironmentFault, match=says):
        raise state["error"]
    assert Walk.made[-1].is_closed


async def test_a_reset_that_raises_is_attributed_for_rows_and_rollouts(scripted):
    env = walk_env(env_kwargs={"fault": "reset"})
    with pytest.raises(EnvironmentFault, match=r"Walk.reset\(seed=0\): ValueError: no reset today"):
        env.get_dataset()
    state = await env.run_rollout({"prompt": "x", "answer": "3", "example_id": 0}, scripted("1"), "m")
    assert str(state["error"]) == "Walk.reset(seed=3): ValueError: no reset today"
    state = await walk_env().run_rollout({"prompt": "x", "answer": "?", "example_id": 0}, scripted("1"), "m")
    assert "the answer of a GymEnv row is its seed, not '?'" in str(state["error"])


async def test_a_reward_that_is_no_number_leaves_no_reward(scripted):
    state, _ = await play(walk_env(env_kwargs={"fault": "nan"}), scripted)
    assert state["reward"] is None
    assert "nan" in str(state["error"])


async def test_a_step_that_hangs_is_given_up_and_the_loop_goes_on(scripted):
    env = walk_env(env_kwargs={"fault": "hang"}, step_timeout_s=0.05)
    state, _ = await play(env, scripted)
    assert "took longer than 0.05 s" in str(state["error"])


async def test_quick_environments_move_to_the_loop_and_slow_ones_stay_off_it(scripted):
    env = walk_env(env_kwargs={"goal": 10})
    for row in range(4):
        await play(env, scripted, row=row)
    assert Walk.made[1].threads == {"episode"}
    assert Walk.made[-1].threads == {threading.current_thread().name}
    slow = walk_env(env_kwargs={"goal": random.Random(0).randint(-3, 3) + 1, "fault": "hang"})
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.05)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await play(slow, scripted)
    ticking.cancel()
    assert ticks > 10


async def test_registered_gymnasium_environments_are_played_by_id(scripted):
    pytest.importorskip("gymnasium")
    env = vf.GymEnv("FrozenLake-v1", {"is_slippery": False}, num_train_episodes=2, max_episode_steps=20)
    path = iter(["2", "2", "1", "1", "1", "2"])
    state, _ = await play(env, scripted, lambda _: f"I go {next(path)}")
    assert (state["reward"], state["stop_condition"]) == (1.0, "is_done")
    state, _ = await play(env, scripted, "9")
    assert "9 is no action; actions are in Discrete(4)" in state["completion"][-1]["content"]
    await env.teardown()


def test_what_is_no_environment_is_refused():
    with pytest.raises(UserError, match="env_cls is a class or the id"):
        vf.GymEnv(3)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(
        UserError, match=r"GymEnv needs gymnasium, which is not installed: pip install .*adapters/gym brings it"
    ):
        vf.GymEnv("CartPole-v1").make_env()


async def test_own_prompt_and_parser_are_used(scripted):
    class Loud(vf.GymEnv):
        def obs_to_text(self, obs):
            return f"<<{obs}>>"

    env = Loud(Walk, {"goal": 4}, action_parser=int, parser=vf.XMLParser(["move"], answer_field="move"))
    state, _ = await play(env, scripted, "<move>1</move>")
    assert state["prompt"][-1]["content"].startswith("<<at ")
    assert state["completion"][-1]["content"] == "<<at 4>>"


async def test_a_seed_is_not_taken_for_a_demonstration(scripted):
    env = walk_env()
    state = await env.run_rollout(env.get_dataset()[0], vf.Demonstrator(env), "m")
    assert "GymEnv demonstrates nothing" in str(state["error"])
    env = walk_env(demonstrate=lambda messages, row: "+1", env_kwargs={"goal": 4})
    assert (await env.run_rollout(env.get_dataset()[0], vf.Demonstrator(env), "m"))["stop_condition"] == "is_done"
