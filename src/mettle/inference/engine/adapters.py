"""Adapters in the layout that the decoder multiplies with, and which rows of a batch they are for.

Legend: R rows, n of one adapter's rows, D hidden, X outputs of a projection, r rank. A projection is computed for all
rows at once with the base's weights; then each adapter adds x A^T B^T scale to its own rows. Where the base has several
modules as one matrix (q, k and v; gate and up), the adapter has one A for all of them and a B of blocks. A mixture's
experts have factors each, which are added to those of the adapter's rows that were sent to the expert.

Invariant: a row's numbers depend on its own adapter alone, to the last bit on a CPU: an adapter's product has at least
`min_rows()` rows like every other, and a row without one is left as it is. Narrow products are added up in an order
that changes with a row's place in memory, so ranks are filled up with zeros to a multiple of `RANK_STEP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import AdapterFile, LowRankPair
from mettle.inference.engine.architecture import ModelShape
from mettle.inference.engine.matrices import min_rows, with_rows


class NotByRow(UserError):
    """An adapter of modules that no single row can have changed; merged into its base it could be served."""


RANK_STEP = 16
Projection = Literal["qkv", "output", "gate_up", "down", "head"]
HEAD = -1
"""In place of a layer's number, for the projection `head`."""


class LowRank(NamedTuple):
    """What an adapter adds to one projection: rows x `a_t` [D, r] x `b_t` [r, X], whose scale is in `b_t`."""

    a_t: Tensor
    b_t: Tensor


