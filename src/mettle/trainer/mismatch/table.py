"""The differences, cut along what may have caused them. Pure functions of arrays.

A difference is the recorded log-probability minus the trainer's, in nats. Each cut gives (label, mean of the absolute
differences, number of tokens), in the order of the labels' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.trainer.mismatch.tokens import ComparedSequence

POSITIONS = (0, 4, 16, 64, 256, 1024)
"""Where the bins of a token's place in its completion begin."""

UNTOLD = "the engine"
"""Of tokens whose engine is one, or does not say which of several it is."""

Row = tuple[str, float, int]
Floats = NDArray[np.float64]


def cuts(sequences: Sequence[ComparedSequence], differences: Sequence[Floats]) -> dict[str, list[Row]]:
    """The table by position in the completion, by turn, by the version and by the replica that sampled."""
    size = np.abs(np.concatenate(differences))
    offsets = np.concatenate([s.places - s.turn_starts for s in sequences])
    turns = np.concatenate([s.turns for s in sequences])
    versions = np.concatenate([np.full(len(s.places), s.version) for s in sequences])
    replicas = np.concatenate([np.full(len(s.places), s.replica or UNTOLD) for s in sequences])
    bins = np.searchsorted(np.array(POSITIONS), offsets, side="right") - 1
    return {
        "position": _rows(bins, size, [_span(i) for i in range(len(POSITIONS))]),
        "turn": _rows(turns, size, None),
        "version": _rows(versions, size, None),
        "replica": _rows(replicas, size, None),
    }


def sequence_means(differences: Sequence[Floats]) -> Floats:
    """The mean absolute difference of each sequence."""
    return np.array([float(np.abs(own).mean()) for own in differences])


def _rows(keys: NDArray[Any], size: Floats, labels: list[str] | None) -> list[Row]:
    found = []
    for key in np.unique(keys).tolist():
        own = size[keys == key]
        found.append((labels[key] if labels else str(key), float(own.mean()), len(own)))
    return found


def _span(index: int) -> str:
    begin = POSITIONS[index]
    return f"{begin}+" if index + 1 == len(POSITIONS) else f"{begin} to {POSITIONS[index + 1] - 1}"
