"""From a flat batch to what a device computes: rows of tokens, and the targets that are read from them.

Parts: `Sequences` (one rank's micro batches laid end to end, with what each token trains), `plan_layouts` (which
sequences share a forward pass, and how), `Layout` (the arrays of one forward pass). Three forms:

- padded: one sequence a row, sorted by length; causal attention, padding on the right is never looked at;
- shared: sequences that begin with the same untrained tokens stand behind one copy of them, each seeing the copy and
  itself; a group of rollouts pays for its prompt once;
- packed: all sequences in one row with restarting positions, for kernels of variable length.

A sequence is cut after the last token that predicts a trained one, and left out if it trains nothing. Only hidden
states that predict a trained token reach the vocabulary head. Invariant: the form changes cost, never the loss.

Legend: N flat tokens, S sequences, B rows, T columns, K trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import Batch, BoolArray, FloatArray, MicroBatch
from mettle.trainer.config import MicroBatchConfig

Index = NDArray[np.int64]
Form = Literal["padded", "shared", "packed"]


@dataclass(frozen=True, slots=True)
class Targets:
    """What is known of the K trained tokens. A component's weight is 0 where the token is no member of it."""

    labels: Index
    temperatures: FloatArray
    logprobs: FloatArray
    advantages: FloatArray
    is_sampled: BoolArray
    rl_weights: FloatArray
    ce_weights: FloatArray
    ref_kl_weights: FloatArray
    ref_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward pass: the hidden state at flat position `sources[k]` of [B, T] predicts target k.

    `segments` is set for the form "shared": 0 for the common prompt, 1.. for what follows it, -1 for padding.
    """

    form: Form
    token_ids: Index
    positions: Index
    segments: Index | None
    sources: Index
    targets: Targets


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """Member tokens of each loss component over the whole batch, all ranks."""

    rl: int
    ce: int
    ref_kl: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """Flat arrays over N tokens, and per sequence where it starts, what is computed of it, and what it trains.

    `prompts[s]` tokens lead up to the first trained one, `needed[s]` tokens are inputs, `num_members[s]` are trained;
    sequence s trains the flat positions `members[member_starts[s] : member_starts[s] + num_members[s]]`.
    """

    tokens: Index
    starts: Index
    prompts: Index
    needed: Index
    members: Index
    member_starts: Index
    num_members: Index
    targets: Targets

    @classmethod
    def of(cls, micro_batches: Sequence[MicroBatch]) -> Sequences:
        """Lay micro batches end to end and find out what trains."""
        lengths = np.concatenate([m.sequence_lengths for m in micro_batches]).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        members = np.concatenate([_is_member(m) for m in micro_batches]).nonzero()[0]
        owners = np.searchsorted(starts, members, side="right") - 1
        # Empty sequences share their start with the next one; searchsorted then names the last of them, the real one.
        num_members = np.bincount(owners, minlength=len(lengths)).astype(np.int64)
        member_starts = np.cumsum(num_members) - num_members
        has_members = num_members > 0
        prompts, needed = np.zeros_like(starts), np.zeros_like(starts)
        prompts[has_members] = members[member_starts[has_members]] - starts[has_members]
        last = (member_starts + num_members - 1)[has_members]
        needed[has_members] = members[last] - starts[has_members]
        tokens = np.concatenate([m.token_ids for m in micro_batches]).astype(np.int64)
        targets = _targets(micro_batches, members, tokens)
        return cls(tokens, starts, prompts, needed, members, member_starts, num_members, targets)


def count_components(batch: Batch) -> ComponentCounts:
    """Global token counts by which the components are divided."""
    micro_batches = [micro for rank in batch.ranks for micro in rank]
    columns = [_member_masks(micro) for micro in micro_batches]
    rl, ce, ref_kl = (int(sum(int(masks[i].sum()) for masks in columns)) for i in range(3))
    return ComponentCounts(rl, ce, ref_kl)


def plan_layouts(
    sequences: Sequences, config: MicroBatchConfig, *, attention_cost: float, is_packed: bool = False
) -> list[Layout]:
    """Cut one rank's sequences into forward passes.

    `attention_cost` is the price of one query-key pair in tokens (see `model.Traits`).
    """
    trained = np.flatnonzero(sequences.num_members)
    if is_packed:
        return _packed_layouts(sequences, trained, config)
    rows: list[Index] = []
    if config.share_prompts:
        rows, trained = _shared_rows(sequences, trained, attention_cost, config.max_tokens)
    shared = [_shared_layout(sequences, chunk) for chunk in _chunks(rows, _row_lengths(sequences, rows), config)]
    alone = [np.array([s]) for s in trained]
    padded = [
        _padded_layout(sequences, np.concatenate(chunk)) for chunk in _chunks(alone, sequences.needed[trained], config)
    ]
    return shared + padded


def empty_layout() -> Layout:
    """A pass that trains nothing, for a rank that has fewer passes than its peers. One token, no target."""
    none = np.zeros(0, np.int64)
    nothing = np.zeros(0, np.float32)
    targets = Targets(none, nothing, nothing, nothing, np.zeros(0, bool), nothing, nothing, nothing, nothing)
    one = np.zeros((1, 1), np.int64)
    return Layout("padded", one, one, None, none, targets)


# What trains


def _member_masks(micro: MicroBatch) -> tuple[BoolArray, BoolArray, BoolArray]:
    has_context = micro.position_ids > 0  # the first token of a sequence has nothing that predicts it
    return (
        micro.loss_mask & (micro.rl_weights != 0) & has_context,
        (micro.ce_weights != 0) & has_context,
        (micro.ref_kl_weights != 0) & has_context,
    )


def _is_member(micro: MicroBatch) -> BoolArray:
    rl, ce, ref_kl = _member_masks(micro)
    return rl | ce | ref_kl


def _targets(micro_batches: Sequence[MicroBatch], members: Index, tokens: Index) -> Targets:
    def taken(name: str) -> NDArray[np.generic]:
        return np.concatenate([getattr(m, name) for m in micro_batches])[members]

    is_sampled = taken("loss_mask").astype(bool)
    floats = {name: taken(name).astype(np.float32) for name in _FLOAT_TARGETS}
    floats["rl_weights"] = np.where(is_sampled, floats["rl_weights"], np.float32(0))
    return Targets(labels=tokens[members], is_sampled=is_sampled, **floats)


_FLOAT_TARGETS = tuple(f.name for f in fields(Targets) if f.name not in ("labels", "is_sampled"))


def _pick(targets: Targets, index: Index) -> Targets:
    return Targets(**{f.name: getattr(targets, f.name)[index] for f in fields(Targets)})


# Which sequences share a prompt


def _shared_rows(
    sequences: Sequences, trained: Index, attention_cost: float, max_tokens: int
) -> tuple[list[Index], Index]:
    """Rows of sequences behind one prompt, where that is cheaper, and the sequences that stay alone."""
    groups: dict[bytes, list[int]] = {}
    for s in trained.tolist():
        start = sequences.starts[s]
        groups.setdefault(sequences.tokens[start : start + sequences.prompts[s]].tobytes(), []).append(s)
    rows: list[Index] = []
    alone: list[Index] = []
    for members in groups.values():
        group = np.array(members)
        size = _row_size(sequences, group, attention_cost, max_tokens)
        (alone if size == 1 else rows).extend(np.array_split(group, math.ceil(len(group) / size)))
    return rows, np.concatenate(alone) if alone else np.zeros(0, np.int64)


def _row_size(sequences: Sequences, group: Index, attention_cost: float, max_tokens: int) -> int:
    """How many sequences of a group share a row; 1 when sharing costs more than it saves.

    A row of m sequences with prompt P and s tokens each costs P + m s + a (P + m s)^2, so the cost per sequence is
    least at m = sqrt(P (1 + a P) / a) / s. Alone, causal attention looks at half the square.
    """
    prompt, tail = int(sequences.prompts[group[0]]), float((sequences.needed - sequences.prompts)[group].mean())
    best = math.sqrt(prompt * (1 + attention_cost * prompt) / attention_cost) / max(tail, 0.5)
    size = min(len(group), max(1, round(best)), max(1, int((max_tokens - prompt) // max(tail, 1))))
    length = prompt + size * tail
    together = (length + attention_cost * length**2) / size
    apart = (prompt + tail) + attention_cost * (prompt + tail) ** 2 / 2
    return size if together < apart else 1


def _row_lengths(sequences: Sequences, rows: list[Index]) -> Index:
    tails = sequences.needed - sequences.prompts
    return np.array([sequences.prompts[row[0]] + tails[row].sum() for row in rows], np.int64)


def _chunks(rows: list[Index], lengths: Index, config: MicroBatchConfig) -> list[list[Index]]:
    """Rows, longest first, in chunks that keep to the limits on rows and padded tokens."""
    chunks: list[list[Index]] = []
    longest = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        fits = bool(chunks) and len(chunks[-1]) < config.max_rows
        if not fits or (len(chunks[-1]) + 1) * longest > config.max_tokens:
            chunks.append([])
            longest = int(lengths[i])
        chunks[-1].append(rows[i])
    return chunks


# The arrays of a pass


def _padded_layout(sequences: Sequences, chosen: Index) -> Layout:
    needed = sequences.needed[chosen]
    num_rows, width = len(chosen), int(needed.max())
    token_ids = np.zeros((num_rows, width), np.int64)
    row_starts = np.arange(num_rows) * width
    token_ids.ravel()[_ranges(row_starts, needed)] = sequences.tokens[_ranges(sequences.starts[chosen], needed)]
    positions = np.broadcast_to(np.arange(width), token_ids.shape)
    sources, targets = _read(sequences, chosen, row_starts - sequences.starts[chosen])
    return Layout("padded", token_ids, positions, None, sources, targets)


def _shared_layout(sequences: Sequences, rows: list[Index]) -> Layout:
    chosen = np.concatenate(rows)
    sizes = np.array([len(row) for row in rows])
    width = int(_row_lengths(sequences, rows).max())
    firsts = np.array([row[0] for row in rows])
    prompts, tails = sequences.prompts[chosen], (sequences.needed - sequences.prompts)[chosen]
    row_of = np.repeat(np.arange(len(rows)), sizes)
    ahead = np.cumsum(tails) - tails
    columns = prompts + ahead - np.repeat(ahead[np.cumsum(sizes) - sizes], sizes)
    ordinal = np.arange(len(chosen)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1

    token_ids, positions = np.zeros((2, len(rows), width), np.int64)
    segments = np.full((len(rows), width), -1, np.int64)
    row_starts = np.arange(len(rows)) * width
    head, body = _ranges(row_starts, sequences.prompts[firsts]), _ranges(row_of * width + columns, tails)
    from_head = _ranges(sequences.starts[firsts], sequences.prompts[firsts])
    from_body = _ranges(sequences.starts[chosen] + prompts, tails)
    for into, came_from in ((head, from_head), (body, from_body)):
        token_ids.ravel()[into] = sequences.tokens[came_from]
    positions.ravel()[head] = _ranges(np.zeros_like(firsts), sequences.prompts[firsts])
    positions.ravel()[body] = _ranges(prompts, tails)
    segments.ravel()[head] = 0
    segments.ravel()[body] = np.repeat(ordinal, tails)

    shift = row_of * width + columns - prompts - sequences.starts[chosen]
    sources, targets = _read(sequences, chosen, shift)
    # The first trained token of a sequence is predicted by the last token of the common prompt.
    opening = np.cumsum(sequences.num_members[chosen]) - sequences.num_members[chosen]
    sources[opening] = row_of * width + prompts - 1
    return Layout("shared", token_ids, positions, segments, sources, targets)


def _packed_layouts(sequences: Sequences, trained: Index, config: MicroBatchConfig) -> list[Layout]:
    layouts: list[Layout] = []
    needed = sequences.needed
    pending: list[int] = []
    for s in [*trained[np.argsort(-needed[trained], kind="stable")].tolist(), -1]:
        if pending and (s < 0 or needed[[*pending, s]].sum() > config.max_tokens):
            chosen = np.array(pending)
            ends = np.cumsum(needed[chosen])
            token_ids = sequences.tokens[_ranges(sequences.starts[chosen], needed[chosen])][None]
            positions = _ranges(np.zeros_like(chosen), needed[chosen])[None]
            sources, targets = _read(sequences, chosen, ends - needed[chosen] - sequences.starts[chosen])
            layouts.append(Layout("packed", token_ids, positions, None, sources, targets))
            pending = []
        pending.append(s)
    return layouts


def _read(sequences: Sequences, chosen: Index, shift: Index) -> tuple[Index, Targets]:
    """Where the targets of the chosen sequences are predicted: one before the trained token, moved by `shift`."""
    counts = sequences.num_members[chosen]
    index = _ranges(sequences.member_starts[chosen], counts)
    sources = sequences.members[index] - 1 + np.repeat(shift, counts)
    return sources, _pick(sequences.targets, index)


def _ranges(starts: Index, lengths: Index) -> Index:
    """The integers of all [start, start + length) one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
