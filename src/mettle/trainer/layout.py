"""From a flat batch to what a device computes: rows of tokens, and the targets that are read from them.

Parts: `Sequences` (the batch's sequences, with what each token trains), `deal_sequences` (which rank computes which),
`plan_layouts` (which sequences share a forward pass, and how), `Layout` (the arrays of one forward pass). This is the
only place where a batch is cut: who ships it knows neither ranks nor devices. Three forms:

- padded: one sequence a row, sorted by length; causal attention, padding on the right is never looked at;
- shared: sequences that begin with the same untrained tokens stand behind one copy of them, each seeing the copy and
  itself; a group of rollouts pays for its prompt once;
- packed: all sequences in one row with restarting positions, for kernels of variable length.

A sequence is cut after the last token that predicts a trained one, and left out if it trains nothing. Only hidden
states that predict a trained token reach the vocabulary head. Invariants: the form changes cost, never the loss; a
sequence is never split over ranks or passes, so a loss may compare its tokens with each other.

Legend: N flat tokens, S sequences, B rows, T columns, K trained tokens; C sequences chosen for a pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import COLUMNS, Batch, BoolArray, FloatArray, TokenRow, filled
from mettle.trainer.config import MicroBatchConfig

Index = NDArray[np.int64]
Form = Literal["padded", "shared", "packed"]


@dataclass(frozen=True, slots=True)
class Targets(TokenRow[NDArray[Any], FloatArray, BoolArray]):
    """What is known of the K trained tokens; `token_ids` are what is to be predicted.

    A component's weight is 0 where the token is no member of it. `sequences[k]` is the number of target k's sequence
    in the pass, from 0 to less than K.
    """

    sequences: Index


def bare_targets(token_ids: Index) -> Targets:
    """Targets that train nothing."""
    columns = filled(len(token_ids), {}) | {"token_ids": token_ids}
    return Targets(sequences=np.zeros(len(token_ids), np.int64), **columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """One forward pass: the hidden state at flat position `sources[k]` of [B, T] predicts target k.

    `segments` is set for the form "shared": 0 for the common prompt, 1.. for what follows it, -1 for padding.
    `order[k]` is the place of target k among all of the data's. `num_labels` targets in a row have the same source.
    """

    form: Form
    token_ids: Index
    positions: Index
    segments: Index | None
    sources: Index
    targets: Targets
    order: Index
    num_labels: int = 1


@dataclass(frozen=True, slots=True)
class ComponentCounts:
    """Member tokens of each loss component over the whole batch, all ranks.

    `non_finite` tokens have a weight in rl or ref_kl but no logprob of a sampler (or of the reference, in ref_kl): they
    are no members, so they neither train nor count.
    """

    rl: int
    ce: int
    ref_kl: int
    non_finite: int = 0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Flat tokens [N], and per sequence [S] where it starts, what is computed of it, and what it trains.

    `prompts[s]` tokens lead up to the first trained one, `needed[s]` tokens are inputs, `num_members[s]` are trained;
    sequence s trains the flat positions `members[member_starts[s] : member_starts[s] + num_members[s]]`, whose columns
    are in `columns` at the same places. Each trained position stands there `num_labels` times in a row.
    """

    tokens: Index
    starts: Index
    prompts: Index
    needed: Index
    members: Index
    member_starts: Index
    num_members: Index
    columns: dict[str, NDArray[Any]]
    counts: ComponentCounts
    num_labels: int = 1

    @classmethod
    def of(cls, batch: Batch) -> Sequences:
        """Find out what of a batch trains."""
        lengths = batch.sequence_lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths  # [S]
        weights, counts = _member_weights(batch, starts[lengths > 0])
        is_member = np.logical_or.reduce([weight != 0 for weight in weights.values()])  # [N]
        members = np.flatnonzero(is_member)  # [K]
        owners = np.searchsorted(starts, members, side="right") - 1  # [K]
        # Empty sequences share their start with the next one; searchsorted then names the last of them, the real one.
        num_members = np.bincount(owners, minlength=len(lengths)).astype(np.int64)  # [S]
        member_starts = np.cumsum(num_members) - num_members
        has_members = num_members > 0
        prompts, needed = np.zeros_like(starts), np.zeros_like(starts)
        prompts[has_members] = members[member_starts[has_members]] - starts[has_members]
        last = (member_starts + num_members - 1)[has_members]
        needed[has_members] = members[last] - starts[has_members]
        columns = {name: weights.get(name, getattr(batch, name))[members] for name in COLUMNS}  # [N] -> [K]
        tokens = batch.token_ids.astype(np.int64)
        columns["token_ids"] = tokens[members]
        return cls(tokens, starts, prompts, needed, members, member_starts, num_members, columns, counts)


