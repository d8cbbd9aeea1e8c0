"""Whose turn it is: deficit round robin over models, with equal shares for their owners.

Each visit gives a model credit for so many tokens; it is served while its credit covers the cost of what it asks for.
Source: Shreedhar and Varghese, 1995. No thread and no clock here. Invariant: while two owners both have work, what they
are served never differs by more than one quantum and one pass, however many models either has or how large its passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """The next piece of work of one model: its owner and its cost in tokens, at least 1."""

    owner: str
    cost: int


class DeficitRoundRobin:
    """`quantum` is the credit, in tokens, that an owner gets in a round."""

    def __init__(self, quantum: int) -> None:
        assert quantum > 0, "a round has to give something"
        self._quantum = quantum
        self._credit: dict[str, float] = {}

    def pick(self, wishes: Mapping[str, Wish]) -> str:
        """The model that is served next, out of those that have work (at least one). Its credit is charged."""
        assert wishes, "somebody has to have work"
        # Who has nothing to do saves nothing up.
        self._credit = {model: credit for model, credit in self._credit.items() if model in wishes}
        for model in wishes:
            self._credit.setdefault(model, 0.0)
        models_of = Counter(wish.owner for wish in wishes.values())
        while True:
            model = next(iter(self._credit))
            wish = wishes[model]
            if self._credit[model] >= wish.cost:
                self._credit[model] -= wish.cost
                return model
            # To the end of the row, with more.
            self._credit[model] = self._credit.pop(model) + self._quantum / models_of[wish.owner]
