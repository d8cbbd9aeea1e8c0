"""Whole games against players that are scripts."""

from __future__ import annotations

import pytest

import mettle.envs as vf
from mettle.envs.demonstrations import Demonstrator


class Player(vf.Client):
    """Says what `choose(messages)` says."""

    def __init__(self, choose) -> None:
        self.choose = choose

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        message = vf.ResponseMessage(content=self.choose(prompt), finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


def halving(messages) -> str:
    low, high = 1, 10
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(said["content"])
        low, high = (guess + 1, high) if answer["content"] == "higher" else (low, guess - 1)
    return str((low + high) // 2)


async def play(choose, **args):
    env = vf.load_environment("number-guess", num_eval=20, **args)
    return (await env.evaluate(Player(choose), "player")).outputs


async def test_halving_always_finds_the_number():
    outputs = await play(halving)
    assert [output["reward"] for output in outputs] == [pytest.approx(1.1)] * 20
    assert {output["stop_condition"] for output in outputs} <= {"has_final_env_response", "max_turns_reached"}
    assert len({output["num_guesses"] for output in outputs}) > 1


async def test_a_player_that_never_names_a_number_gets_nothing():
    outputs = await play(lambda _: "hm")
    assert {output["reward"] for output in outputs} == {0.0}
    assert outputs[0]["completion"][1]["content"] == "say a number"


async def test_a_stubborn_player_gets_nearness_for_its_last_guess():
    for output in await play(lambda _: "5"):
        near = 1 - abs(5 - int(output["answer"])) / 9
        assert output["reward"] == pytest.approx(float(output["answer"] == "5") + 0.1 * near)


def test_an_empty_range_is_refused():
    with pytest.raises(RuntimeError, match="high must be above low"):
        vf.load_environment("number-guess", low=3, high=3)


@pytest.mark.parametrize(("shown", "least", "most"), [("any", 0.2, 0.6), ("possible", 0.65, 0.95)])
async def test_games_at_random_are_shown_to_their_end_and_found_as_often_as_what_they_draw_from_allows(
    shown, least, most
):
    env = vf.load_environment("number-guess", low=1, high=9, shown=shown, num_train=60)
    state = [await env.run_rollout(row, Demonstrator(env), "shown") for row in env.get_dataset()]
    said = [int(m["content"]) for game in state for m in game["completion"] if m["role"] == "assistant"]
    assert set(said) == set(range(1, 10))
    assert {game["stop_condition"] for game in state} == {"has_final_env_response", "max_turns_reached"}
    assert least < sum(game["metrics"]["found"] for game in state) / 60 < most
    with pytest.raises(RuntimeError, match="shown is one of answer, any, possible"):
        vf.load_environment("number-guess", shown="halving")


async def test_an_answer_that_was_cut_off_is_no_guess():
    class Endless(Player):
        async def get_response(self, prompt, model, sampling_args=None, tools=None, **more):
            response = await super().get_response(prompt, model, sampling_args, tools, **more)
            response.message.is_truncated = True
            return response

    env = vf.load_environment("number-guess", num_eval=8)
    outputs = (await env.evaluate(Endless(lambda _: "5"), "player")).outputs
    assert {(output["reward"], output["num_guesses"]) for output in outputs} == {(0.0, 0.0)}


async def test_with_turn_rewards_a_number_that_was_ruled_out_costs_and_a_longer_game_earns_no_more():
    env = vf.load_environment("number-guess", low=1, high=9, turn_rewards=True)
    row = {**env.get_dataset()[0], "answer": "3"}
    for said, rewards in (
        (["5", "7", "hm", "1"], [0.0, -0.5, -0.5, 0.0]),
        (["5", "2", "3"], [0.0, 0.0, 1.0]),
        (["5", "4", "2", "3"], [0.0, 0.0, 0.0, 1.0]),
    ):
        numbers = iter(said)
        state = await env.run_rollout(row, Player(lambda _, numbers=numbers: next(numbers)), "player")
        assert [step["reward"] for step in state["trajectory"]] == rewards
    assert state["reward"] == pytest.approx(1.1)
