"""Which sequences go through the network together, and on which rank.

Parts: `plan_passes` (a batch's sequences to every rank's forward passes), `plan_cheapest` (the same, and how much of
the prompts is shared), `ForwardPass`, `rows_behind_prompts` (which sequences share a prompt), `cut` and `cut_evenly`
(rows to passes). All of it is for the layout that is really computed:
a pass costs what its rows cost at their padded width, attention's square included, and every rank plans it for all.

Rows of about the same length share a pass, so that little is padded. With W ranks the passes are a multiple of W, as
long as there are rows enough, and are dealt by `dealing`: each rank has equally many, for their collectives go in step,
and about the same to compute. Invariant: the plan changes cost, never the loss; a sequence is in one pass whole.

Legend: S sequences, R rows, P passes, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.dealing import deal
from mettle.trainer.layout import Form, Index, Sequences

PASS_PRICE = 111.0
"""What a pass of the tiny preset costs beside its tokens, in tokens; of other models see `pass_price`."""
GRADIENT_PRICE, LAYER_PRICE = 36.0, 9.0e6
"""Measured: adding a pass's gradient up costs what 36 tokens do, and starting a layer what 9 million weights do to one
token (docs/explanation/training.md has the figures)."""
GRAINS = (1, 2, 4)
"""Rows behind a prompt cost at most a rank's share over one of these; which, is tried."""


MUCH_CHEAPER = 0.8
"""What a plan must cost at most, beside that of whole prompts or whole answers, to be taken in its place."""


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass: `rows`, each with the sequences in it, and what it costs in tokens."""

    form: Form
    rows: list[Index]
    cost: float


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one form, longest first: R rows with their `widths` and what each costs in a pass of its own width."""

    form: Form
    rows: list[Index]
    widths: Index
    prices: NDArray[np.float64]
    max_rows: int
    max_tokens: int
    pass_price: float = PASS_PRICE

    @classmethod
    def of(
        cls,
        form: Form,
        rows: list[Index],
        widths: Index,
        attention_cost: float,
        config: MicroBatchConfig,
        pass_price: float = PASS_PRICE,
    ) -> _Rows:
        order = np.argsort(-widths, kind="stable")
        widths = widths[order]
        # A mask of its own makes attention look at all pairs; causal attention looks at half of them.
        pairs = attention_cost if form == "shared" else attention_cost / 2
        prices = widths + pairs * widths.astype(np.float64) ** 2
        ordered = [rows[i] for i in order]
        return cls(form, ordered, widths, prices, config.max_rows, config.max_tokens, pass_price)

    def most_from(self, first: int) -> int:
        """Rows that a pass which begins with row `first` may have."""
        fitting = self.max_tokens // max(1, int(self.widths[first]))
        return max(1, min(self.max_rows, fitting, len(self.rows) - first))

    def cost(self, first: int, end: int) -> float:
        """Of a pass of rows `first` to before `end`: all are as wide as the first."""
        return self.pass_price + (end - first) * float(self.prices[first])

    def passes(self, bounds: Iterable[tuple[int, int]]) -> list[ForwardPass]:
        return [ForwardPass(self.form, self.rows[first:end], self.cost(first, end)) for first, end in bounds]


def pass_price(num_layers: int, num_weights: int) -> float:
    """What a pass costs beside its tokens, in tokens: of the shape alone, so that a resumed run cuts as before."""
    return GRADIENT_PRICE + LAYER_PRICE * num_layers / max(1, num_weights)


def plan_passes(
    sequences: Sequences,
    config: MicroBatchConfig,
    *,
    attention_cost: float,
    price: float = PASS_PRICE,
    num_ranks: int = 1,
    is_packed: bool = False,
) -> list[list[ForwardPass]]:
    """The passes of each rank, costliest first; a rank may have fewer than others only where there are no more rows.

    `attention_cost` is the price of one query-key pair in tokens, `price` that of a pass (see `model.Traits`).
    """
    trained = np.flatnonzero(sequences.num_members)
    if not len(trained):
        return [[] for _ in range(num_ranks)]
    if is_packed:
        return _dealt(_packed(sequences, trained, config, attention_cost, price, num_ranks), num_ranks)
    found: list[list[list[ForwardPass]]] = []
    share = math.inf
    for grain in GRAINS if num_ranks > 1 and config.share_prompts else GRAINS[:1]:
        kinds = _kinds(sequences, trained, config, attention_cost, price, share / grain)
        if num_ranks > 1 and share == math.inf:
            share = sum(float(kind.prices.sum()) for kind in kinds) / num_ranks
            kinds = _kinds(sequences, trained, config, attention_cost, price, share / grain)
        found += [_dealt(passes, num_ranks) for passes in _cuts(kinds, num_ranks)]
    return min(found, key=lambda ranks: _duration(ranks, price))


