"""Which of several engines takes a request: the least loaded one, unless another has computed its prompt before.

A prompt is remembered by its beginnings of 16, 32, 64, ... tokens and as a whole, so that a group and the later turns
of a rollout find the replica that holds their keys and values. Affinity gives way when that replica has `slack` more
choices than the least loaded one. Invariant: what is remembered is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

MAX_REMEMBERED: Final = 16_384
_SHORTEST: Final = 16


class Affinity:
    """Where prompts went. `slack` is how many more choices a replica may have and still be preferred."""

    def __init__(self, slack: int = 16) -> None:
        self._slack = slack
        self._places: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt_ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """One of the replicas in `loads`, which says how many choices each has."""
        least = min(loads, key=lambda replica: (loads[replica], replica))
        keys = _beginnings(prompt_ids)
        known = next((self._places[key] for key in keys if self._places.get(key) in loads), least)
        chosen = known if loads[known] <= loads[least] + self._slack else least
        for key in keys:
            self._places[key] = chosen
            self._places.move_to_end(key)
        while len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)
        return chosen


def _beginnings(prompt_ids: Sequence[int]) -> list[int]:
    """Names of the whole prompt and of its beginnings, longest first."""
    lengths, length = [len(prompt_ids)], _SHORTEST
    while length < len(prompt_ids):
        lengths.insert(1, length)
        length *= 2
    return [hash(tuple(prompt_ids[:length])) for length in lengths]
