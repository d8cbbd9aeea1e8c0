"""Which tokens of a batch can be compared: those that one version sampled, in a context of that version alone.

An engine takes new weights while it samples, so a sequence may hold tokens of several versions; what comes after the
first change was sampled with keys and values of older weights and has no exact counterpart. Only the tokens up to the
first change are compared. Legend: K compared tokens of a sequence, T its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import Batch, FloatArray
from mettle.trainer.layout import Index


@dataclass(frozen=True, slots=True)
class ComparedSequence:
    """A sequence of a batch. `places` [K] are its compared tokens in `token_ids` [T], the other columns are theirs.

    `experts` [K, W] are those that a mixture's engine recorded. `turn_starts[k]` is where the completion that token k
    is of begins, `turns[k]` its number from 0.
    """

    number: int
    version: int
    token_ids: Index
    places: Index
    recorded: FloatArray
    temperatures: FloatArray
    turns: Index
    turn_starts: Index
    experts: NDArray[Any]


def choose(batch: Batch, count: int, *, seed: int) -> list[ComparedSequence]:
    """At most `count` sequences, a seeded choice from all over the batch, in the batch's order."""
    ends = np.cumsum(batch.sequence_lengths.astype(np.int64))
    numbers = np.arange(len(ends))
    if len(numbers) > count:
        numbers = np.sort(np.random.default_rng((seed, batch.step)).choice(numbers, count, replace=False))
    found = (_compared(batch, int(s), slice(int(ends[s] - batch.sequence_lengths[s]), int(ends[s]))) for s in numbers)
    return [sequence for sequence in found if sequence is not None]


def _compared(batch: Batch, number: int, own: slice) -> ComparedSequence | None:
    versions, is_sampled = batch.versions[own], batch.loss_mask[own]
    sampled = np.flatnonzero(is_sampled)
    sampled = sampled[sampled > 0]  # nothing predicts the first token of a sequence
    if not len(sampled):
        return None
    version = int(versions[sampled[0]])
    changed = np.flatnonzero(versions[sampled] != version)
    places = sampled[: changed[0]] if len(changed) else sampled
    places = places[np.isfinite(batch.logprobs[own][places])]
    if not len(places):
        return None
    begins: NDArray[np.bool_] = is_sampled & ~np.concatenate(([False], is_sampled[:-1]))
    starts = np.flatnonzero(begins)
    turns = np.searchsorted(starts, places, side="right") - 1
    return ComparedSequence(
        number,
        version,
        batch.token_ids[own].astype(np.int64),
        places,
        batch.logprobs[own][places],
        batch.temperatures[own][places],
        turns,
        starts[turns],
        batch.experts[own][places],
    )
