"""One decoder layer without its attention: hidden states to heads before, heads to hidden states after.

Legend: R rows (tokens), D hidden, H heads, K kv heads, E head size, F intermediate, C experts. Everything is computed
row by row, so prompts and decoding share it.

Invariant, on a CPU: a row's result does not depend on the others, to the last bit. Matrix products keep to it from a
least number of rows on (`matrices.py`), so rows of zeros are added; hidden states come with them already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.adapters import ExpertRows, LayerRows, Projection
from mettle.inference.engine.architecture import Activation, Experts, ModelShape
from mettle.inference.engine.elementwise import gelu_tanh, silu
from mettle.inference.engine.matrices import Matrix, with_rows
from mettle.inference.engine.weights import ExpertMlps, LayerWeights


class Rotation(NamedTuple):
    """Cosines and signed sines of each row's position, [R, 1, E]."""

    cos: Tensor
    sin: Tensor


def project(
    shape: ModelShape,
    layer: LayerWeights,
    hidden_RD: Tensor,
    rotation: Rotation | None,
    adapters: Sequence[LayerRows] = (),
) -> Tensor:
    """Heads [R, H + 2K, E]: queries and keys normed and rotated in place, values as they are."""
    normed = _normed(shape, hidden_RD, layer.attention_norm)
    made = layer.qkv.times(normed, layer.qkv_bias)
    for rows in adapters:
        rows.add("qkv", made, normed)
    heads = made.view(len(hidden_RD), -1, shape.head_size)
    rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
    source = rotated
    if layer.qk_norm is not None:
        source = _qk_normed(shape, rotated, layer.qk_norm)
    if rotation is not None:
        swapped = torch.roll(source, shape.head_size // 2, -1)
        torch.addcmul(source.mul_(rotation.cos), swapped, rotation.sin, out=rotated)
    elif source is not rotated:
        rotated.copy_(source)
    return heads


def finish(
    shape: ModelShape,
    layer: LayerWeights,
    hidden_RD: Tensor,
    attended_RD: Tensor,
    adapters: Sequence[LayerRows] = (),
    routes: list[Tensor] | None = None,
) -> Tensor:
    """The layer's hidden states from what its attention gave. `routes` takes the experts [R, K] that it chose."""
    ends = (layer.output, layer.output_bias, layer.attention_end_norm)
    hidden_RD = _add(shape, hidden_RD, attended_RD, *ends, "output", adapters)
    normed = _normed(shape, hidden_RD, layer.mlp_norm)
    if isinstance(layer.mlp, ExpertMlps):
        assert shape.experts is not None, "a layer has experts only in a model that has them"
        added = [own for rows in adapters for own in rows.of_experts(len(normed))]
        mixed = _mix(shape.experts, shape.activation, layer.mlp, normed, added, routes)
        return hidden_RD + _normed(shape, mixed, layer.mlp_end_norm)
    gate_up = layer.mlp.gate_up.times(normed, layer.mlp.gate_up_bias)
    for rows in adapters:
        rows.add("gate_up", gate_up, normed)
    gate, up = gate_up.chunk(2, -1)
    inner_RF = _activate(gate, shape.activation).mul_(up)
    ends = (layer.mlp.down, layer.mlp.down_bias, layer.mlp_end_norm)
    return _add(shape, hidden_RD, inner_RF, *ends, "down", adapters)


def _normed(shape: ModelShape, rows_RD: Tensor, weight: Tensor | None) -> Tensor:
    return rows_RD if weight is None else F.rms_norm(rows_RD, (shape.hidden_size,), weight, shape.norm_eps)


def _qk_normed(shape: ModelShape, heads: Tensor, weight: Tensor) -> Tensor:
    if shape.qk_norm == "head":
        return F.rms_norm(heads, (shape.head_size,), None, shape.norm_eps).mul_(weight)
    parts = torch.split(heads, [shape.num_heads, shape.num_kv_heads], 1)
    normed = [F.rms_norm(part, tuple(part.shape[1:]), None, shape.norm_eps) for part in parts]
    return torch.cat(normed, 1).mul_(weight)


def _add(
    shape: ModelShape,
    hidden_RD: Tensor,
    rows_RX: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    end_norm: Tensor | None,
    projection: Projection,
    adapters: Sequence[LayerRows],
) -> Tensor:
    """Hidden states and a projection that is added to them, by way of a norm where the family has one there."""
    made = matrix.added_to(hidden_RD, rows_RX) if end_norm is None else matrix.times(rows_RX)
    if bias is not None:
        made = made + bias
    for rows in adapters:
        rows.add(projection, made, rows_RX)
    return made if end_norm is None else hidden_RD + _normed(shape, made, end_norm)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    return silu(gate) if activation == "silu" else gelu_tanh(gate)


def _mix(
    experts: Experts,
    activation: Activation,
    mlps: ExpertMlps,
    normed_RD: Tensor,
    added: Sequence[ExpertRows],
    routes: list[Tensor] | None,
) -> Tensor:
    """Each row through its own experts, added up in the experts' order whoever else chose them."""
    shares_RC = torch.softmax(F.linear(normed_RD, mlps.router).float(), -1)
    shares, chosen = shares_RC.topk(experts.per_token, -1)
    if routes is not None:
        routes.append(chosen)
    if experts.has_shares_of_one:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares.to(normed_RD.dtype).flatten()
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts.count).tolist()
    mixed = torch.zeros_like(normed_RD)
    start = 0
    for expert, count in enumerate(counts):
        places = order[start : start + count]
        start += count
        if not count:
            continue
        rows = places // experts.per_token
        inputs = with_rows(normed_RD[rows])
        gate_up = F.linear(inputs, mlps.gate_up[expert])
        for own in added:
            own.add(expert, "gate_up", gate_up, inputs, rows)
        gate, up = gate_up.chunk(2, -1)
        inner = _activate(gate, activation) * up
        made = F.linear(inner, mlps.down[expert])
        for own in added:
            own.add(expert, "down", made, inner, rows)
        made = made[:count]
        mixed.index_add_(0, rows, made * shares[places, None])
    return mixed
