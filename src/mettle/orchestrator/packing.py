"""Samples to the micro batches of each data rank.

Samples are sorted by length and put first-fit into bins; bins are split until every rank can have equally many,
and dealt to the ranks by their cost, the heaviest first. A rank that still lacks one gets a dummy: one token
that belongs to no loss component. Invariant: every sample is in exactly one micro batch, whatever the number of ranks.

Left out on purpose: refining the balance by swapping pairs. It was measured elsewhere to win 0.01 to 0.04 % for
seconds of CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mettle.records.tokens import DTYPES, MicroBatch, Sample

Layout = Literal["padded", "packed"]

SAMPLE_FIELDS = tuple(name for name in DTYPES if name not in ("position_ids", "sequence_lengths"))


def pack(
    samples: Sequence[Sample], *, layout: Layout, max_tokens: int, max_rows: int, num_ranks: int
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro batches by rank, equally many for each; those of the same index have similar cost."""
    bins = fill_bins(samples, layout=layout, max_tokens=max_tokens, max_rows=max_rows)
    bins = split_bins(bins, num_ranks)
    ranks = deal_bins(bins, num_ranks, layout=layout)
    depth = max((len(rank) for rank in ranks), default=0)
    return tuple(
        tuple([*(micro_batch(members) for members in rank), *(dummy() for _ in range(depth - len(rank)))])
        for rank in ranks
    )


def fill_bins(samples: Sequence[Sample], *, layout: Layout, max_tokens: int, max_rows: int) -> list[list[Sample]]:
    """First-fit over samples sorted by length, longest first. A padded bin costs its rows times its first sample."""
    bins: list[list[Sample]] = []
    used: list[int] = []
    # Bins before `first_open` are full: a shorter sample may still fit a packed one, so only full rows close it.
    first_open = 0
    for sample in sorted(samples, key=len, reverse=True):
        for index in range(first_open, len(bins)):
            members = bins[index]
            after = (len(members) + 1) * len(members[0]) if layout == "padded" else used[index] + len(sample)
            if len(members) < max_rows and after <= max_tokens:
                members.append(sample)
                used[index] = after
                break
        else:
            bins.append([sample])
            used.append(len(sample))
        while first_open < len(bins) and (len(bins[first_open]) >= max_rows or used[first_open] >= max_tokens):
            first_open += 1
    return bins


def split_bins(bins: list[list[Sample]], num_ranks: int) -> list[list[Sample]]:
    """Halve the heaviest bins until their number is a multiple of the ranks, or none can be split."""
    bins = [list(members) for members in bins]
    while bins and len(bins) % num_ranks:
        heaviest = max((b for b in bins if len(b) > 1), key=lambda b: sum(map(len, b)), default=None)
        if heaviest is None:
            break
        middle = (len(heaviest) + 1) // 2
        bins.append(heaviest[middle:])
        del heaviest[middle:]
    return bins


def deal_bins(bins: list[list[Sample]], num_ranks: int, *, layout: Layout) -> list[list[list[Sample]]]:
    """Heaviest first to the rank with the least work that may still take one."""
    depth = -(-len(bins) // num_ranks)
    ranks: list[list[list[Sample]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for members in sorted(bins, key=lambda b: _cost(b, layout), reverse=True):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < depth), key=lambda r: loads[r])
        ranks[rank].append(members)
        loads[rank] += _cost(members, layout)
    return ranks


def micro_batch(samples: Sequence[Sample]) -> MicroBatch:
    """Samples laid end to end; positions start again at each."""
    lengths = np.array([len(sample) for sample in samples], np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - lengths, lengths)
    arrays = {name: np.concatenate([getattr(s, name) for s in samples]) for name in SAMPLE_FIELDS}
    return MicroBatch(position_ids=positions.astype(np.int32), sequence_lengths=lengths, **arrays)


def dummy() -> MicroBatch:
    """One token that belongs to no loss component: it keeps the ranks in step and counts for nothing."""
    arrays = {name: np.zeros(1, dtype) for name, dtype in DTYPES.items()}
    return MicroBatch(
        **{
            **arrays,
            "sequence_lengths": np.ones(1, np.int32),
            "temperatures": np.ones(1, np.float32),
            "versions": np.full(1, -1, np.int32),
        }
    )


def _cost(members: Sequence[Sample], layout: Layout) -> int:
    return len(members) * len(members[0]) if layout == "padded" else sum(len(sample) for sample in members)
