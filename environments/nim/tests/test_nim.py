"""Whole games against players that are scripts."""

from __future__ import annotations

import pytest

import mettle.envs as vf
from mettle.envs.demonstrations import Demonstrator


class Player(vf.Client):
    """Says what `choose(heap)` says, and keeps what it was asked."""

    def __init__(self, choose) -> None:
        self.choose, self.asked = choose, []

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        self.asked.append([message["content"] for message in prompt])
        heap = int(str(prompt[-1]["content"]).split()[-2])
        message = vf.ResponseMessage(content=str(self.choose(heap)), finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


async def play(choose, num=40, **args):
    env, player = vf.load_environment("nim", num_eval=num, **args), Player(choose)
    return (await env.evaluate(player, "player")).outputs, player


def perfect(heap):
    return heap % 4 or 1


async def test_perfect_play_wins_every_heap_that_can_be_won_and_one_stick_at_a_time_none_of_many():
    outputs, _ = await play(perfect)
    assert {output["reward"] for output in outputs} == {1.0}
    losers, _ = await play(lambda heap: 1, low=6)
    assert sum(output["reward"] for output in losers) < len(losers) / 2


@pytest.mark.parametrize("said", ["four", "0", "4", "-1"])
async def test_what_cannot_be_taken_loses(said):
    outputs, _ = await play(lambda heap: said, num=4)
    assert {(output["reward"], output["is_legal"]) for output in outputs} == {(0.0, 0.0)}


async def test_against_oneself_both_seats_are_asked_and_one_of_them_wins():
    outputs, player = await play(perfect, opponent="self", low=5, high=7)
    seats = {agent: [o["reward"] for o in outputs if o["info"]["agent"] == agent] for agent in ("first", "second")}
    assert set(seats["first"]) == {1.0}  # 5 to 7 are won for who moves first, if both are perfect
    assert set(seats["second"]) == {0.0}
    # Who is second is told what the opponent left, from the beginning.
    openings = {asked[0] for asked in player.asked}
    assert any("4 left" in opening for opening in openings)
    assert all("nim: take 1 to 3" in opening for opening in openings)


async def test_an_opponent_s_blunder_wins_before_the_first_move():
    outputs, _ = await play(lambda heap: 9, opponent="self", num=20)
    second = [output for output in outputs if output["info"]["agent"] == "second"]
    assert {(output["reward"], output["num_moves"]) for output in second} == {(1.0, 0.0)}


def test_a_game_that_is_none_is_refused():
    with pytest.raises(RuntimeError, match="opponent is one of perfect, random, self"):
        vf.load_environment("nim", opponent="nobody")
    with pytest.raises(RuntimeError, match="move is one of take, leave"):
        vf.load_environment("nim", move="push")
    with pytest.raises(RuntimeError, match="max_take is at least 1 and below low"):
        vf.load_environment("nim", low=3)


@pytest.mark.parametrize("opponent", ["perfect", "self"])
async def test_an_answer_that_was_cut_off_is_no_move(opponent):
    class Endless(Player):
        async def get_response(self, prompt, model, sampling_args=None, tools=None, **more):
            response = await super().get_response(prompt, model, sampling_args, tools, **more)
            response.message.is_truncated = True
            return response

    env = vf.load_environment("nim", num_eval=12, opponent=opponent)
    outputs = (await env.evaluate(Endless(perfect), "player")).outputs
    # Who is asked first loses; the second seat wins by the other's blunder, without a word.
    assert {(output["reward"], output["num_moves"]) for output in outputs} <= {(0.0, 1.0), (1.0, 0.0)}
    assert any(output["reward"] == 0.0 for output in outputs)


async def test_a_move_may_say_what_it_leaves():
    outputs, player = await play(lambda heap: heap - perfect(heap), move="leave")
    assert {(output["reward"], output["is_legal"]) for output in outputs} == {(1.0, 1.0)}
    assert all("say what you leave" in asked[0] for asked in player.asked)
    for said in (lambda heap: heap, lambda heap: heap - 4, lambda heap: heap + 1):
        outputs, _ = await play(said, num=4, move="leave")
        assert {(output["reward"], output["is_legal"]) for output in outputs} == {(0.0, 0.0)}
    outputs, _ = await play(lambda heap: heap - perfect(heap), move="leave", opponent="self", low=5, high=7)
    assert {output["reward"] for output in outputs if output["info"]["agent"] == "first"} == {1.0}


@pytest.mark.parametrize("shown", ["perfect", "legal"])
async def test_moves_that_are_shown_are_legal_however_they_are_told(shown):
    games = {}
    for move in ("take", "leave"):
        env = vf.load_environment("nim", shown=shown, move=move, num_eval=40)
        outputs = (await env.evaluate(Demonstrator(env), "shown")).outputs
        assert {output["is_legal"] for output in outputs} == {1.0}
        games[move] = {output["info"]["seed"]: (output["reward"], output["num_moves"]) for output in outputs}
    # The same moves, so the same games, told in other words.
    assert games["take"] == games["leave"]
