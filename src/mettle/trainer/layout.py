"""From a flat batch to what a device computes: rows of tokens, and the targets that are read from them.

Parts: `Sequences` (the batch's sequences, with what each token trains), `Layout` (the arrays of one forward pass),
`lay_out` (which makes them of the sequences of a pass; `passes` says which those are). Who ships a batch knows neither
ranks nor devices. Three forms:

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

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mettle.records.tokens import COLUMNS, Batch, BoolArray, FloatArray, TokenRow, filled

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

    `non_finite` tokens have a weight in rl or ref_kl but no logprob of a sampler (or of the reference, in ref_kl), or
    one in distill where others have a teacher's list and they have none: they are no members, so they neither train
    nor count.
    """

    rl: int
    ce: int
    ref_kl: int
    non_finite: int = 0
    distill: int = 0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Flat tokens [N], and per sequence [S] where it starts, what is computed of it, and what it trains.

    `prompts[s]` tokens, which lead up to the first trained one or less far, may be computed once for all sequences that
    begin with them; `needed[s]` tokens are inputs, `num_members[s]` are trained;
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

    def behind_common_prefix(self) -> Sequences:
        """The same sequences with no more of a prompt than they all begin with: instructions, or a list of tools."""
        trained = np.flatnonzero(self.num_members)
        first = self.starts[trained[0]]
        length = int(self.prompts[trained].min())
        for start in self.starts[trained]:
            differs = self.tokens[start : start + length] != self.tokens[first : first + length]
            length = int(differs.argmax()) if differs.any() else length
        return replace(self, prompts=np.minimum(self.prompts, length))


def _member_weights(batch: Batch, first: Index) -> tuple[dict[str, FloatArray], ComponentCounts]:
    """The weights [N] of the components, 0 where a token is no member, and their counts.

    The tokens at `first` have nothing that predicts them, so they are members of nothing. A token that has to be
    compared with a sampler, a reference or a teacher is a member when what it is compared with is known, or not at all.
    Of a teacher in the trainer all is known.
    """
    has_context = np.ones(len(batch.token_ids), bool)
    has_context[first] = False
    is_known = batch.loss_mask & np.isfinite(batch.logprobs)
    wants_rl = batch.loss_mask & (batch.rl_weights != 0) & has_context
    wants_ref_kl = (batch.ref_kl_weights != 0) & has_context
    is_ce = (batch.ce_weights != 0) & has_context
    wants_distill = (batch.distill_weights != 0) & has_context
    is_distill = wants_distill & np.isfinite(batch.teacher_logprobs[:, :1]).all(1)
    is_rl, is_ref_kl = wants_rl & is_known, wants_ref_kl & is_known & np.isfinite(batch.ref_logprobs)
    weights: dict[str, FloatArray] = {
        "rl_weights": np.where(is_rl, batch.rl_weights, np.float32(0)),
        "ce_weights": np.where(is_ce, batch.ce_weights, np.float32(0)),
        "ref_kl_weights": np.where(is_ref_kl, batch.ref_kl_weights, np.float32(0)),
        "distill_weights": np.where(is_distill, batch.distill_weights, np.float32(0)),
    }
    unknown = (wants_rl & ~is_rl) | (wants_ref_kl & ~is_ref_kl) | (wants_distill & ~is_distill)
    return weights, ComponentCounts(*(int(mask.sum()) for mask in (is_rl, is_ce, is_ref_kl, unknown, is_distill)))


def lay_out(sequences: Sequences, form: Form, rows: list[Index]) -> Layout:
    """The arrays of a pass: each of `rows` names its sequences (one where the form is padded; packed has one row)."""
    if form == "shared":
        return _shared_layout(sequences, rows)
    return (_packed_layout if form == "packed" else _padded_layout)(sequences, np.concatenate(rows))


def empty_layout() -> Layout:
    """A pass that trains nothing, for a rank that has fewer passes than its peers. One token, no target."""
    one, none = np.zeros((1, 1), np.int64), np.zeros(0, np.int64)
    return Layout("padded", one, one, None, none, bare_targets(none), none)


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
    firsts = np.array([row[0] for row in rows])  # [B], whose prompt is copied
    prompts, tails = sequences.prompts[chosen], (sequences.needed - sequences.prompts)[chosen]  # [C]
    row_of = np.repeat(np.arange(len(rows)), sizes)  # [B] -> [C]
    opens = np.cumsum(sizes) - sizes  # [B], the first of each row in [C]
    ahead = np.cumsum(tails) - tails  # [C], own tokens of the sequences before it, in all rows
    columns = prompts + ahead - np.repeat(ahead[opens], sizes)  # [C], where its own tokens begin in its row
    ordinal = np.arange(len(chosen)) - np.repeat(opens, sizes) + 1  # [C], 1.. in its row
    width = int((columns + tails).max())

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
    # Where a sequence's own tokens begin with a trained one, that is predicted by the last token of the common prompt.
    opening = np.cumsum(sequences.num_members[chosen]) - sequences.num_members[chosen]  # [C], in [K]
    is_first = sequences.members[sequences.member_starts[chosen]] - sequences.starts[chosen] == prompts  # [C]
    sources[opening[is_first]] = (row_of * width + prompts - 1)[is_first]
    return Layout("shared", token_ids, positions, segments, sources, targets, order, num_labels)


def _packed_layout(sequences: Sequences, chosen: Index) -> Layout:
    needed = sequences.needed[chosen]  # [C]
    ends = np.cumsum(needed)
    token_ids = sequences.tokens[_ranges(sequences.starts[chosen], needed)][None]  # [1, T]
    positions = _ranges(np.zeros_like(chosen), needed)[None]  # [1, T]
    read = _read(sequences, chosen, ends - needed - sequences.starts[chosen])
    return Layout("packed", token_ids, positions, None, *read)


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
