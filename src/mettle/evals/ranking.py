"""Several evaluations in one table: each with its interval, each pair with its paired difference.

Parts: `Standing` (one evaluation), `PairDifference`, `Ranking`, `rank_evaluations`. Invariants: the means stand beside
each other on the tasks that all have, so that no one's tasks are easier; a difference is paired by task, as in
`compare`; with many pairs, `p_holm` is the p value that still holds when the luckiest of them is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from string import ascii_uppercase
from typing import Any

from mettle.errors import UserError
from mettle.evals.compare import Comparison, compare_evaluations
from mettle.evals.estimator import SHARE, Difference, Estimate, known_range, mean_over_tasks
from mettle.evals.facts import RolloutFacts
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import by_task

MAX_EVALUATIONS = len(ascii_uppercase)


@dataclass(frozen=True, slots=True)
class Standing:
    """One evaluation on the tasks that all have. `num_scored` of its `num_rollouts` have a reward."""

    word: str
    name: str
    environment: str
    model: str
    reward: Estimate
    passed: Estimate
    num_scored: int
    num_rollouts: int


@dataclass(frozen=True, slots=True)
class PairDifference:
    """How much `after` is above `before` (letters), on the tasks that both have."""

    before: str
    after: str
    num_tasks: int
    difference: Difference
    p_holm: float | None

    @property
    def is_clear(self) -> bool:
        """True when the difference is no luck, however many pairs were looked at."""
        return self.p_holm is not None and self.p_holm < 0.05


@dataclass(frozen=True, slots=True)
class Ranking:
    """The evaluations as they were given, and all pairs of them."""

    standings: list[Standing]
    pairs: list[PairDifference]
    num_tasks: int
    warnings: list[str]

    @property
    def by_reward(self) -> list[Standing]:
        """The best first."""
        return sorted(self.standings, key=lambda standing: -standing.reward.mean)

    @property
    def verdict(self) -> str:
        """In a sentence, which is best and whether that is sure."""
        best, *others = (standing.word for standing in self.by_reward)
        unclear = [word for word in others if not self._pair(best, word).is_clear]
        if not unclear:
            return f"{best} is best: its difference to each other one is no luck"
        named = ", ".join(unclear)
        return f"{best} is highest, and {named} may be as good: the difference could be luck"

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "num_tasks": self.num_tasks,
            "evaluations": [asdict(standing) for standing in self.standings],
            "pairs": [asdict(pair) for pair in self.pairs],
            "verdict": self.verdict,
            "warnings": self.warnings,
        }

    def _pair(self, one: str, other: str) -> PairDifference:
        return next(pair for pair in self.pairs if {pair.before, pair.after} == {one, other})


def rank_evaluations(readers: Sequence[EvaluationReader], names: Sequence[str] | None = None) -> Ranking:
    """Set evaluations beside each other. `names` is what they are called; without it, what a command takes for them.

    Raises: UserError when there are fewer than two or too many, or no scored task that all of them have.
    """
    if not 2 <= len(readers) <= MAX_EVALUATIONS:
        raise UserError(f"{len(readers)} evaluations were named; 2 to {MAX_EVALUATIONS} can be compared")
    words = ascii_uppercase[: len(readers)]
    called = list(names) if names is not None else [reader.entry.name for reader in readers]
    compared = {
        (one, other): compare_evaluations(a, b, (name, other_name))
        for (one, a, name), (other, b, other_name) in combinations(zip(words, readers, called, strict=True), 2)
    }
    tasks = [by_task(facts for facts in reader.facts if facts.reward is not None) for reader in readers]
    shared = set.intersection(*({change.example_id for change in found.tasks} for found in compared.values()))
    if not shared:
        raise UserError("no scored task is in all of these evaluations; compare them two by two")
    every = [facts.reward for mine in tasks for e in shared for facts in mine[e] if facts.reward is not None]
    standings = [
        _standing(word, name, reader, [mine[e] for e in mine if e in shared], every)
        for word, name, reader, mine in zip(words, called, readers, tasks, strict=True)
    ]
    return Ranking(standings, _pairs(compared), len(shared), _warnings(compared))


def _standing(
    word: str, name: str, reader: EvaluationReader, tasks: Sequence[Sequence[RolloutFacts]], every: Sequence[float]
) -> Standing:
    rewards = [[facts.reward for facts in task if facts.reward is not None] for task in tasks]
    passed = [[float(reader.pass_rule.holds(facts)) for facts in task] for task in tasks]
    reward, share = mean_over_tasks(rewards, known_range(every)), mean_over_tasks(passed, SHARE)
    assert reward is not None, "the tasks that all have are scored"
    assert share is not None, "as many tasks as above"
    entry = reader.entry
    num_scored = sum(facts.reward is not None for facts in reader.facts)
    return Standing(word, name, entry.env_id, entry.model, reward, share, num_scored, len(reader))


def _pairs(compared: dict[tuple[str, str], Comparison]) -> list[PairDifference]:
    """Every pair; p values by Holm's step-down, which multiplies the smallest of m by m, the next by m - 1, ..."""
    p_values = {pair: found.difference.p_value for pair, found in compared.items()}
    known = sorted((p, pair) for pair, p in p_values.items() if p is not None)
    adjusted = {pair: min(1.0, p * (len(known) - place)) for place, (p, pair) in enumerate(known)}
    for (_, lower), (_, pair) in pairwise(known):
        adjusted[pair] = max(adjusted[pair], adjusted[lower])
    return [
        PairDifference(*pair, len(found.tasks), found.difference, adjusted.get(pair))
        for pair, found in compared.items()
    ]


def _warnings(compared: dict[tuple[str, str], Comparison]) -> list[str]:
    """What differs between two of them besides the model, said for the pair that it was found in."""
    if len(compared) == 1:
        return next(iter(compared.values())).warnings
    return [f"{a} and {b}: {told}" for (a, b), found in compared.items() for told in _named(found.warnings, a, b)]


def _named(warnings: Sequence[str], before: str, after: str) -> list[str]:
    """Warnings of a pair, which calls its two A and B, under their own letters."""
    letters = {"A": before, "B": after}
    return [" ".join(letters.get(word, word) for word in told.split(" ")) for told in warnings]
