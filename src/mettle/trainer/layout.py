"""From a flat batch to what a device computes: rows of tokens, and the targets that are read from them.

Parts: `Sequences` (the batch's sequences, with what each token trains), `Branches` (what sequences of a row begin with
alike), `Layout` (the arrays of one forward pass), `lay_out` (which makes them of the sequences of a pass; `passes` says
which those are). Who ships a batch knows neither ranks nor devices. Three forms:

- padded: one sequence a row, sorted by length; causal attention, padding on the right is never looked at;
- shared: sequences that begin with the same untrained tokens stand behind one copy of them, each seeing the copy and
  itself; a group of rollouts pays for its prompt once, and for what its answers begin with alike (`Branches`);
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
ALL = np.iinfo(np.int64).max
"""How far a token looks into its own sequence and its prompt: causality says the rest."""


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

    `segments` is set for the form "shared": 0 for the common prompt, 1.. for what follows it, -1 for padding; `reach`
    (see `Branches.reach`) is set where segments look into each other, because their sequences begin alike.
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
    reach: Index | None = None


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
class Branches:
    """What sequences of rows that lie end to end have in `common` [C] with those before them, 0 for a row's first.

    In a causal model a token's state depends on what stands before it alone. So equal beginnings have equal states,
    are computed once, and their gradients add up: a policy that has learnt most of its task gives few different
    answers, and those begin alike. Each sequence is compared with the one before it, in whatever order they stand: the
    order changes how much is shared, never what is computed.
    """

    common: Index

    @classmethod
    def of(cls, tokens: Index, starts: Index, lengths: Index, row_of: Index) -> Branches:
        """`starts` and `lengths` [C] are of what each sequence has behind the prompt of the row that it is in."""
        common = _common_with_last(tokens, starts, lengths)
        common[1:][row_of[1:] != row_of[:-1]] = 0
        return cls(common)

    @property
    def are_there(self) -> bool:
        return bool(self.common.any())

    def holders(self, owners: Index, depths: Index) -> Index:
        """Which sequence has brought token `depths[i]` (counted behind the prompt) of sequence `owners[i]`."""
        found = owners.copy()
        left = np.flatnonzero(depths < self.common[found])
        while len(left):
            found[left] -= 1
            left = left[depths[left] < self.common[found[left]]]
        return found

    def reach(self, prompts: Index, opens: Index, sizes: Index) -> Index:
        """[B, S + 2, S + 2] up to which position a token of segment i sees those of segment j.

        Segment 0 is the prompt, the sequences of a row are 1.. in their order, and the last is padding. `prompts` [C]
        are the lengths of the prompts; row b has the sequences from `opens[b]` on, `sizes[b]` of them.
        """
        most = int(sizes.max())
        found = np.zeros((len(sizes), most + 2, most + 2), np.int64)
        found[:, :, 0] = ALL
        diagonal = np.arange(most + 2)
        found[:, diagonal, diagonal] = ALL
        for i in range(2, most + 1):
            at = np.minimum(opens + i - 1, len(prompts) - 1)
            limit = np.where(i <= sizes, prompts[at] + self.common[at], 0)
            found[:, i, 1:i] = np.minimum(found[:, i - 1, 1:i], limit[:, None])
        return found


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

    def branches(self, chosen: Index, row_of: Index) -> Branches:
        """What sequences `chosen` [C], which stand in the rows `row_of` [C], have in common behind their prompts.

        Nothing where experts are replayed: equal tokens of two rollouts may have taken different ones.
        """
        if self.columns["experts"].size:
            return Branches(np.zeros_like(row_of))
        prompts = self.prompts[chosen]
        return Branches.of(self.tokens, self.starts[chosen] + prompts, self.needed[chosen] - prompts, row_of)

    def in_order(self, chosen: Index, group_of: Index) -> Index:
        """`chosen` [C] group by group, each group's as a dictionary has what follows their prompts."""
        prompts = self.prompts[chosen]
        return chosen[_in_order(self.tokens, self.starts[chosen] + prompts, self.needed[chosen] - prompts, group_of)]


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

    Here b begins with the first token of a, which is not computed again:

    tokens     p p p p a a b b .      segments   0 0 0 0 1 1 2 2 -1
    positions  0 1 2 3 4 5 5 6 0      columns    of a: 4, of b: 6
    """
    chosen = np.concatenate(rows)  # [C], row by row
    sizes = np.array([len(row) for row in rows])  # [B]
    firsts = np.array([row[0] for row in rows])  # [B], whose prompt is copied
    row_of = np.repeat(np.arange(len(rows)), sizes)  # [B] -> [C]
    opens = np.cumsum(sizes) - sizes  # [B], the first of each row in [C]
    branches = sequences.branches(chosen, row_of)
    prompts = sequences.prompts[chosen]  # [C]
    begins = prompts + branches.common  # [C], the position of its first own token
    own = sequences.needed[chosen] - begins  # [C]
    ahead = np.cumsum(own) - own  # [C], own tokens of the sequences before it, in all rows
    columns = prompts + ahead - np.repeat(ahead[opens], sizes)  # [C], where its own tokens begin in its row
    ordinal = np.arange(len(chosen)) - np.repeat(opens, sizes) + 1  # [C], 1.. in its row
    width = int((columns + own).max())

    token_ids, positions = np.zeros((2, len(rows), width), np.int64)  # [B, T] each
    segments = np.full((len(rows), width), -1, np.int64)  # [B, T]
    row_starts = np.arange(len(rows)) * width  # [B], in the flat [B * T]
    head, body = _ranges(row_starts, sequences.prompts[firsts]), _ranges(row_of * width + columns, own)
    from_head = _ranges(sequences.starts[firsts], sequences.prompts[firsts])  # in [N], as long as `head`
    from_body = _ranges(sequences.starts[chosen] + begins, own)  # in [N], as long as `body`
    for into, came_from in ((head, from_head), (body, from_body)):
        token_ids.ravel()[into] = sequences.tokens[came_from]
    positions.ravel()[head] = _ranges(np.zeros_like(firsts), sequences.prompts[firsts])
    positions.ravel()[body] = _ranges(begins, own)
    segments.ravel()[head] = 0
    segments.ravel()[body] = np.repeat(ordinal, own)

    shift = row_of * width + columns - begins - sequences.starts[chosen]  # [C], from a place in [N] to one in [B * T]
    sources, targets, order, num_labels = _read(sequences, chosen, shift)
    # What it begins with alike is where the sequence has it that brought it.
    depths = sources - (shift + sequences.starts[chosen] + prompts)[targets.sequences]  # [K], behind the prompt
    holders = branches.holders(targets.sequences, np.maximum(depths, 0))
    sources = depths + (shift + sequences.starts[chosen] + prompts)[holders]
    # A first token behind the prompt is predicted by the prompt's last.
    sources[depths < 0] = (row_of * width + prompts - 1)[targets.sequences[depths < 0]]
    reach = branches.reach(prompts, opens, sizes) if branches.are_there else None
    return Layout("shared", token_ids, positions, segments, sources, targets, order, num_labels, reach)


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


# What sequences of a row have in common


def _common_with_last(tokens: Index, starts: Index, lengths: Index) -> Index:
    """[C] how many tokens each run of `tokens` [N] begins with that the run before it begins with, too; 0 for the
    first."""
    found = np.zeros_like(lengths)
    if len(lengths) < 2:
        return found
    shorter = np.minimum(lengths[1:], lengths[:-1])
    offsets = _ranges(np.zeros_like(shorter), shorter + 1)  # one place behind each, where they differ for certain
    ends = np.cumsum(shorter + 1)
    places = np.minimum(_ranges(starts[1:], shorter + 1), len(tokens) - 1)
    before = np.minimum(_ranges(starts[:-1], shorter + 1), len(tokens) - 1)
    differs = tokens[places] != tokens[before]
    differs[ends - 1] = True
    found[1:] = np.minimum.reduceat(np.where(differs, offsets, ALL), ends - shorter - 1)
    return found


def _in_order(tokens: Index, starts: Index, lengths: Index, group_of: Index) -> Index:
    """[C] the runs group by group, each group's as a dictionary has them: next to those that begin most alike."""
    data = tokens.astype(">i8").tobytes()  # which compare as the numbers do
    spans = zip(group_of.tolist(), (8 * starts).tolist(), (8 * (starts + lengths)).tolist(), strict=True)
    keys = [(group, data[start:end]) for group, start, end in spans]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)


def _ranges(starts: Index, lengths: Index) -> Index:
    """The integers of all [start, start + length) one after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)
