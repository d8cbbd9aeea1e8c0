"""Two evaluations side by side: what changed from A to B, task by task, and how sure that is.

Parts: `Comparison`, `compare_evaluations`. Invariant: only tasks that both have are compared, each by the mean of its
own rollouts, so that the difficulty of the tasks is no part of the error; whatever else differs between the two is
said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mettle.errors import UserError
from mettle.evals.estimator import Difference, known_range, mean_of, paired_difference, sign_test
from mettle.evals.facts import RolloutFacts
from mettle.evals.passing import PassRule
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import by_task
from mettle.evals.resume import settings_of

COMPARED = (
    "env_id",
    "env_args",
    "sampling_args",
    "rollouts_per_example",
    "pass_threshold",
    "pass_on",
    "shuffle",
    "shuffle_seed",
)
NO_CHANGE = 1e-9


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One task: the mean reward and the share of passed rollouts in A and in B."""

    example_id: Any
    reward_before: float
    reward_after: float
    passed_before: float
    passed_after: float

    @property
    def flip(self) -> int:
        """1 when most rollouts pass in B but not in A, -1 the other way round, else 0."""
        return (self.passed_after > 0.5) - (self.passed_before > 0.5)

    @property
    def change(self) -> float:
        """How much the mean reward rose."""
        return self.reward_after - self.reward_before


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A metric in both, as means over tasks, and the difference."""

    before: float
    after: float
    difference: Difference


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed. `sign_p_value` is the chance of so uneven a split of risen and fallen tasks by luck."""

    tasks: list[TaskChange]
    difference: Difference
    metrics: dict[str, MetricChange]
    num_risen: int
    num_fallen: int
    sign_p_value: float
    num_only_before: int
    num_only_after: int
    warnings: list[str]

    @property
    def gained(self) -> list[TaskChange]:
        """Tasks that are solved in B and were not in A, the largest change first."""
        return sorted((task for task in self.tasks if task.flip > 0), key=lambda task: -task.change)

    @property
    def lost(self) -> list[TaskChange]:
        """Tasks that were solved in A and are not in B, the largest change first."""
        return sorted((task for task in self.tasks if task.flip < 0), key=lambda task: task.change)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "num_tasks": len(self.tasks),
            "difference": asdict(self.difference),
            "metrics": {name: asdict(found) for name, found in self.metrics.items()},
            "num_risen": self.num_risen,
            "num_fallen": self.num_fallen,
            "sign_p_value": self.sign_p_value,
            "gained": [asdict(task) for task in self.gained],
            "lost": [asdict(task) for task in self.lost],
            "num_only_before": self.num_only_before,
            "num_only_after": self.num_only_after,
            "warnings": self.warnings,
        }


def compare_evaluations(
    before: EvaluationReader, after: EvaluationReader, names: tuple[str, str] | None = None
) -> Comparison:
    """Pair two evaluations by task. `names` is how an error calls them; without it, by their folders.

    Raises: UserError when they have no scored task in common.
    """
    left, right = (_scored_tasks(reader) for reader in (before, after))
    shared = [example for example in left if example in right]
    changed = {example for example in shared if _is_other(left[example], right[example])}
    shared = [example for example in shared if example not in changed]
    if not shared:
        why = f"{len(changed)} have the same number but ask something else" if changed else "they have other numbers"
        one, other = names or (str(before.path), str(after.path))
        raise UserError(f"{one} and {other} have no scored task in common: {why}")
    tasks = [_change(e, left[e], right[e], before.pass_rule, after.pass_rule) for e in shared]
    rewards = [facts.reward for side in (left, right) for e in shared for facts in side[e] if facts.reward is not None]
    difference = paired_difference(
        [task.reward_before for task in tasks], [task.reward_after for task in tasks], known_range(rewards)
    )
    assert difference is not None, "there is at least one task"
    num_risen = sum(task.change > NO_CHANGE for task in tasks)
    num_fallen = sum(task.change < -NO_CHANGE for task in tasks)
    return Comparison(
        tasks=tasks,
        difference=difference,
        metrics=_metric_differences({e: left[e] for e in shared}, right),
        num_risen=num_risen,
        num_fallen=num_fallen,
        sign_p_value=sign_test(num_risen, num_fallen),
        num_only_before=len(left) - len(shared),
        num_only_after=len(right) - len(shared),
        warnings=_warnings(before, after, len(changed), len(left), len(right), len(shared)),
    )


def _scored_tasks(reader: EvaluationReader) -> dict[Any, list[RolloutFacts]]:
    return by_task(facts for facts in reader.facts if facts.reward is not None)


def _is_other(before: list[RolloutFacts], after: list[RolloutFacts]) -> bool:
    """True when both say what task they are of, and it is not the same."""
    one, other = ({facts.task_key for facts in task if facts.task_key is not None} for task in (before, after))
    return bool(one and other and one != other)


def _change(
    example: Any, before: list[RolloutFacts], after: list[RolloutFacts], rule: PassRule, rule_after: PassRule
) -> TaskChange:
    return TaskChange(
        example,
        mean_of([facts.reward or 0.0 for facts in before]),
        mean_of([facts.reward or 0.0 for facts in after]),
        mean_of([float(rule.holds(facts)) for facts in before]),
        mean_of([float(rule_after.holds(facts)) for facts in after]),
    )


def _metric_differences(
    before: Mapping[Any, list[RolloutFacts]], after: Mapping[Any, list[RolloutFacts]]
) -> dict[str, MetricChange]:
    names = dict.fromkeys(name for task in before.values() for facts in task for name in facts.metrics)
    found = {}
    for name in names:
        pairs, values = [], []
        for example, task in before.items():
            here = [facts.metrics[name] for facts in task if name in facts.metrics]
            there = [facts.metrics[name] for facts in after[example] if name in facts.metrics]
            if here and there:
                pairs.append((mean_of(here), mean_of(there)))
                values += here + there
        here, there = [a for a, _ in pairs], [b for _, b in pairs]
        difference = paired_difference(here, there, known_range(values, name))
        if difference is not None:
            found[name] = MetricChange(mean_of(here), mean_of(there), difference)
    return found


def _warnings(
    before: EvaluationReader,
    after: EvaluationReader,
    num_changed: int,
    num_before: int,
    num_after: int,
    num_shared: int,
) -> list[str]:
    told = []
    for name in COMPARED:
        a, b = before.metadata.get(name), after.metadata.get(name)
        if isinstance(a, dict) or isinstance(b, dict):
            one, other = settings_of(a), settings_of(b)
            differing = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
            told += [f"{name}.{key} differs: {one.get(key)!r} and {other.get(key)!r}" for key in differing]
        elif a != b:
            told.append(f"{name} differs: {a!r} and {b!r}")
    versions = [(reader.metadata.get("version_info") or {}).get("env_version") for reader in (before, after)]
    if versions[0] != versions[1]:
        told.append(f"the environment's version differs: {versions[0]!r} and {versions[1]!r}")
    if num_changed:
        told.append(f"{num_changed} tasks ask something else in B under the same number; they are left out")
    if (num_before, num_after) != (num_shared, num_shared):
        told.append(f"A has {num_before} scored tasks, B {num_after}; the {num_shared} that both have are compared")
    for word, reader in (("A", before), ("B", after)):
        failed = sum(facts.cause is not None for facts in reader.facts)
        if failed > 0.02 * len(reader):
            told.append(f"{failed} of {len(reader)} rollouts of {word} failed and count neither way")
    return told