def plan_cheapest(
    sequences: Sequences, config: MicroBatchConfig, *, price: float = PASS_PRICE, num_ranks: int = 1, **options: Any
) -> tuple[Sequences, list[list[ForwardPass]]]:
    """`plan_passes`, and the sequences as its rows are to be laid out.

    Prompts are shared whole, or, where that is much cheaper, as far as they are those of all: sequences with questions
    of their own may begin with the same long instructions. What is cheaper is asked of one rank, so that any number of
    ranks shares alike.
    """
    if config.share_prompts and not options.get("is_packed") and sequences.num_members.any():
        common = sequences.behind_common_prefix()
        whole, other = (plan_passes(each, config, price=price, **options) for each in (sequences, common))
        is_cheaper = _duration(other, price) < MUCH_CHEAPER * _duration(whole, price)
        if num_ranks == 1:
            return (common, other) if is_cheaper else (sequences, whole)
        sequences = common if is_cheaper else sequences
    return sequences, plan_passes(sequences, config, price=price, num_ranks=num_ranks, **options)


def _duration(ranks: Sequence[Sequence[ForwardPass]], price: float) -> float:
    """What the step takes, in tokens: in each round all wait for the costliest."""
    most = max(len(passes) for passes in ranks)
    return sum(max(passes[i].cost if i < len(passes) else price for passes in ranks) for i in range(most))


def _dealt(passes: list[ForwardPass], num_ranks: int) -> list[list[ForwardPass]]:
    """The passes of each rank. What is missing to a multiple of the ranks is dealt as nothing, and left out again."""
    if num_ranks == 1:
        return [sorted(passes, key=lambda each: -each.cost)]
    missing = -len(passes) % num_ranks
    costs = np.array([each.cost for each in passes] + [0.0] * missing)
    return [[passes[i] for i in members if i < len(passes)] for members in deal(costs, num_ranks)]


# Rows


def _kinds(
    sequences: Sequences,
    trained: Index,
    config: MicroBatchConfig,
    attention_cost: float,
    price: float,
    max_cost: float,
) -> list[_Rows]:
    """The rows behind shared prompts, and those of one sequence each."""
    rows: list[Index] = []
    alone = trained
    if config.share_prompts:
        rows, alone = rows_behind_prompts(sequences, trained, attention_cost, config.max_tokens, max_cost)
    lengths = _lengths(sequences, rows)
    kinds = [
        _Rows.of("shared", rows, lengths, attention_cost, config, price),
        _Rows.of("padded", [np.array([s]) for s in alone], sequences.needed[alone], attention_cost, config, price),
    ]
    return [kind for kind in kinds if kind.rows]


def rows_behind_prompts(
    sequences: Sequences, trained: Index, attention_cost: float, max_tokens: int, max_cost: float = math.inf
) -> tuple[list[Index], Index]:
    """Rows of sequences behind one prompt, where that is cheaper, and the sequences that stay alone.

    No row costs more than `max_cost`, if it can be helped.
    """
    groups: dict[bytes, list[int]] = {}
    for s in trained.tolist():
        start = sequences.starts[s]
        groups.setdefault(sequences.tokens[start : start + sequences.prompts[s]].tobytes(), []).append(s)
    members = [np.array(group) for group in groups.values()]
    rows: list[Index] = []
    alone: list[Index] = []
    longest = max_tokens if max_cost == math.inf else min(max_tokens, _length_at(max_cost, attention_cost))
    for group, beginning in zip(members, _alike(sequences, members), strict=True):
        size = _row_size(sequences, group, attention_cost, longest)
        found = _rows_of_group(sequences, group, math.ceil(len(group) / size), longest)
        if beginning is not None:
            found = _cheaper(sequences, found, beginning, attention_cost, longest)
        if len(found) == len(group):
            alone.append(group)
        else:
            rows += found
    return rows, np.concatenate(alone) if alone else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Alike:
    """A group in the order in which its sequences have most in `common` [C] with those before them, behind the prompt;
    each brings so many tokens of its `own` [C]."""

    group: Index
    common: Index
    own: Index

    def rows(self, number: int) -> tuple[list[Index], Index]:
        """The group in at most `number` rows of about the same length, and how long each is behind the prompt."""
        behind = np.cumsum(self.own)
        # A row ends with the sequence in which its share of all that is computed ends.
        ends = np.searchsorted(behind, behind[-1] * np.arange(1, number) / number) + 1
        firsts = np.unique(np.append(0, ends[ends < len(self.group)]))
        # The first of a row has nobody before it.
        return np.split(self.group, firsts[1:]), np.add.reduceat(self.own, firsts) + self.common[firsts]


