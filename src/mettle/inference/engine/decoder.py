"""The forward pass, eager: rows of tokens through the layers, whoever they belong to.

Legend: R rows (tokens), N prompts, P positions of each, B running sequences, D hidden, H heads, K kv heads, E head size,
V vocabulary. How a row reads the keys and values of others is `attention.py`'s. Agreement with transformers is tested
to 1e-5.

Invariant, on a CPU: what a row gets does not depend on the other rows, to the last bit. A matrix product of fewer than
`MIN_ROWS` rows is computed by another kernel, so there are never fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape, Rope
from mettle.inference.engine.attention import Attend, PromptAttention, Span, StepAttention, whole_blocks
from mettle.inference.engine.weights import FusedWeights, LayerWeights

MIN_ROWS = 8


class Decoder:
    """A model that can be asked for hidden states and logits."""

    def __init__(self, shape: ModelShape, weights: FusedWeights, max_length: int) -> None:
        self.shape = shape
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        tables = rope_tables(shape, whole_blocks(max_length))
        self._cos_TE, self._sin_TE = (t.to(self.device, self.dtype) for t in tables)

    def with_weights(self, weights: FusedWeights) -> Decoder:
        """A decoder of the same shape with other weights; it shares nothing that either would change."""
        twin = object.__new__(Decoder)
        twin.__dict__.update(self.__dict__)
        twin.weights = weights
        return twin

    def forward(self, token_ids_R: Tensor, positions_R: Tensor, attend: Attend) -> Tensor:
        """Hidden states [R, D] of R tokens at their positions; `attend` says what each of them sees of the others."""
        num_rows = len(token_ids_R)
        positions = _with_rows(positions_R)
        cos_R1E, sin_R1E = self._cos_TE[positions][:, None], self._sin_TE[positions][:, None]
        hidden_RD = F.embedding(_with_rows(token_ids_R), self.weights.embedding)
        for number, layer in enumerate(self.weights.layers):
            heads = self._project(layer, hidden_RD, cos_R1E, sin_R1E)
            hidden_RD = self._finish_layer(layer, hidden_RD, _with_rows(attend(number, heads)))
        return hidden_RD[:num_rows]

    def prefill(self, token_ids_NP: Tensor, kv_NLKTE: Tensor, start: int = 0) -> Tensor:
        """Hidden states [N, P, D] of prompts' tokens from position `start` on, whose keys and values `kv` takes."""
        num_prompts, length = token_ids_NP.shape
        positions_P = torch.arange(start, start + length, device=self.device)
        attend = PromptAttention(self.shape, kv_NLKTE, start, start + length)
        return self.forward(token_ids_NP.reshape(-1), positions_P.repeat(num_prompts), attend).view(
            num_prompts, length, -1
        )

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, spans: Sequence[Span]) -> Tensor:
        """Hidden states [B, D] of one more token of each running sequence, which is added to its slot in `spans`."""
        return self.forward(token_ids_B, positions_B, StepAttention(self.shape, spans, positions_B))

    def prompt_room(self, num_prompts: int, length: int) -> Tensor:
        """Keys and values [N, L, 2K, T, E] for prompts of up to `length` tokens, all zeros."""
        shape = self.shape
        sizes = (num_prompts, shape.num_layers, 2 * shape.num_kv_heads, whole_blocks(length), shape.head_size)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 of hidden states [R, D]."""
        shape = self.shape
        normed = F.rms_norm(hidden, (shape.hidden_size,), self.weights.norm, shape.norm_eps)
        return F.linear(_with_rows(normed), self.weights.head)[: len(hidden)].float()

    def _project(self, layer: LayerWeights, hidden_RD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Rows R to heads [R, H + 2K, E]: queries and keys normed and rotated in place, values as they are.
        shape = self.shape
        normed = F.rms_norm(hidden_RD, (shape.hidden_size,), layer.attention_norm, shape.norm_eps)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden_RD), -1, shape.head_size)
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        source = rotated
        if layer.qk_norm is not None:
            source = F.rms_norm(rotated, (shape.head_size,), None, shape.norm_eps) * layer.qk_norm
        swapped = torch.roll(source, shape.head_size // 2, -1)
        torch.addcmul(source * cos, swapped, sin, out=rotated)
        return heads

    def _finish_layer(self, layer: LayerWeights, hidden_RD: Tensor, attended_RD: Tensor) -> Tensor:
        shape = self.shape
        hidden_RD = torch.addmm(hidden_RD, attended_RD, layer.output_t)
        if layer.output_bias is not None:
            hidden_RD = hidden_RD + layer.output_bias
        normed = F.rms_norm(hidden_RD, (shape.hidden_size,), layer.mlp_norm, shape.norm_eps)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        hidden_RD = torch.addmm(hidden_RD, F.silu(gate) * up, layer.down_t)
        return hidden_RD if layer.down_bias is None else hidden_RD + layer.down_bias


def _with_rows(rows_B: Tensor) -> Tensor:
    """At least `MIN_ROWS` rows; the added ones are zeros and nobody reads what becomes of them."""
    missing = MIN_ROWS - len(rows_B)
    return rows_B if missing <= 0 else torch.cat([rows_B, rows_B.new_zeros(missing, *rows_B.shape[1:])])


def rope_tables(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, E]: rotated = x * cos + roll(x, E/2) * sin."""
    frequencies = _frequencies(shape.rope, shape.head_size)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([-angles.sin(), angles.sin()], -1)


def _frequencies(rope: Rope, head_size: int) -> Tensor:
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(frequencies, rope)
    return frequencies


def _llama3_frequencies(frequencies: Tensor, rope: Rope) -> Tensor:
    # Llama 3.1: long waves are stretched by `factor`, short ones kept, those in between blended.
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
