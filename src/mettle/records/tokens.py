"""Token arrays that train: samples, micro batches, batches.

Legend: N tokens of a micro batch laid end to end, S sequences. Everything is flat (no padding); how the arrays are
laid out for a device (padded rows on a CPU, packed rows under a variable-length kernel) is the trainer's business.
Invariant: all per-token arrays of one object have the same length, and `sequence_lengths` sums to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence: prompt and sampled tokens interleaved as they were seen by the model.

    `loss_mask` is True on policy-sampled tokens. `logprobs` are the sampler's natural-log probabilities of those
    tokens (0 elsewhere), `versions` the policy version that sampled each (-1 elsewhere). A loss component's
    weight is 0 where the token is no member of it. `ref_logprobs` are a
    reference model's, 0 where there is none.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperatures: FloatArray
    advantages: FloatArray
    rl_weights: FloatArray
    ce_weights: FloatArray
    ref_kl_weights: FloatArray
    ref_logprobs: FloatArray
    draw_id: int = -1
    rollout_id: str = ""

    def __post_init__(self) -> None:
        _check_lengths(self, len(self.token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the sampled tokens; -1 when none was sampled."""
        sampled = self.versions[self.loss_mask]
        return int(sampled.min()) if sampled.size else -1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together on one rank, laid end to end."""

    token_ids: IntArray
    position_ids: IntArray
    sequence_lengths: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperatures: FloatArray
    advantages: FloatArray
    rl_weights: FloatArray
    ce_weights: FloatArray
    ref_kl_weights: FloatArray
    ref_logprobs: FloatArray

    def __post_init__(self) -> None:
        _check_lengths(self, len(self.token_ids))
        if int(self.sequence_lengths.sum()) != len(self.token_ids):
            raise ValueError(f"sequence_lengths sum to {int(self.sequence_lengths.sum())}, not {len(self.token_ids)}")


@dataclass(frozen=True, slots=True)
class Batch:
    """One optimiser step: for each data rank the same number of micro batches.

    Step n trains on v{n-1} and makes v{n}; steps count from 1. `draw_ids` are the task draws inside, `staleness` the
    (mean, max) over sampled tokens of (step - 1) - version.
    """

    step: int
    ranks: tuple[tuple[MicroBatch, ...], ...]
    draw_ids: tuple[int, ...]
    staleness: tuple[float, int] = (0.0, 0)
    metrics: dict[str, float] = field(default_factory=dict)


PER_TOKEN_FIELDS = tuple(f.name for f in fields(MicroBatch) if f.name != "sequence_lengths")
"""Names of the arrays of a micro batch that have one entry a token."""

DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "position_ids": np.int32,
    "sequence_lengths": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "temperatures": np.float32,
    "advantages": np.float32,
    "rl_weights": np.float32,
    "ce_weights": np.float32,
    "ref_kl_weights": np.float32,
    "ref_logprobs": np.float32,
}


def _check_lengths(record: Sample | MicroBatch, length: int) -> None:
    for f in fields(record):
        value = getattr(record, f.name)
        if f.name == "sequence_lengths" or not isinstance(value, np.ndarray):
            continue
        if value.shape != (length,):
            raise ValueError(f"{type(record).__name__}.{f.name} has shape {value.shape}, token_ids has ({length},)")
