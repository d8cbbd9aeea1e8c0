"""Which rollouts of an evaluation are shown, in which order.

Parts: `Selection`, `SORTS`. Invariants: the order holds numbers of rollouts and nothing of them; a rollout without the
figure that is sorted by stands last, whichever the direction; ties keep the order in which the rollouts finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mettle.evals.facts import RolloutFacts
from mettle.evals.reader import EvaluationReader
from mettle.tui.filters import Filter

Key = Callable[[RolloutFacts], Any]

SORTS: dict[str, Key | None] = {
    "number": None,
    "reward": lambda facts: facts.reward,
    "tokens": lambda facts: facts.output_tokens,
    "time": lambda facts: facts.total_s,
    "turns": lambda facts: facts.num_turns,
    "task": lambda facts: _natural(facts.example_id),
    "stop": lambda facts: facts.error_type or facts.stop_condition,
}


class Selection:
    """The rollouts of one evaluation as they are shown."""

    def __init__(self, reader: EvaluationReader) -> None:
        self.reader = reader
        self.filter = Filter()
        self.holds_text: set[int] | None = None
        """The rollouts that the filter's texts are true of; None without such a text."""
        self.sort = "number"
        self.is_descending = False
        self.order: list[int] = list(range(len(reader)))

    def __len__(self) -> int:
        return len(self.order)

    def arrange(self) -> None:
        """Work the order out anew, for the rollouts that there are now."""
        facts, holds_text = self.reader.facts, self.holds_text
        shown = [index for index in range(len(facts)) if holds_text is None or index in holds_text]
        if self.filter.predicates:
            shown = [index for index in shown if self.filter.accepts(facts[index])]
        key = SORTS.get(self.sort, self._metric)
        if key is None:
            self.order = shown[::-1] if self.is_descending else shown
            return
        keyed = [(value, index) for index in shown if (value := key(facts[index])) is not None]
        known = {index for _, index in keyed}
        keyed.sort(key=lambda pair: pair[0], reverse=self.is_descending)
        self.order = [index for _, index in keyed] + [index for index in shown if index not in known]

    def sort_by(self, name: str) -> None:
        """Sort by `name`; by the same name again, turned round."""
        first = name in ("reward", "tokens", "time", "turns") and name != "reward"
        self.is_descending = not self.is_descending if name == self.sort else first
        self.sort = name
        self.arrange()

    def place_of(self, index: int) -> int | None:
        """Where a rollout stands, None when it is not shown."""
        try:
            return self.order.index(index)
        except ValueError:
            return None

    def _metric(self, facts: RolloutFacts) -> float | None:
        return facts.metrics.get(self.sort)


def _natural(value: Any) -> Any:
    """Numbers in their order, then texts in theirs."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
