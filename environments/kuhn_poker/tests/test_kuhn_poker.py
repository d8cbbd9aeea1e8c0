"""The rules, the equilibrium against every other player, and whole matches."""

from __future__ import annotations

import itertools
import statistics
import sys

import pytest

import mettle.envs as vf


@pytest.fixture(scope="module")
def module():
    vf.load_environment("kuhn-poker")
    return sys.modules["kuhn_poker"]


class Player(vf.Client):
    """Says what `choose(last message)` says."""

    def __init__(self, choose) -> None:
        self.choose = choose

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        said = self.choose(prompt[-1]["content"])
        message = vf.ResponseMessage(content=said, finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


def bold(told):
    return "call" if told.endswith("fold or call") else "bet"


def timid(told):
    return "fold" if told.endswith("fold or call") else "check"


async def play(choose, **args):
    env = vf.load_environment("kuhn-poker", **{"num_eval": 60, **args})
    return (await env.evaluate(Player(choose), "player")).outputs


def pure_strategies(histories):
    """Every player who never leaves anything to chance."""
    places = list(itertools.product("JQK", histories))
    for choices in itertools.product((0.0, 1.0), repeat=len(places)):
        chosen = dict(zip(places, choices, strict=True))
        yield lambda card, history, chosen=chosen: chosen[card, history]


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_nobody_does_better_against_the_equilibrium_than_the_value_of_the_game(module, monkeypatch, alpha):
    monkeypatch.setattr(module, "ALPHA", alpha)
    assert module.value(module.equilibrium, module.equilibrium) == pytest.approx(-1 / 18)
    best_second = min(module.value(module.equilibrium, other) for other in pure_strategies(["p", "b"]))
    best_first = max(module.value(other, module.equilibrium) for other in pure_strategies(["", "pb"]))
    assert (best_second, best_first) == (pytest.approx(-1 / 18), pytest.approx(-1 / 18))


@pytest.mark.parametrize(
    ("cards", "history", "chips"),
    [("KJ", "pp", 1), ("JK", "pp", -1), ("JK", "bp", 1), ("KJ", "pbp", -1), ("QJ", "bb", 2), ("QK", "pbb", -2)],
)
def test_the_higher_card_or_the_one_who_stays_takes_the_pot(module, cards, history, chips):
    assert module.first_wins(cards, history) == chips


def test_a_careless_opponent_can_be_beaten(module):
    for name in ("random", "always_bet", "always_pass", "honest"):
        opponent = module.OPPONENTS[name]
        as_first = max(module.value(other, opponent) for other in pure_strategies(["", "pb"]))
        as_second = max(-module.value(opponent, other) for other in pure_strategies(["p", "b"]))
        assert as_first + as_second > 0.1, name


async def test_a_match_is_told_hand_by_hand(module):
    hands = [
        {"card": "K", "opponent_card": "J", "seat": 0},
        {"card": "Q", "opponent_card": "K", "seat": 1},
        {"card": "J", "opponent_card": "Q", "seat": 0},
    ]
    match = module.Match({"seed": 1, "opponent": "always_bet", "hands": hands})
    assert match.take_text() == "you have K and are first. check or bet"
    match.act("check")
    assert match.take_text() == "the opponent says bet. fold or call"
    match.act("call")
    assert match.take_text() == (
        "the opponent has J: you win 2. you have Q and are second. the opponent says bet. fold or call"
    )
    match.act("fold")
    assert match.take_text() == "the opponent has K: you lose 1. you have J and are first. check or bet"
    match.act("fold")
    assert match.take_text() == "check or bet was asked for: you lose 2"
    assert (match.is_over, match.chips, match.num_illegal) == (True, -1.0, 1)


async def test_rewards_are_shares_of_what_can_be_won_and_nonsense_loses_all():
    for output in await play(lambda _: "hm", num_hands=2):
        assert (output["reward"], output["num_illegal"], len(output["completion"])) == (-1.0, 2.0, 4)
    rewards = [output["reward"] for output in await play(bold, opponent="always_pass")]
    assert set(rewards) == {0.5}, "an opponent who always passes gives up the ante"
    assert {output["reward"] for output in await play(timid, opponent="always_bet")} == {-0.5}
    assert all(-1 <= output["reward"] <= 1 for output in await play(bold))


async def test_the_equilibrium_is_demonstrated_and_beats_careless_opponents():
    for opponent, least in (("random", 0.0), ("always_bet", 0.0), ("nash", -0.1)):
        env = vf.load_environment("kuhn-poker", opponent=opponent, num_eval=300)
        outputs = (await env.evaluate(vf.Demonstrator(env), "gold")).outputs
        assert {output["num_illegal"] for output in outputs} == {0.0}
        assert statistics.mean(output["reward"] for output in outputs) > least


async def test_the_rollouts_of_a_group_meet_the_same_match():
    env = vf.load_environment("kuhn-poker", num_eval=20)
    outputs = (await env.evaluate(Player(bold), "player", rollouts_per_example=3)).outputs
    for example in range(20):
        assert len({str(o["completion"]) for o in outputs if o["example_id"] == example}) == 1


@pytest.mark.parametrize("wrong", [{"opponent": "cfr"}, {"num_hands": 0}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        vf.load_environment("kuhn-poker", **wrong)