class ExpertAdapter(NamedTuple):
    """What an adapter adds to one expert of a layer; None where it leaves a matrix alone."""

    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """What an adapter adds to one layer's projections; None where it leaves one alone. `experts` has one for each of
    the layer's, or none at all.
    """

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    experts: tuple[ExpertAdapter, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One version of an adapter."""

    layers: tuple[LayerAdapter, ...]
    rank: int
    head: LowRank | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that its factors take."""
        pairs = [pair for layer in self.layers for pair in _pairs(layer)] + ([self.head] if self.head else [])
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    def pair(self, layer: int, projection: Projection) -> LowRank | None:
        """What it adds to a projection of a layer, or (`HEAD`) of none."""
        low: LowRank | None = self.head if layer == HEAD else getattr(self.layers[layer], projection)
        return low


class AdapterRows(NamedTuple):
    """The rows that one adapter is for: `places` [n] of them, and `padded` with further ones to `min_rows()`."""

    weights: AdapterWeights
    places: Tensor
    padded: Tensor

    def add(self, layer: int, projection: Projection, made_RX: Tensor, inputs_RD: Tensor) -> None:
        """Add to the adapter's rows of a projection what it says, in place."""
        low = self.weights.pair(layer, projection)
        if low is not None:
            _add_rows(made_RX, self.places, inputs_RD[self.padded], low)

    def of_experts(self, layer: int, num_rows: int) -> list[ExpertRows]:
        """The adapter's factors for a layer's experts, and which of `num_rows` rows are its own."""
        experts = self.weights.layers[layer].experts
        return [ExpertRows(experts, _marked(self.places, num_rows))] if experts else []


class ExpertRows(NamedTuple):
    """What an adapter adds to a layer's experts, and which rows of the batch it is for, [R] of truth."""

    experts: tuple[ExpertAdapter, ...]
    is_own_R: Tensor

    def add(
        self, expert: int, projection: Literal["gate_up", "down"], made_nX: Tensor, inputs_nD: Tensor, rows_n: Tensor
    ) -> None:
        """Add to what an expert made of the batch's rows `rows_n` what the adapter says to its own, in place."""
        low: LowRank | None = getattr(self.experts[expert], projection)
        if low is None:
            return
        places = self.is_own_R[rows_n].nonzero()[:, 0]
        if len(places):
            _add_rows(made_nX, places, with_rows(inputs_nD[places]), low)


class RowsOfAdapters(Protocol):
    """Rows of a batch that have adapters."""

    def add(self, layer: int, projection: Projection, made_RX: Tensor, inputs_RD: Tensor) -> None:
        """Add to a projection of a layer what the rows' adapters say, in place."""

    def of_experts(self, layer: int, num_rows: int) -> list[ExpertRows]:
        """What the rows' adapters say of a layer's experts, in a batch of `num_rows`."""


class LayerRows(NamedTuple):
    """Rows that have adapters, at one layer."""

    rows: RowsOfAdapters
    layer: int

    def add(self, projection: Projection, made_RX: Tensor, inputs_RD: Tensor) -> None:
        """Add to a projection what the rows' adapters say, in place."""
        self.rows.add(self.layer, projection, made_RX, inputs_RD)

    def of_experts(self, num_rows: int) -> list[ExpertRows]:
        """What the rows' adapters say of the layer's experts."""
        return self.rows.of_experts(self.layer, num_rows)


def group_rows(adapters: Sequence[AdapterWeights | None], device: torch.device, repeat: int = 1) -> list[AdapterRows]:
    """Rows by adapter, when each of `adapters` is the one of `repeat` rows that follow each other."""
    found: dict[int, list[int]] = {}
    for place, adapter in enumerate(adapters):
        if adapter is not None:
            found.setdefault(id(adapter), []).append(place)
    groups = []
    for chosen in found.values():
        weights = adapters[chosen[0]]
        assert weights is not None, "rows without an adapter are in no group"
        rows = [place * repeat + i for place in chosen for i in range(repeat)]
        padded = torch.tensor(rows + rows[:1] * (min_rows() - len(rows)), device=device)
        groups.append(AdapterRows(weights, padded[: len(rows)], padded))
    return groups


def head_rows(adapters: Sequence[AdapterWeights | None], device: torch.device, repeat: int = 1) -> list[AdapterRows]:
    """The same, of those adapters alone that change the output head."""
    return group_rows([one if one and one.head else None for one in adapters], device, repeat)


def fit_adapter(shape: ModelShape, file: AdapterFile, device: torch.device, dtype: torch.dtype) -> AdapterWeights:
    """An adapter that was read from disk, made ready for a model.

    Raises: UserError when it is of another base, NotByRow when it has modules that no adapter is served for.
    """
    left = dict(file.pairs)
    fitting = _Fitting(left, file.scale, device, dtype)
    layers = tuple(_fit_layer(shape, number, fitting) for number in range(shape.num_layers))
    head = fitting.take(shape.hidden_size, {"lm_head": shape.vocab_size})
    if left:
        name = min(left)
        if name.rpartition(".")[2] == "embed_tokens":
            raise NotByRow(f"the adapter changes {name!r}; adapters of embeddings are not served")
        if name.endswith(".mlp.gate") and shape.experts is not None:
            raise NotByRow(f"the adapter changes {name!r}; adapters of a mixture's routers are not served")
        raise UserError(f"the adapter is of another base: a {shape.model_type} of this shape has no {name!r}")
    if not file.pairs:
        raise UserError("the adapter has no factors at all")
    return AdapterWeights(layers, file.rank, head)


class _Fitting(NamedTuple):
    """The pairs that have found no place yet, and how they are laid out."""

    left: dict[str, LowRankPair]
    scale: float
    device: torch.device
    dtype: torch.dtype

    def take(self, inputs: int, parts: Mapping[str, int]) -> LowRank | None:
        """The pairs of modules that the base has as one matrix of `inputs`; `parts` are their names and outputs."""
        taken = [self.left.pop(name, None) for name in parts]
        for (name, outputs), pair in zip(parts.items(), taken, strict=True):
            if pair is not None and (pair.a.shape[1], pair.b.shape[0]) != (inputs, outputs):
                there = [pair.b.shape[0], pair.a.shape[1]]
                raise UserError(f"the adapter is of another base: {name!r} is {[outputs, inputs]} here, {there} there")
        return _joined(taken, list(parts.values()), self.scale, self.device, self.dtype)

    def take_mlp(self, prefix: str, hidden: int, inner: int) -> ExpertAdapter:
        """The pairs of a block of gate, up and down."""
        gate_up = self.take(hidden, {prefix + "gate_proj": inner, prefix + "up_proj": inner})
        return ExpertAdapter(gate_up, self.take(inner, {prefix + "down_proj": hidden}))


def _fit_layer(shape: ModelShape, number: int, fitting: _Fitting) -> LayerAdapter:
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    attention, mlp = f"model.layers.{number}.self_attn.", f"model.layers.{number}.mlp."
    qkv = fitting.take(hidden, {attention + "q_proj": queries, attention + "k_proj": keys, attention + "v_proj": keys})
    output = fitting.take(queries, {attention + "o_proj": hidden})
    if not shape.layers[number].has_experts:
        return LayerAdapter(qkv, output, *fitting.take_mlp(mlp, hidden, shape.intermediate_size))
    assert shape.experts is not None, "a layer has experts only in a model that has them"
    inner, count = shape.experts.intermediate_size, shape.experts.count
    experts = tuple(fitting.take_mlp(f"{mlp}experts.{expert}.", hidden, inner) for expert in range(count))
    return LayerAdapter(qkv, output, experts=experts if any(map(any, experts)) else ())


def _joined(
    pairs: Sequence[LowRankPair | None], sizes: Sequence[int], scale: float, device: torch.device, dtype: torch.dtype
) -> LowRank | None:
    # All factors A below each other; each B in the columns of its own A and the rows of its own module.
    found = [pair for pair in pairs if pair is not None]
    if not found:
        return None
    factors = torch.cat([pair.a.float() for pair in found])
    rank = -(-len(factors) // RANK_STEP) * RANK_STEP
    a = torch.zeros(rank, factors.shape[1])
    a[: len(factors)] = factors
    b_t = torch.zeros(rank, sum(sizes))
    row = column = 0
    for pair, size in zip(pairs, sizes, strict=True):
        if pair is not None:
            end = row + len(pair.a)
            b_t[row:end, column : column + size] = pair.b.float().t() * scale
            row = end
        column += size
    low = LowRank(a.to(device, dtype).t(), b_t.to(device, dtype))
    if not all(bool(torch.isfinite(factor).all()) for factor in low):
        # Rows of other adapters multiply these numbers by 0, which must give 0.
        raise UserError("the adapter's factors are not finite once its scale is in them")
    return low


def _pairs(layer: LayerAdapter) -> list[LowRank]:
    own = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return [pair for pair in (*own, *(low for expert in layer.experts for low in expert)) if pair is not None]


def _add_rows(made_RX: Tensor, places_n: Tensor, padded_rows: Tensor, low: LowRank) -> None:
    """Add to the rows at `places` what an adapter makes of the first of `padded_rows`, enough of them for the bits."""
    product = torch.mm(torch.mm(padded_rows, low.a_t), low.b_t)
    made_RX.index_add_(0, places_n, product[: len(places_n)])


def _marked(places_n: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.bool, device=places_n.device).index_fill_(0, places_n, True)
