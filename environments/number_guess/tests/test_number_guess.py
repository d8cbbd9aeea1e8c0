"""Whole games against players that are scripts."""

from __future__ import annotations

import pytest

import mettle.envs as vf


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
