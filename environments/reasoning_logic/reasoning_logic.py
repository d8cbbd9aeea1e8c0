"""Logic, puzzles, graphs, sequences and numbers: thirty families of generated tasks in three difficulties.

reasoning-gym makes the tasks and checks the answers. A task is a family and a level, both drawn by its number, so the
same seed makes the same tasks; with a curriculum the level rises over the training rows. Invariant: no question is in
training and in evaluation, with whatever seeds and sizes, because its own words decide which of the two it may be in.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mettle.envs as vf
from mettle.errors import UserError

GROUPS: dict[str, tuple[str, ...]] = {
    "deduction": ("aiw", "circuit_logic", "knights_knaves", "self_reference", "syllogism", "zebra_puzzles"),
    "puzzles": ("futoshiki", "kakurasu", "maze", "mini_sudoku", "n_queens", "quantum_lock", "tower_of_hanoi"),
    "graphs": ("course_schedule", "family_relationships", "largest_island", "shortest_path"),
    "sequences": (
        "ab",
        "binary_alternation",
        "isomorphic_strings",
        "letter_counting",
        "number_sequence",
        "number_sorting",
        "spell_backward",
        "string_manipulation",
        "word_sorting",
    ),
    "numbers": ("base_conversion", "calendar_arithmetic", "count_primes", "leg_counting", "time_intervals"),
}
LEVELS = ("easy", "medium", "hard")
PROMPT = (
    "Think step by step. Then give the final answer alone, in the form the question asks for, inside <answer> tags."
)

MAX_DRAWS = 100
"""The chance that none of them is an evaluation question is 1 in 10^12, in a family with enough of them."""
HELD_OUT_KEY = b"reasoning-logic/2"
"""With this key the families with the fewest questions (six in `tower_of_hanoi`) have some on both sides."""


def is_held_out(question: str) -> bool:
    """Whether a question is for evaluation: a quarter of them are, by a hash of the words."""
    words = " ".join(question.casefold().split())
    return hashlib.blake2b(words.encode(), digest_size=1, key=HELD_OUT_KEY).digest()[0] < 64


class LevelledTasks:
    """Task `index` is of a family and a level that its number decides; datasets are made when first needed.

    The first `num_train` tasks have training questions, the others those that are held out: a task is drawn again until
    it is of its side. No two tasks draw the same numbers.
    """

    def __init__(
        self, families: Sequence[str], level_of: Callable[[int], int], size: int, seed: int, num_train: int
    ) -> None:
        self.datasets = _Datasets(size * MAX_DRAWS, seed)
        self._families = families
        self._level_of = level_of
        self._size = size
        self._seed = seed
        self._num_train = num_train

    def __getitem__(self, index: int) -> dict[str, Any]:
        family = random.Random(f"{self._seed}/{index}").choice(self._families)
        level = self._level_of(index)
        name = f"{family}:{LEVELS[level]}"
        entry = self._drawn(name, index)
        return {**entry, "metadata": {**entry["metadata"], "source_dataset": name}}

    def _drawn(self, name: str, index: int) -> dict[str, Any]:
        """A task of its side.

        Raises: UserError when the family has too few tasks to have some on both.
        """
        dataset, wants_held_out = self.datasets[name], index >= self._num_train
        for draw in range(MAX_DRAWS):
            entry = dict(dataset[index + draw * self._size])
            if is_held_out(entry["question"]) is wants_held_out:
                return entry
        side = "evaluation" if wants_held_out else "training"
        raise UserError(f"{name} has too few different tasks: none of {MAX_DRAWS} is for {side}; add other families")


class _Datasets(dict[str, Any]):
    """reasoning-gym's dataset for `family:level`."""

    def __init__(self, size: int, seed: int) -> None:
        super().__init__()
        self._defaults = {"size": size, "seed": seed}

    def __missing__(self, name: str) -> Any:
        from reasoning_gym.factory import DATASETS, create_curriculum

        family, _, level = name.partition(":")
        curriculum = create_curriculum(family)
        curriculum.set_global_level(LEVELS.index(level))
        made = self[name] = DATASETS[family][0](curriculum.generate_configuration(dict(self._defaults)))
        return made


class ReasoningLogicEnv(vf.ReasoningGymEnv):
    """Tasks of `families`, at the level that `level_of(index)` says."""

    def __init__(self, families: Sequence[str], level_of: Callable[[int], int], **kwargs: Any) -> None:
        self._level_of = level_of
        super().__init__(list(families), **kwargs)

    def build_rg_dataset(self, gym: Any, total_examples: int = 1000, seed: int = 0) -> LevelledTasks:
        """The tasks of all families and levels."""
        super().build_rg_dataset(gym, total_examples, seed)  # refuses what there is not, in one line
        return LevelledTasks(gym, self._level_of, total_examples, seed, self.num_train_examples)

    async def check_answer_reward_func(self, completion: vf.Messages, answer: str, **kwargs: Any) -> float:
        """What the verifier says; no answer is worth nothing in every family."""
        if not (self.parser.parse_answer(completion) or "").strip():
            return 0.0
        return await super().check_answer_reward_func(completion, answer, **kwargs)


def chosen_families(families: str | Sequence[str]) -> list[str]:
    """Families by the names of groups and families; "all" is all of them.

    Raises: UserError for a name that is neither.
    """
    names = [families] if isinstance(families, str) else list(families)
    known = [family for group in GROUPS.values() for family in group]
    chosen: list[str] = []
    for name in names:
        if name != "all" and name not in GROUPS and name not in known:
            raise UserError(f"there is no group or family {name!r}; groups are all, {', '.join(GROUPS)}")
        chosen += known if name == "all" else GROUPS.get(name, (name,))
    if not chosen:
        raise UserError("families is empty; name a group or a family, or 'all'")
    return list(dict.fromkeys(chosen))


def level_schedule(difficulty: str, curriculum: bool, num_train: int) -> Callable[[int], int]:
    """The level of each task by its number. A curriculum rises to `difficulty` over the training rows and stays."""
    if difficulty not in LEVELS:
        raise UserError(f"difficulty is one of {', '.join(LEVELS)}, not {difficulty!r}")
    highest = LEVELS.index(difficulty)
    if not curriculum:
        return lambda index: highest
    return lambda index: min(highest, index * (highest + 1) // max(num_train, 1))


def load_environment(
    families: str | Sequence[str] = "all",
    difficulty: str = "easy",
    curriculum: bool = False,
    num_train: int = 1000,
    num_eval: int = 200,
    seed: int = 0,
    system_prompt: str | None = PROMPT,
    overrides: Mapping[str, Any] | None = None,
) -> vf.ReasoningGymEnv:
    """Tasks of `families` at `difficulty`; `overrides` are further arguments of the environment."""
    return ReasoningLogicEnv(
        chosen_families(families),
        level_schedule(difficulty, curriculum, num_train),
        num_train_examples=num_train,
        num_eval_examples=num_eval,
        seed=seed,
        system_prompt=system_prompt,
        **(overrides or {}),
    )