def _member_weights(batch: Batch, first: Index) -> tuple[dict[str, FloatArray], ComponentCounts]:
    """The weights [N] of the components, 0 where a token is no member, and their counts.

    The tokens at `first` have nothing that predicts them, so they are members of nothing. A token that has to be
    compared with a sampler or a reference is a member when what it is compared with is known, or not at all.
    """
    has_context = np.ones(len(batch.token_ids), bool)
    has_context[first] = False
    is_known = batch.loss_mask & np.isfinite(batch.logprobs)
    wants_rl = batch.loss_mask & (batch.rl_weights != 0) & has_context
    wants_ref_kl = (batch.ref_kl_weights != 0) & has_context
    is_ce = (batch.ce_weights != 0) & has_context
    is_rl, is_ref_kl = wants_rl & is_known, wants_ref_kl & is_known & np.isfinite(batch.ref_logprobs)
    weights: dict[str, FloatArray] = {
        "rl_weights": np.where(is_rl, batch.rl_weights, np.float32(0)),
        "ce_weights": np.where(is_ce, batch.ce_weights, np.float32(0)),
        "ref_kl_weights": np.where(is_ref_kl, batch.ref_kl_weights, np.float32(0)),
    }
    unknown = (wants_rl & ~is_rl) | (wants_ref_kl & ~is_ref_kl)
    return weights, ComponentCounts(*(int(mask.sum()) for mask in (is_rl, is_ce, is_ref_kl, unknown)))


def deal_sequences(sequences: Sequences, num_ranks: int) -> list[Index]:
    """The sequences of each rank that train: longest first to the rank that has the least to compute, then in order."""
    trained = np.flatnonzero(sequences.num_members)
    if num_ranks == 1:
        return [trained]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for s in trained[np.argsort(-sequences.needed[trained], kind="stable")].tolist():
        rank = loads.index(min(loads))
        ranks[rank].append(s)
        loads[rank] += int(sequences.needed[s])
    return [np.sort(np.array(members, np.int64)) for members in ranks]


def plan_layouts(
    sequences: Sequences, chosen: Index, config: MicroBatchConfig, *, attention_cost: float, is_packed: bool = False
) -> list[Layout]:
    """Cut the chosen sequences [C] into forward passes.

    `attention_cost` is the price of one query-key pair in tokens (see `model.Traits`).
    """
    if not len(chosen):
        return []
    if is_packed:
        return _packed_layouts(sequences, chosen, config)
    rows: list[Index] = []
    if config.share_prompts:
        rows, chosen = _shared_rows(sequences, chosen, attention_cost, config.max_tokens)
    shared = [_shared_layout(sequences, chunk) for chunk in _chunks(rows, _row_lengths(sequences, rows), config)]
    alone = [np.array([s]) for s in chosen]
    padded = [
        _padded_layout(sequences, np.concatenate(chunk)) for chunk in _chunks(alone, sequences.needed[chosen], config)
    ]
    return shared + padded


def empty_layout() -> Layout:
    """A pass that trains nothing, for a rank that has fewer passes than its peers. One token, no target."""
    one, none = np.zeros((1, 1), np.int64), np.zeros(0, np.int64)
    return Layout("padded", one, one, None, none, bare_targets(none), none)


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
    needed = sequences.needed[chosen]  # [C]; one row each, so C = B
    num_rows, width = len(chosen), int(needed.max())
    token_ids = np.zeros((num_rows, width), np.int64)  # [B, T]
    row_starts = np.arange(num_rows) * width  # [B], in the flat [B * T]
    token_ids.ravel()[_ranges(row_starts, needed)] = sequences.tokens[_ranges(sequences.starts[chosen], needed)]
    positions = np.broadcast_to(np.arange(width), token_ids.shape)  # [B, T]
    read = _read(sequences, chosen, row_starts - sequences.starts[chosen])
    return Layout("padded", token_ids, positions, None, *read)


