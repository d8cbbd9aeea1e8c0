"""Games of TextArena: rows, matches, opponents, secrets, randomness, and corpora that are not there."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys

import pytest

import mettle.envs as vf
from mettle.errors import EnvironmentFault, UserError
from mettle_textarena.games import Game

pytest.importorskip("textarena")
MOVES = re.compile(r"'\[(\d)\]'")


def env_of(game="GuessTheNumber-v0", **options):
    return vf.TextArenaEnv(game, **{"num_train_examples": 6, "parser": vf.Parser(), **options})


async def play(env, scripted, say, row=0):
    client = scripted(say)
    return await env.run_rollout(env.get_dataset()[row], client, "m"), client


def halving():
    """Finds a number from 1 to 20 by what the game has said."""
    low, high = 1, 20

    def say(prompt):
        nonlocal low, high
        last = prompt[-1]["content"].rsplit("\n", 1)[-1].lower()
        if len(prompt) > 1:
            guess = int(prompt[-2]["content"].strip("[]"))
            low, high = (guess + 1, high) if "higher" in last else (low, guess - 1)
        return f"[{(low + high) // 2}]"

    return say


def first_free(prompt):
    """A player of tic-tac-toe who takes the first free square."""
    return f"[{MOVES.findall(prompt[-1]['content'].rsplit('Available Moves', 1)[-1])[0]}]"


def test_constructing_one_loads_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    env = env_of("Wordle-v0")
    with pytest.raises(
        UserError,
        match=r"TextArenaEnv needs textarena, which is not installed: pip install .*adapters/textarena brings it",
    ):
        env.get_dataset()


async def test_a_game_is_played_to_its_end_and_gives_its_own_reward(scripted):
    env = env_of()
    for row in range(4):
        state, _ = await play(env, scripted, halving(), row)
        assert state["error"] is None
        assert (state["reward"], state["stop_condition"]) == (1.0, "is_done")
        assert "Congratulations" in state["completion"][-1]["content"]
        assert "ta_env" not in state


async def test_the_last_move_that_the_limit_allows_is_made(scripted):
    env = env_of(max_turns=1)
    state, client = await play(env, scripted, "[99]")
    assert (state["stop_condition"], state["reward"], len(client.calls)) == ("max_turns_reached", 0.0, 1)
    assert state["completion"][-1]["role"] == "user"


async def test_an_answer_without_a_move_is_an_invalid_move(scripted):
    env = env_of(parser=vf.XMLParser(["guess"], answer_field="guess"))
    state, client = await play(env, scripted, "hm")
    assert len(client.calls) == 2, "TextArena allows one invalid move"
    assert state["reward"] <= 0.0


async def test_games_repeat_by_their_seed_whatever_else_is_played(scripted):
    random.seed(11)
    expected = random.Random(11).random()
    first = [state for state, _ in await asyncio.gather(*(play(env_of(), scripted, "[1]", row) for row in range(6)))]
    second = []
    for row in reversed(range(6)):
        second.append((await play(env_of(), scripted, "[1]", row))[0])
    assert [s["completion"] for s in first] == [s["completion"] for s in reversed(second)]
    assert random.random() == expected, "no game touches the process's randomness"


async def test_tic_tac_toe_against_a_random_opponent(scripted):
    env = env_of("TicTacToe-v0", num_players=2)
    rewards = []
    for row in range(6):
        state, _ = await play(env, scripted, first_free, row)
        assert state["error"] is None
        rewards.append(state["reward"])
        assert state["ta_rewards"][0] == -state["ta_rewards"][1]
    assert 1.0 in rewards
    assert set(rewards) <= {-1.0, 0.0, 1.0}


async def test_the_model_can_be_the_second_player_and_the_opponent_a_function(scripted):
    seen = []

    async def opponent(observation):
        seen.append(observation)
        return f"[{MOVES.findall(observation.rsplit('Available Moves', 1)[-1])[-1]}]"

    env = env_of("TicTacToe-v0", num_players=2, player_id=1, opponent=opponent)
    state, _ = await play(env, scripted, first_free)
    assert state["error"] is None
    assert "You are Player 1" in state["prompt"][-1]["content"]
    assert len(seen) >= 3
    assert "You are Player 0" in seen[0]


async def test_an_opponent_that_breaks_the_rules_or_raises_is_an_error_not_a_win(scripted):
    state, _ = await play(env_of("TicTacToe-v0", num_players=2, opponent=lambda _: "[77]"), scripted, first_free)
    assert isinstance(state["error"], EnvironmentFault)
    assert "the opponent's move was invalid" in str(state["error"])
    assert state["reward"] is None

    def lost(_):
        raise ValueError("no idea")

    state, _ = await play(env_of("TicTacToe-v0", num_players=2, opponent=lost), scripted, first_free)
    assert str(state["error"]) == "the opponent: ValueError: no idea"


async def test_only_what_is_new_can_be_shown(scripted):
    whole, _ = await play(env_of(), scripted, "[1]")
    new, _ = await play(env_of(new_only=True), scripted, "[1]")
    assert len(new["completion"][1]["content"]) < len(whole["completion"][1]["content"])
    assert whole["completion"][1]["content"].endswith(new["completion"][1]["content"])


async def test_feedback_passes_through_the_function_given(scripted):
    state, _ = await play(env_of(feedback_fn=lambda text: text.upper()), scripted, "[1]")
    assert state["completion"][1]["content"].isupper()


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """nltk's corpora in small: a few words, all of them nouns."""
    nltk = pytest.importorskip("nltk")
    words = tmp_path / "corpora" / "words"
    tagger = tmp_path / "taggers" / "averaged_perceptron_tagger_eng"
    for folder in (words, tagger):
        folder.mkdir(parents=True)
    listed = ["apple", "bread", "chair", "table", "house"]
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(listed) + "\n")
    contents = {"weights": {}, "tagdict": dict.fromkeys(listed, "NN"), "classes": ["NN"]}
    for name, value in contents.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.startswith("textarena.envs.Wordle")]:
        monkeypatch.delitem(sys.modules, name)
    return listed