def _alike(sequences: Sequences, groups: list[Index]) -> list[_Alike | None]:
    """What the sequences of each group have in common; None where that is nothing."""
    chosen = np.concatenate(groups)
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    chosen = sequences.in_order(chosen, group_of)
    common = sequences.branches(chosen, group_of).common
    own = (sequences.needed - sequences.prompts)[chosen] - common
    ends = np.cumsum([len(group) for group in groups])[:-1]
    cut = (np.split(array, ends) for array in (chosen, common, own))
    return [_Alike(*each) if each[1].any() else None for each in zip(*cut, strict=True)]


def _cheaper(
    sequences: Sequences, rows: list[Index], alike: _Alike, attention_cost: float, longest: int
) -> list[Index]:
    """`rows` of a group, in which each sequence is computed whole, or rows of those that begin alike where that is
    much cheaper and none is over `longest`."""
    prompt, size = int(sequences.prompts[alike.group[0]]), len(alike.group)
    number = math.ceil(size / _row_size_of(prompt, float(alike.own.mean()), size, attention_cost, longest))
    while number < size:
        other, lengths = alike.rows(number)
        lengths = lengths + prompt
        if int(lengths.max()) <= longest:
            tails = sequences.needed - sequences.prompts
            whole = np.array([prompt + tails[row].sum() for row in rows])
            cost = _cost_of_rows(rows, whole, attention_cost)
            return other if _cost_of_rows(other, lengths, attention_cost) < MUCH_CHEAPER * cost else rows
        number += 1
    return rows


def _cost_of_rows(rows: list[Index], lengths: Index, attention_cost: float) -> float:
    is_alone = np.array([len(row) == 1 for row in rows])  # causal attention looks at half of the pairs
    pairs = lengths.astype(np.float64) ** 2 / (1 + is_alone)
    return float((lengths + attention_cost * pairs).sum())


def _lengths(sequences: Sequences, rows: list[Index]) -> Index:
    """[R] the tokens of each row that are computed."""
    if not rows:
        return np.zeros(0, np.int64)
    chosen = np.concatenate(rows)
    sizes = np.array([len(row) for row in rows])
    branches = sequences.branches(chosen, np.repeat(np.arange(len(rows)), sizes))
    own = (sequences.needed - sequences.prompts)[chosen] - branches.common
    opens = np.cumsum(sizes) - sizes
    lengths: Index = sequences.prompts[chosen[opens]] + np.add.reduceat(own, opens)
    return lengths


def _rows_of_group(sequences: Sequences, group: Index, number: int, longest: int) -> list[Index]:
    """The group in at least `number` rows of about the same length, so that little is padded, none over `longest`."""
    tails = sequences.needed[group] - sequences.prompts[group]
    by_length = np.argsort(-tails, kind="stable")
    prompt = int(sequences.prompts[group[0]])
    while True:
        dealt = [by_length[i::number] for i in range(number)]
        if number == len(group) or prompt + max(int(tails[row].sum()) for row in dealt) <= longest:
            return [np.sort(group[row]) for row in dealt]
        number += 1


def _length_at(cost: float, attention_cost: float) -> int:
    """The length of a shared row that costs this much."""
    return int((math.sqrt(1 + 4 * attention_cost * cost) - 1) / (2 * attention_cost))


def _row_size(sequences: Sequences, group: Index, attention_cost: float, max_tokens: int) -> int:
    """How many sequences of a group share a row, where each is computed behind the prompt whole."""
    prompt, tail = int(sequences.prompts[group[0]]), float((sequences.needed - sequences.prompts)[group].mean())
    return _row_size_of(prompt, tail, len(group), attention_cost, max_tokens)