def _shared_layout(sequences: Sequences, rows: list[Index]) -> Layout:
    """Row b: the prompt that its sequences have in common, then what each has of its own.

    tokens     p p p p a a b b b .      segments   0 0 0 0 1 1 2 2 2 -1
    positions  0 1 2 3 4 5 4 5 6 0      columns    of a: 4, of b: 6
    """
    chosen = np.concatenate(rows)  # [C], row by row
    sizes = np.array([len(row) for row in rows])  # [B]
    width = int(_row_lengths(sequences, rows).max())
    firsts = np.array([row[0] for row in rows])  # [B], whose prompt is copied
    prompts, tails = sequences.prompts[chosen], (sequences.needed - sequences.prompts)[chosen]  # [C]
    row_of = np.repeat(np.arange(len(rows)), sizes)  # [B] -> [C]
    opens = np.cumsum(sizes) - sizes  # [B], the first of each row in [C]
    ahead = np.cumsum(tails) - tails  # [C], own tokens of the sequences before it, in all rows
    columns = prompts + ahead - np.repeat(ahead[opens], sizes)  # [C], where its own tokens begin in its row
    ordinal = np.arange(len(chosen)) - np.repeat(opens, sizes) + 1  # [C], 1.. in its row

    token_ids, positions = np.zeros((2, len(rows), width), np.int64)  # [B, T] each
    segments = np.full((len(rows), width), -1, np.int64)  # [B, T]
    row_starts = np.arange(len(rows)) * width  # [B], in the flat [B * T]
    head, body = _ranges(row_starts, sequences.prompts[firsts]), _ranges(row_of * width + columns, tails)
    from_head = _ranges(sequences.starts[firsts], sequences.prompts[firsts])  # in [N], as long as `head`
    from_body = _ranges(sequences.starts[chosen] + prompts, tails)  # in [N], as long as `body`
    for into, came_from in ((head, from_head), (body, from_body)):
        token_ids.ravel()[into] = sequences.tokens[came_from]
    positions.ravel()[head] = _ranges(np.zeros_like(firsts), sequences.prompts[firsts])
    positions.ravel()[body] = _ranges(prompts, tails)
    segments.ravel()[head] = 0
    segments.ravel()[body] = np.repeat(ordinal, tails)

    shift = row_of * width + columns - prompts - sequences.starts[chosen]  # [C], from a place in [N] to one in [B * T]
    sources, targets, order, num_labels = _read(sequences, chosen, shift)
    # The first trained token of a sequence is predicted by the last token of the common prompt.
    opening = np.cumsum(sequences.num_members[chosen]) - sequences.num_members[chosen]  # [C], in [K]
    sources[opening] = row_of * width + prompts - 1
    return Layout("shared", token_ids, positions, segments, sources, targets, order, num_labels)


def _packed_layouts(sequences: Sequences, trained: Index, config: MicroBatchConfig) -> list[Layout]:
    layouts: list[Layout] = []
    needed = sequences.needed
    pending: list[int] = []
    for s in [*trained[np.argsort(-needed[trained], kind="stable")].tolist(), -1]:
        if pending and (s < 0 or needed[[*pending, s]].sum() > config.max_tokens):
            chosen = np.array(pending)  # [C]
            ends = np.cumsum(needed[chosen])
            token_ids = sequences.tokens[_ranges(sequences.starts[chosen], needed[chosen])][None]  # [1, T]
            positions = _ranges(np.zeros_like(chosen), needed[chosen])[None]  # [1, T]
            read = _read(sequences, chosen, ends - needed[chosen] - sequences.starts[chosen])
            layouts.append(Layout("packed", token_ids, positions, None, *read))
            pending = []
        pending.append(s)
    return layouts


def _read(sequences: Sequences, chosen: Index, shift: Index) -> tuple[Index, Targets, Index, int]:
    """Where the targets of the chosen sequences [C] are predicted: one before the trained token, moved by `shift`.

    Returns a layout's sources, targets, order and number of labels.
    """
    counts = sequences.num_members[chosen]  # [C]
    index = _ranges(sequences.member_starts[chosen], counts)  # [K] of the pass, in the batch's [K]
    sources = sequences.members[index] - 1 + np.repeat(shift, counts)
    numbers = np.repeat(np.arange(len(chosen)), counts)  # [C] -> [K]
    columns = {name: column[index] for name, column in sequences.columns.items()}
    return sources, Targets(sequences=numbers, **columns), index, sequences.num_labels


def _ranges(starts: Index, lengths: Index) -> Index:
    """The integers of all [start, start + length) one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
