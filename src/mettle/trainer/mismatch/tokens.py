"""Which tokens of a batch can be compared: those that one version sampled, in a context of that version alone.

An engine takes new weights while it samples, so a sequence may hold tokens of several versions; what comes after the
first change was sampled with keys and values of older weights and has no exact counterpart. Only the tokens up to the
first change are compared. Where several replicas of the engine sampled a sequence's turns, each has its own part of it:
a replica computes the whole context by itself. Legend: K compared tokens of a sequence, T its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import Batch, FloatArray
from mettle.trainer.layout import Index


@dataclass(frozen=True, slots=True)
class ComparedSequence:
    """A sequence of a batch, as far as one replica sampled it. `places` [K] are its compared tokens in `token_ids` [T],
    the other columns are theirs.

    `experts` [K, W] are those that a mixture's engine recorded. `turn_starts[k]` is where the completion that token k
    is of begins, `turns[k]` its number from 0. `sampled` are the places of all sampled tokens, whoever sampled them;
    `replica` is "" where nobody told.
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
    sampled: Index
    replica: str = ""


def choose(batch: Batch, count: int, *, seed: int) -> list[ComparedSequence]:
    """At most `count` sequences, a seeded choice from all over the batch, in the batch's order.

    Replicas are taken in turns, so that none stays unseen as long as there are no more of them than that.
    """
    ends = np.cumsum(batch.sequence_lengths.astype(np.int64))
    numbers = np.arange(len(ends))
    if len(numbers) > count:
        drawn = np.random.default_rng((seed, batch.step)).permutation(numbers)
        numbers = np.sort(_in_turns(drawn, _replica_of_each(batch, ends))[:count])
    spans = (slice(int(ends[s] - batch.sequence_lengths[s]), int(ends[s])) for s in numbers)
    return [part for s, own in zip(numbers, spans, strict=True) for part in _compared(batch, int(s), own)]


def _compared(batch: Batch, number: int, own: slice) -> Iterator[ComparedSequence]:
    versions, is_sampled = batch.versions[own], batch.loss_mask[own]
    sampled = np.flatnonzero(is_sampled)
    sampled = sampled[sampled > 0]  # nothing predicts the first token of a sequence
    if not len(sampled):
        return
    version = int(versions[sampled[0]])
    changed = np.flatnonzero(versions[sampled] != version)
    places = sampled[: changed[0]] if len(changed) else sampled
    places = places[np.isfinite(batch.logprobs[own][places])]
    begins: NDArray[np.bool_] = is_sampled & ~np.concatenate(([False], is_sampled[:-1]))
    starts = np.flatnonzero(begins)
    for replica, kept in _by_replica(batch, own, places):
        turns = np.searchsorted(starts, kept, side="right") - 1
        yield ComparedSequence(
            number,
            version,
            batch.token_ids[own].astype(np.int64),
            kept,
            batch.logprobs[own][kept],
            batch.temperatures[own][kept],
            turns,
            starts[turns],
            batch.experts[own][kept],
            sampled,
            replica,
        )


def _replica_of_each(batch: Batch, ends: Index) -> dict[int, str]:
    """The replica that began each sequence, where one is told."""
    found: dict[int, str] = {}
    for own in batch.replicas:
        found.setdefault(int(np.searchsorted(ends, own.start, side="right")), own.replica)
    return found


def _in_turns(numbers: Index, replica_of: Mapping[int, str]) -> Index:
    """The numbers with the first of each replica ahead, then the second of each, and so on."""
    taken: Counter[str] = Counter()
    turns = np.zeros(len(numbers), np.int64)
    for i, number in enumerate(numbers.tolist()):
        replica = replica_of.get(number, "")
        turns[i] = taken[replica]
        taken[replica] += 1
    return numbers[np.argsort(turns, kind="stable")]


def _by_replica(batch: Batch, own: slice, places: Index) -> Iterator[tuple[str, Index]]:
    """(replica, its places) of a sequence, those that nobody tells the replica of first."""
    names, of_place = [""], np.zeros(own.stop - own.start, np.int64)
    for start, stop, replica in batch.replicas:
        if own.start <= start < own.stop:
            if replica not in names:
                names.append(replica)
            of_place[start - own.start : stop - own.start] = names.index(replica)
    for index, replica in enumerate(names):
        kept = places[of_place[places] == index]
        if len(kept):
            yield replica, kept