async def test_wordle_has_the_rows_secret_and_shares_its_dictionary(scripted, corpora):
    env = env_of("Wordle-v0", parser=None, num_eval_examples=2, seed=4)
    answers = env.get_dataset()["answer"] + env.get_eval_dataset()["answer"]
    rng = random.Random(4)
    assert answers == [rng.choice(corpora) for _ in range(8)]
    for row in range(3):
        state, _ = await play(env, scripted, f"<think>hm</think><guess>[{answers[row]}]</guess>", row)
        assert (state["reward"], len(state["trajectory"])) == (1.0, 1)
    one, two = Game("Wordle-v0", {}, 0), env._game
    match = two.start(1, 0)
    assert match.env.dictionary is env.ta_env.dictionary
    assert match.env.state is not two.start(1, 0).env.state
    assert one.words == corpora


def test_corpora_that_are_not_there_are_one_line(monkeypatch, tmp_path):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.startswith(("textarena.envs.Wordle", "textarena.envs.Hangman"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError) as refused:
        env_of("Hangman-v0", download_timeout_s=0).get_dataset()
    assert "Hangman-v0 needs nltk's words, not on this machine" in str(refused.value)
    assert "python -m nltk.downloader words" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"game": "Wordel-v0"}, "no game 'Wordel-v0'; nearest are Wordle-v0"),
        ({"game": "GuessTheNumber-v0", "player_id": 1}, "player_id is from 0 to 0 of 1 players, not 1"),
        ({"game": "TicTacToe-v0", "num_players": 2, "opponent": "minimax"}, "opponent is 'random' or a function"),
        ({"game": "GuessTheNumber-v0", "game_options": {"no_such": 1}}, "cannot be loaded: TypeError: .*no_such"),
    ],
)
def test_what_cannot_be_had_is_said(options, says):
    with pytest.raises(UserError, match=says):
        env_of(**options).get_dataset()


async def test_too_few_players_is_the_games_own_word(scripted):
    with pytest.raises(
        EnvironmentFault, match="starting TicTacToe-v0: AssertionError: The number of players has to be 2"
    ):
        env_of("TicTacToe-v0").get_dataset()
