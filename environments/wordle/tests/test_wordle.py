"""The marks, whole games, and the demonstrating player."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

import mettle.envs as vf


@pytest.fixture(scope="module")
def module():
    vf.load_environment("wordle")
    return sys.modules["wordle"]


class Player(vf.Client):
    """Says what `choose(messages)` says."""

    def __init__(self, choose) -> None:
        self.choose = choose

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        message = vf.ResponseMessage(content=self.choose(prompt), finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


async def play(choose, secret, **args):
    env = vf.load_environment("wordle", **args)
    row = {**env.get_dataset()[0], "answer": secret}
    return await env.run_rollout(row, Player(choose), "player")


@pytest.mark.parametrize(
    ("guess", "secret", "said"),
    [
        ("crane", "crane", "ggggg"),
        ("crane", "light", "....."),
        ("crane", "react", "yyg.y"),
        ("speed", "eagle", "..yy."),
        ("sleep", "steel", "gygg."),
        ("allay", "label", "yyy.."),
        ("geese", "these", "..ggg"),
    ],
)
def test_a_letter_is_marked_as_often_as_the_secret_has_it(module, guess, secret, said):
    assert module.marks(guess, secret) == said


def test_marks_never_show_more_of_a_letter_than_there_is(module):
    words = module.WORDS[::23]
    for guess in words:
        for secret in words:
            shown = Counter(
                letter for letter, mark in zip(guess, module.marks(guess, secret), strict=True) if mark != "."
            )
            assert all(count == min(guess.count(letter), secret.count(letter)) for letter, count in shown.items())
            assert module.marks(guess, secret).count("g") == sum(a == b for a, b in zip(guess, secret, strict=True))


def test_the_words_are_words_and_the_splits_apart(module):
    assert len(module.WORDS) == len(set(module.WORDS)) == 656
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in module.WORDS)
    env = vf.load_environment("wordle", num_train=3000, num_eval=1000)
    train, held_out = set(env.get_dataset()["answer"]), set(env.get_eval_dataset()["answer"])
    assert not train & held_out
    assert len(held_out) > 50


def test_the_player_finds_every_word_and_never_looks_at_the_secret(module):
    lengths = []
    for secret in module.WORDS:
        turns = []
        while not turns or turns[-1][0] != secret:
            guess = module.best_guess(turns)
            turns.append((guess, module.marks(guess, secret)))
        lengths.append(len(turns))
    assert max(lengths) <= 6
    assert sum(lengths) / len(lengths) < 3.1


async def test_what_is_demonstrated_is_played_from_the_conversation_alone():
    for answer_format in ("plain", "xml"):
        env = vf.load_environment("wordle", answer_format=answer_format)
        for row in list(env.get_eval_dataset(n=10)):
            state = await env.run_rollout(row, vf.Demonstrator(env), "gold")
            assert state["metrics"]["solved"] == 1.0
            assert env.demonstrate(state["prompt"], {}).endswith(("slate", "slate</guess>"))


async def test_a_win_with_the_last_guess_counts():
    guesses = iter(["crane", "crane"])
    state = await play(lambda _: next(guesses), "crane", max_guesses=1)
    assert (state["metrics"]["solved"], state["metrics"]["speed"], state["reward"]) == (1.0, 0.0, 1.2)


async def test_a_quick_win_is_worth_more_and_a_near_miss_something():
    state = await play(lambda _: "I say CRANE!", "crane")
    assert state["reward"] == pytest.approx(1 + 0.2 * 5 / 6 + 0.2)
    assert state["completion"][-1]["content"] == "crane ggggg"
    state = await play(lambda _: "crank", "crane")
    assert state["reward"] == pytest.approx(0.2 * 4 / 5)
    assert state["metrics"]["num_guesses"] == 6


async def test_what_is_no_word_uses_up_a_turn():
    state = await play(lambda _: "hm", "crane", max_guesses=3)
    assert (state["reward"], len(state["trajectory"])) == (0.0, 3)
    assert state["completion"][1]["content"] == "a guess is one word of five letters"


@pytest.mark.parametrize("wrong", [{"max_guesses": 0}, {"answer_format": "json"}])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(RuntimeError, match="not"):
        vf.load_environment("wordle", **wrong)
