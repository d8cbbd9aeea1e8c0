"""What is saved here, by environment, model and run.

Parts: `Catalog` (read anew when asked), `EnvironmentGroup`, `ModelGroup`. Invariant: an evaluation whose metadata
cannot be read is listed with the reason, under the name of its folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.evals.reader import EvaluationEntry, list_evaluations


@dataclass(slots=True)
class Group:
    """Evaluations that share a name (of an environment or a model), the newest first."""

    name: str
    entries: list[EvaluationEntry] = field(default_factory=list)

    @property
    def models(self) -> list[Group]:
        """The evaluations by model, in the order of the newest."""
        return _grouped(self.entries, "model")

    @property
    def best(self) -> EvaluationEntry | None:
        """The evaluation with the highest mean reward."""
        scored = [entry for entry in self.entries if mean_of(entry) is not None]
        return max(scored, key=lambda entry: mean_of(entry) or 0.0, default=None)


class Catalog:
    """The evaluations under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: list[EvaluationEntry] = []

    def read(self) -> list[EvaluationEntry]:
        """Look again."""
        return list_evaluations(self.root)

    def environments(self) -> list[Group]:
        """The evaluations by environment, in the order of the newest."""
        return _grouped(self.entries, "env_id")

    def environment(self, name: str) -> Group:
        """The evaluations of an environment."""
        return Group(name, [entry for entry in self.entries if entry.env_id == name])

    def runs(self, env_id: str, model: str) -> list[EvaluationEntry]:
        """The evaluations of a model on an environment."""
        return [entry for entry in self.entries if (entry.env_id, entry.model) == (env_id, model)]


def mean_of(entry: EvaluationEntry) -> float | None:
    """The mean reward of an evaluation by its metadata."""
    return number(entry.metadata.get("avg_reward"))


def errors_of(entry: EvaluationEntry) -> float | None:
    """The share of rollouts that failed."""
    return number(entry.metadata.get("avg_error"))


def planned_of(entry: EvaluationEntry) -> int | None:
    """How many rollouts it was to have."""
    tasks, each = (number(entry.metadata.get(name)) for name in ("num_examples", "rollouts_per_example"))
    return int(tasks * each) if tasks is not None and each is not None and tasks >= 0 else None


def cost_of(entry: EvaluationEntry) -> float | None:
    """What it cost."""
    cost = entry.metadata.get("cost")
    return number(cost.get("total_usd")) if isinstance(cost, dict) else None


def took_of(entry: EvaluationEntry) -> float | None:
    """How many seconds it took."""
    try:
        return number(entry.time_s)
    except (TypeError, ValueError, OverflowError):
        return None


def saved_of(entry: EvaluationEntry) -> tuple[int | None, list[float] | None]:
    """How many rollouts it ended with, and the interval of their mean; None while it runs."""
    stats = entry.metadata.get("stats")
    if not isinstance(stats, dict):
        return None, None
    count, reward = number(stats.get("num_rollouts")), stats.get("reward")
    interval = reward.get("interval") if isinstance(reward, dict) else None
    ends = [number(end) for end in interval] if isinstance(interval, list) else []
    known = [end for end in ends if end is not None]
    return (None if count is None else int(count)), (known if len(known) == 2 else None)


def _grouped(entries: list[EvaluationEntry], attribute: str) -> list[Group]:
    groups: dict[str, Group] = {}
    for entry in entries:
        name = str(getattr(entry, attribute))
        groups.setdefault(name, Group(name)).entries.append(entry)
    return list(groups.values())


def number(value: Any) -> float | None:
    """A figure that can be drawn; metadata may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return None
    return float(value)
