"""In which order the operations of one model run: by their sequence numbers, whatever order they came in.

A client sends the parts of one call side by side, so that 5 may come before 4; a number that was refused on the
client's side never comes. Parts: `ModelOrder`. No thread and no clock here. Invariant: no number is run twice, none
before a smaller one that is waited for, and none waits longer than `gap_s` for one that does not come.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelOrder:
    """The operations of one model that wait. `last` is the number that ran last or was given up; creation is 0."""

    last: int = -1
    waiting: list[int] = field(default_factory=list)
    gap_since: float | None = None

    def is_late(self, number: int) -> bool:
        """True for a number whose turn is over."""
        return number <= self.last

    def add(self, number: int) -> None:
        """Let a number wait for its turn; one that waits already stays once."""
        place = bisect.bisect_left(self.waiting, number)
        if self.waiting[place : place + 1] != [number]:
            self.waiting.insert(place, number)

    @property
    def ready(self) -> int | None:
        """The number whose turn it is, if it is here."""
        return self.waiting[0] if self.waiting and self.waiting[0] == self.last + 1 else None

    def finish(self, number: int) -> None:
        """The number whose turn it was has run, or failed."""
        assert number == self.ready, f"{number} was not next after {self.last}"
        self.waiting.pop(0)
        self.last, self.gap_since = number, None

    def watch(self, now: float, gap_s: float) -> list[int]:
        """The numbers that have waited too long for one that is missing; they are given up.

        What was missing may still come, and is late then.
        """
        if not self.waiting or self.ready is not None:
            self.gap_since = None
            return []
        if self.gap_since is None:
            self.gap_since = now
        if now - self.gap_since < gap_s:
            return []
        given_up, self.waiting, self.gap_since = self.waiting, [], None
        self.last = given_up[-1]
        return given_up
