"""Guess a hidden number in several turns, told each time whether it is higher or lower.

The number is drawn per game, so train and evaluation games share numbers; what is learned is the search.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any

import mettle.envs as vf

NUMBER = re.compile(r"-?\d+")
SHOWN = ("answer", "any", "possible")
WASTED = -0.5
"""What a turn is worth, with `turn_rewards`, that named no number or one that the answers had ruled out."""
MAX_DIGITS = 100
"""A longer number is no guess, and Python refuses to read one of thousands."""


class NumberGuessEnv(vf.MultiTurnEnv):
    """Ends when the number is found or the guesses are used up."""

    def __init__(self, *, shown: str, turn_rewards: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shown, self.turn_rewards = shown, turn_rewards

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> str:
        """The hidden number at once, or one drawn anew at each turn: of all, or of those that are still `possible`."""
        if self.shown == "answer":
            return str(row["answer"])
        info, guesses = row["info"], [int(m["content"]) for m in messages if m["role"] == "assistant"]
        lowest, highest = info["low"], info["high"]
        if self.shown == "possible":
            lowest, highest = still_possible(guesses, int(row["answer"]), info)
        return str(random.Random(f"{info['seed']}/{len(messages)}").randint(lowest, highest))

    async def setup_state(self, state: vf.State) -> vf.State:
        """Nothing has been guessed."""
        state["guesses"] = []
        state["is_found"] = False
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """Say where the number is; the last word is `correct`."""
        guess = last_guess(state)
        if guess is None:
            if self.turn_rewards:
                state.add_step_reward(WASTED)
            return [vf.UserMessage(content="say a number")]
        if self._take(guess, state):
            state["final_env_response"] = [vf.UserMessage(content="correct")]
            return state["final_env_response"]
        return [vf.UserMessage(content="higher" if guess < int(state["answer"]) else "lower")]

    @vf.cleanup
    async def look_at_last_guess(self, state: vf.State) -> None:
        """The last guess allowed gets no answer, but it counts."""
        if state["trajectory"] and not state["is_found"] and state["stop_condition"] == "max_turns_reached":
            guess = last_guess(state)
            if guess is not None:
                self._take(guess, state)
            elif self.turn_rewards:
                state.add_step_reward(WASTED)

    def _take(self, guess: int, state: vf.State) -> bool:
        """Note a guess, and whether it was right."""
        secret = int(state["answer"])
        lowest, highest = still_possible(state["guesses"], secret, state["info"])
        if self.turn_rewards:
            # Nothing for a number that could have been: else a long game would be worth more than a short one.
            state.add_step_reward(1.0 if guess == secret else 0.0 if lowest <= guess <= highest else WASTED)
        state["guesses"].append(guess)
        state["is_found"] = guess == secret
        return bool(state["is_found"])


def still_possible(guesses: list[int], secret: int, info: Mapping[str, Any]) -> tuple[int, int]:
    """The lowest and the highest number that the answers to `guesses` have left, both included."""
    lowest = max((said + 1 for said in guesses if said < secret), default=info["low"])
    return lowest, min((said - 1 for said in guesses if said > secret), default=info["high"])


def last_guess(state: vf.State) -> int | None:
    """The last number of what the model said last; None when that was cut off.

    What was cut off may have meant something else, and whatever followed the number would be free of charge: a policy
    that is paid for entropy fills it with nonsense, and then forgets the game.
    """
    step = state["trajectory"][-1]
    if step["is_truncated"]:
        return None
    numbers = NUMBER.findall(vf.Parser().parse_answer(step["completion"][-1:]) or "")
    return int(numbers[-1]) if numbers and len(numbers[-1]) <= MAX_DIGITS else None


def found(state: vf.State) -> float:
    """1 when the number was found within the guesses allowed."""
    return float(state["is_found"])


def nearness(state: vf.State, info: Any) -> float:
    """How near the last guess came, as a share of the range; 1 when found, 0 without a guess."""
    if not state["guesses"]:
        return 0.0
    distance = abs(state["guesses"][-1] - int(state["answer"]))
    return max(0.0, 1.0 - distance / (info["high"] - info["low"]))


def num_guesses(state: vf.State) -> float:
    """How many numbers were named."""
    return float(len(state["guesses"]))


def make_rows(num_rows: int, *, seed: int, low: int, high: int, max_guesses: int) -> list[dict[str, Any]]:
    """Games with a number drawn for each."""
    rng = random.Random(seed)
    question = f"guess a number from {low} to {high} in {max_guesses} guesses"
    return [
        {
            "question": question,
            "answer": str(rng.randint(low, high)),
            "info": {"low": low, "high": high, "seed": f"{seed}/{number}"},
        }
        for number in range(num_rows)
    ]


def load_environment(
    low: int = 1,
    high: int = 10,
    max_guesses: int | None = None,
    shown: str = "answer",
    turn_rewards: bool = False,
    num_train: int = 1000,
    num_eval: int = 100,
    seed: int = 0,
) -> vf.MultiTurnEnv:
    """Numbers from `low` to `high`; without `max_guesses`, as many as halving the range needs.

    What is demonstrated is the hidden number (`shown = "answer"`), or whole games of numbers at random: "any" ones, or
    those that the answers have left "possible". With `turn_rewards` each turn has a reward of its own, for algorithms
    that look at turns.
    """
    if shown not in SHOWN:
        raise ValueError(f"shown is one of {', '.join(SHOWN)}, not {shown!r}")
    if high <= low:
        raise ValueError(f"high must be above low; got {low} to {high}")
    guesses = max_guesses or math.ceil(math.log2(high - low + 2))
    game = {"low": low, "high": high, "max_guesses": guesses}
    return NumberGuessEnv(
        shown=shown,
        turn_rewards=turn_rewards,
        dataset=lambda: make_rows(num_train, seed=2 * seed, **game),
        eval_dataset=lambda: make_rows(num_eval, seed=2 * seed + 1, **game),
        rubric=vf.Rubric(funcs=[found, nearness, num_guesses], weights=[1.0, 0.1, 0.0]),
        max_turns=guesses,
    )