def _row_size_of(prompt: int, tail: float, number: int, attention_cost: float, max_tokens: int) -> int:
    """How many of `number` sequences share a row; 1 when sharing costs more than it saves.

    A row of m sequences with prompt P and s tokens each costs P + m s + a (P + m s)^2, so the cost per sequence is
    least at m = sqrt(P (1 + a P) / a) / s. Alone, causal attention looks at half the square.
    """
    best = math.sqrt(prompt * (1 + attention_cost * prompt) / attention_cost) / max(tail, 0.5)
    size = min(number, max(1, round(best)), max(1, int((max_tokens - prompt) // max(tail, 1))))
    length = prompt + size * tail
    together = (length + attention_cost * length**2) / size
    apart = (prompt + tail) + attention_cost * (prompt + tail) ** 2 / 2
    return size if together < apart else 1


# Passes


def _cuts(kinds: list[_Rows], num_ranks: int) -> list[list[ForwardPass]]:
    """Ways to cut the rows into passes, as many as the ranks take in whole rounds where there are rows enough."""
    cheapest = [each for kind in kinds for each in kind.passes(cut(kind))]
    if num_ranks == 1:
        return [cheapest]
    number = math.ceil(len(cheapest) / num_ranks) * num_ranks
    even = [each for kind, bounds in zip(kinds, cut_evenly(kinds, number), strict=True) for each in kind.passes(bounds)]
    return [_split(passes, kinds, number) for passes in (cheapest, even) if len(passes) <= number]


def cut(kind: _Rows) -> list[tuple[int, int]]:
    """The cheapest passes of rows that are next to each other: each (first row, end)."""
    num_rows = len(kind.rows)
    best = np.zeros(num_rows + 1)  # from row i on
    end_of = np.zeros(num_rows, np.int64)
    for first in range(num_rows - 1, -1, -1):
        most = kind.most_from(first)
        costs = np.arange(1, most + 1) * kind.prices[first] + best[first + 1 : first + most + 1]
        chosen = int(costs.argmin())
        best[first], end_of[first] = kind.pass_price + costs[chosen], first + chosen + 1
    bounds, first = [], 0
    while first < num_rows:
        bounds.append((first, int(end_of[first])))
        first = bounds[-1][1]
    return bounds


def cut_evenly(kinds: list[_Rows], number: int) -> list[list[tuple[int, int]]]:
    """At most `number` passes, or as few as the limits allow, of which the costliest is as cheap as can be."""
    low = max(kind.cost(0, 1) for kind in kinds)
    high = max(kind.cost(0, kind.most_from(0)) for kind in kinds) + kinds[0].pass_price
    found = _within(kinds, high)
    for _ in range(24):
        middle = (low + high) / 2
        tried = _within(kinds, middle)
        if sum(map(len, tried)) <= number:
            high, found = middle, tried
        else:
            low = middle
    return found


def _within(kinds: list[_Rows], bound: float) -> list[list[tuple[int, int]]]:
    found = []
    for kind in kinds:
        bounds, first = [], 0
        while first < len(kind.rows):
            fitting = max(1, int((bound - kind.pass_price) / float(kind.prices[first])))
            bounds.append((first, first + min(fitting, kind.most_from(first))))
            first = bounds[-1][1]
        found.append(bounds)
    return found


def _split(passes: list[ForwardPass], kinds: list[_Rows], number: int) -> list[ForwardPass]:
    """Halve the costliest pass that has several rows until there are `number`, or none has."""
    price = kinds[0].pass_price
    prices = {id(row): float(kind.prices[i]) for kind in kinds for i, row in enumerate(kind.rows)}
    passes = list(passes)
    while len(passes) < number:
        several = [i for i, each in enumerate(passes) if len(each.rows) > 1]
        if not several:
            break
        each = passes.pop(max(several, key=lambda i: passes[i].cost))
        by_row = [prices[id(row)] for row in each.rows]
        size = len(by_row)
        at = min(range(1, size), key=lambda k: max(k * by_row[0], (size - k) * by_row[k]))
        passes += [
            ForwardPass(each.form, each.rows[:at], price + at * by_row[0]),
            ForwardPass(each.form, each.rows[at:], price + (size - at) * by_row[at]),
        ]
    return passes


def _packed(
    sequences: Sequences,
    trained: Index,
    config: MicroBatchConfig,
    attention_cost: float,
    price: float,
    num_ranks: int,
) -> list[ForwardPass]:
    """Rows of whole sequences end to end: as few rounds as the limit allows, and equally costly passes in them."""
    needed = sequences.needed[trained]
    prices = needed + attention_cost / 2 * needed.astype(np.float64) ** 2
    order = np.argsort(-prices, kind="stable").tolist()
    number = math.ceil(max(1, int(needed.sum())) / config.max_tokens / num_ranks) * num_ranks
    while True:
        members = _into_bins(order, needed, prices, min(number, len(trained)), config.max_tokens)
        if members is not None:
            break
        number += num_ranks
    return [
        ForwardPass("packed", [trained[np.array(chosen)]], price + float(prices[chosen].sum())) for chosen in members
    ]


def _into_bins(
    order: list[int], needed: Index, prices: NDArray[np.float64], number: int, max_tokens: int
) -> list[list[int]] | None:
    """Costliest first, each into the cheapest bin that has room; one that is longer than the limit goes alone."""
    loads, rooms = np.zeros(number), np.full(number, max_tokens, np.int64)
    bins: list[list[int]] = [[] for _ in range(number)]
    for i in order:
        has_room = (rooms >= needed[i]) | (rooms == max_tokens)
        if not has_room.any():
            return None
        chosen = int(np.where(has_room, loads, np.inf).argmin())
        bins[chosen].append(i)
        loads[chosen] += prices[i]
        rooms[chosen] -= needed[i]
    return [members for members in bins if members]
