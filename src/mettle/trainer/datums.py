"""What a client of the training service brings: token sequences whose every position has a target of its own.

Parts: `TrainingDatum`, `sequences_of` (data in the form that `layout` cuts), `split_by_datum` (back again). Position i
of a datum's N tokens predicts `targets[i]`, one token or k of them; the client has shifted already. Invariant: results
come back in the order of the data, each in the shape of its targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import FloatArray, filled
from mettle.trainer.layout import ComponentCounts, Index, Sequences

COLUMN_OF = {
    "weights": "ce_weights",
    "logprobs": "logprobs",
    "advantages": "advantages",
    "sequence_ratio_mask": "loss_mask",
}
"""A datum's input and the column of a token that carries it."""


@dataclass(frozen=True, slots=True)
class TrainingDatum:
    """`token_ids` [N], `targets` [N] or [N, k], and for each target the loss's `inputs` in the same shape.

    Raises: ValueError when the shapes differ, a value is not finite, or an input is none that a loss reads.
    """

    token_ids: Index
    targets: Index
    inputs: Mapping[str, FloatArray]

    def __post_init__(self) -> None:
        shape = self.targets.shape
        if self.token_ids.ndim != 1 or not 1 <= len(shape) <= 2 or shape[0] != len(self.token_ids):
            raise ValueError(f"target_tokens have shape {list(shape)}, the input has {len(self.token_ids)} tokens")
        for name, values in self.inputs.items():
            if name not in COLUMN_OF:
                raise ValueError(f"there is no input {name!r}; there are {', '.join(COLUMN_OF)}")
            if values.shape != shape:
                raise ValueError(f"{name} have shape {list(values.shape)}, target_tokens have {list(shape)}")
            if not np.isfinite(values).all():
                raise ValueError(f"{name} hold values that are not finite")

    @property
    def num_labels(self) -> int:
        """Targets of each position."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1

    def check(self, *, vocab_size: int, inputs: Sequence[str]) -> None:
        """Raises: ValueError for ids outside the vocabulary, or a missing one of a loss's `inputs`."""
        for name, ids in (("input tokens", self.token_ids), ("target_tokens", self.targets)):
            if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
                raise ValueError(f"{name} go from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size} ids")
        missing = [name for name in inputs if name not in self.inputs]
        if missing:
            raise ValueError(f"loss_fn_inputs lack {', '.join(missing)}; the loss takes {', '.join(inputs)}")


def sequences_of(data: Sequence[TrainingDatum]) -> Sequences:
    """The data as sequences in which every token trains. All must have equally many targets a position."""
    num_labels = data[0].num_labels if data else 1
    if any(datum.num_labels != num_labels for datum in data):
        raise ValueError("data of one call must all have the same number of targets at each position")
    lengths = np.array([len(datum.token_ids) for datum in data], np.int64)  # [S]
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([datum.token_ids for datum in data]) if data else np.zeros(0, np.int64)
    num_members = lengths * num_labels
    # No prompt is said to be untrained, so none is shared: a client gets the log-probability of every target.
    # `members` are what a position leads up to; the layout reads each from the state one before it.
    members = np.repeat(np.arange(len(tokens)) + 1, num_labels)
    given: dict[str, NDArray[Any]] = {"token_ids": _flat([datum.targets for datum in data])}
    for name, column in COLUMN_OF.items():
        if any(name in datum.inputs for datum in data):
            given[column] = _flat([datum.inputs.get(name, np.zeros(datum.targets.shape)) for datum in data])
    columns = filled(len(members), given) | {"token_ids": given["token_ids"].astype(np.int64)}
    return Sequences(
        tokens.astype(np.int64), starts, np.zeros_like(starts), lengths, members, np.cumsum(num_members) - num_members,
        num_members, columns, ComponentCounts(0, 0, 0), num_labels,
    )  # fmt: skip


def split_by_datum(values: FloatArray, data: Sequence[TrainingDatum]) -> list[FloatArray]:
    """Values of all targets, in the data's order, as one array a datum in the shape of its targets."""
    ends = np.cumsum([datum.targets.size for datum in data])
    pieces = np.split(values, ends[:-1]) if data else []
    return [piece.reshape(datum.targets.shape) for piece, datum in zip(pieces, data, strict=True)]


def _flat(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0, np.int64)
