"""Reverse a word: the smallest task on which a policy can be seen to learn.

The user says `reverse abcd`; the answer is `dcba`, and nothing else. A word belongs to the evaluation split by its
checksum, so the splits never overlap, whatever their sizes and seeds.
"""

from __future__ import annotations

import random
import string
import zlib
from difflib import SequenceMatcher
from typing import Any

import mettle.envs as vf

EASY = ("abcdefghij", 3, 6)
HARD = (string.ascii_lowercase, 4, 10)
EVAL_SHARE = 8
"""One word in so many is for evaluation."""


def is_eval_word(word: str) -> bool:
    """Whether a word is for evaluation."""
    return zlib.crc32(word.encode()) % EVAL_SHARE == 0


def make_rows(num_rows: int, *, seed: int, for_eval: bool, hard: bool) -> list[dict[str, Any]]:
    """Different words of one split, with a length drawn first, so that short ones are as frequent as long ones."""
    letters, shortest, longest = HARD if hard else EASY
    rng = random.Random(f"{seed}/{for_eval}/{hard}")
    words: dict[str, None] = {}
    lengths = list(range(shortest, longest + 1))
    misses = 0
    while len(words) < num_rows:
        length = rng.choice(lengths)
        word = "".join(rng.choice(letters) for _ in range(length))
        if word not in words and is_eval_word(word) == for_eval:
            words[word] = None
            misses = 0
        else:
            misses += 1
        if misses > 10_000:
            raise ValueError(f"there are not {num_rows} different words; ask for fewer, or for hard=True")
    return [{"question": f"reverse {word}", "answer": word[::-1]} for word in words]


def response_text(completion: Any) -> str:
    """What the model said, without surrounding space."""
    return vf.Parser().parse_answer(completion).strip()


def position(completion: Any, answer: str, state: Any) -> float:
    """Share of positions that hold the right letter, of the longer of answer and response; 0 without an end."""
    if state["is_truncated"]:
        return 0.0
    response = response_text(completion)
    return sum(a == b for a, b in zip(answer, response, strict=False)) / max(len(answer), len(response))


def ratio(completion: Any, answer: str) -> float:
    """Similarity of answer and response as difflib's SequenceMatcher has it."""
    return SequenceMatcher(None, answer, response_text(completion)).ratio()


def exact_match(completion: Any, answer: str) -> float:
    """1 when the response is the answer."""
    return float(response_text(completion) == answer)


REWARDS = {"position": position, "ratio": ratio}


def load_environment(
    reward: str = "position",
    hard: bool = False,
    num_train: int = 2000,
    num_eval: int = 200,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.SingleTurnEnv:
    """Words of 3 to 6 letters from a to j; with `hard`, of 4 to 10 letters from the whole alphabet."""
    if reward not in REWARDS:
        raise ValueError(f"reward is one of {sorted(REWARDS)}, not {reward!r}")
    return vf.SingleTurnEnv(
        dataset=lambda: make_rows(num_train, seed=seed, for_eval=False, hard=hard),
        eval_dataset=lambda: make_rows(num_eval, seed=seed, for_eval=True, hard=hard),
        system_prompt=system_prompt,
        rubric=vf.Rubric(funcs=[REWARDS[reward], exact_match], weights=[1.0, 0.0]),
        pass_on="exact_match",
    )
