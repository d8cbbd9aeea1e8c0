"""What is saved here, by environment, model and run.

Parts: `Catalog` (read anew when asked), `EnvironmentGroup`, `ModelGroup`. Invariant: an evaluation whose metadata
cannot be read is listed with the reason, under the name of its folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mettle.evals.entries import EvaluationEntry, list_evaluations


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
        scored = [entry for entry in self.entries if entry.reward is not None]
        return max(scored, key=lambda entry: entry.reward or 0.0, default=None)


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


def _grouped(entries: list[EvaluationEntry], attribute: str) -> list[Group]:
    groups: dict[str, Group] = {}
    for entry in entries:
        name = str(getattr(entry, attribute))
        groups.setdefault(name, Group(name)).entries.append(entry)
    return list(groups.values())
