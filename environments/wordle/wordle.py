"""Find a five-letter word: each guess is answered with which of its letters are right, elsewhere, or absent.

A word belongs to the evaluation split by its checksum, so no secret of the one is a secret of the other.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from wordle_words import WORDS

import mettle.envs as vf

RIGHT, ELSEWHERE, ABSENT = "g", "y", "."
SOLVED = RIGHT * 5
EVAL_SHARE = 8
"""One word in so many is for evaluation."""
OPENING = "slate"
WORD = re.compile(r"[a-z]{5}")
GUESS_PROMPT = "Think inside <think> tags, then give your guess alone inside <guess> tags."
UNREADABLE = "a guess is one word of five letters"


@lru_cache(1 << 18)
def marks(guess: str, secret: str) -> str:
    """A mark for each letter of `guess`; a letter is marked as often as the secret has it, right ones first."""
    marked = [RIGHT if said == true else ABSENT for said, true in zip(guess, secret, strict=True)]
    left = Counter(true for mark, true in zip(marked, secret, strict=True) if mark != RIGHT)
    for place, letter in enumerate(guess):
        if marked[place] != RIGHT and left[letter] > 0:
            marked[place] = ELSEWHERE
            left[letter] -= 1
    return "".join(marked)


def possible(turns: Sequence[tuple[str, str]]) -> list[str]:
    """The words that could have been answered with these marks."""
    return [word for word in WORDS if all(marks(guess, word) == said for guess, said in turns)]


def best_guess(turns: Sequence[tuple[str, str]]) -> str:
    """The possible word that leaves the fewest possible words, on average."""
    if not turns:
        return OPENING
    words = possible(turns)
    return min(words, key=lambda guess: sum(n * n for n in Counter(marks(guess, word) for word in words).values()))


class WordleEnv(vf.MultiTurnEnv):
    """Ends when the word is found or the guesses are used up. What is no word uses up a guess."""

    async def setup_state(self, state: vf.State) -> vf.State:
        """Nothing has been guessed."""
        state["turns"] = []
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        """The marks of the guess."""
        said = self.look_at(messages[-1], state)
        answer = [vf.UserMessage(content=said)]
        if said.endswith(SOLVED):
            state["final_env_response"] = answer
        return answer

    def look_at(self, message: Any, state: vf.State) -> str:
        """Take the guess in a message down and say what it is worth."""
        guess = read_guess(self.parser.parse_answer([message]))
        if guess is None:
            return UNREADABLE
        said = marks(guess, state["answer"])
        state["turns"].append((guess, said))
        return f"{guess} {said}"

    @vf.cleanup
    async def look_at_last_guess(self, state: vf.State) -> None:
        """The last guess allowed gets no answer, but it counts."""
        if state["trajectory"] and state["stop_condition"] == "max_turns_reached":
            self.look_at(state["trajectory"][-1]["completion"][-1], state)

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> str:
        """A good guess by what is known so far; the secret is not looked at."""
        told = [message.text.split() for message in messages if message["role"] == "user"]
        turns = [(words[0], words[1]) for words in told if len(words) == 2 and set(words[1]) <= set(SOLVED + "y.")]
        guess = best_guess(turns)
        return f"<guess>{guess}</guess>" if isinstance(self.parser, vf.XMLParser) else guess


def read_guess(text: str | None) -> str | None:
    """The last word of five letters."""
    words = [word for word in re.findall(r"[a-z]+", (text or "").lower()) if WORD.fullmatch(word)]
    return words[-1] if words else None


def solved(state: vf.State) -> float:
    """1 when the word was found."""
    return float(any(said == SOLVED for _, said in state["turns"]))


def speed(state: vf.State, info: Any) -> float:
    """The share of the guesses that were not needed; 0 when the word was not found."""
    return solved(state) * (1.0 - len(state["turns"]) / info["max_guesses"])


def letters(state: vf.State) -> float:
    """How near the best guess came: a letter in its place counts 1/5, one elsewhere 1/10."""
    worth = [said.count(RIGHT) / 5 + said.count(ELSEWHERE) / 10 for _, said in state["turns"]]
    return max(worth, default=0.0)


def num_guesses(state: vf.State) -> float:
    """How many words were guessed."""
    return float(len(state["turns"]))


def make_rows(num_rows: int, *, seed: int, for_eval: bool, max_guesses: int) -> list[dict[str, Any]]:
    """Games with a secret word of one split."""
    rng = random.Random(f"{seed}/{for_eval}")
    words = [word for word in WORDS if (zlib.crc32(word.encode()) % EVAL_SHARE == 0) == for_eval]
    question = (
        f"find the word of five letters in {max_guesses} guesses; each letter is marked "
        f"{RIGHT} in its place, {ELSEWHERE} elsewhere, {ABSENT} absent"
    )
    info = {"max_guesses": max_guesses}
    return [{"question": question, "answer": rng.choice(words), "info": info} for _ in range(num_rows)]


def load_environment(
    max_guesses: int = 6, answer_format: str = "plain", num_train: int = 1000, num_eval: int = 200, seed: int = 0
) -> vf.MultiTurnEnv:
    """Games of `max_guesses`; the guess is the last word said, or inside `<guess>` with `answer_format="xml"`."""
    if max_guesses < 1:
        raise ValueError(f"max_guesses is at least 1, not {max_guesses}")
    if answer_format not in ("plain", "xml"):
        raise ValueError(f"answer_format is 'plain' or 'xml', not {answer_format!r}")
    parser = vf.XMLParser(["guess"], answer_field="guess") if answer_format == "xml" else vf.Parser()
    split = {"seed": seed, "max_guesses": max_guesses}
    return WordleEnv(
        dataset=lambda: make_rows(num_train, for_eval=False, **split),
        eval_dataset=lambda: make_rows(num_eval, for_eval=True, **split),
        system_prompt=GUESS_PROMPT if answer_format == "xml" else None,
        parser=parser,
        rubric=vf.Rubric([solved, speed, letters, num_guesses], weights=[1.0, 0.2, 0.2, 0.0], parser=parser),
        max_turns=max_guesses,
    )
