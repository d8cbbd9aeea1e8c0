"""The forward pass, eager: prompts in one padded batch, then one token of every running sequence at a time.

Legend: N prompts, P padded prompt length, M = N * P, B running sequences, T longest of them, D hidden, H heads, K kv
heads, G = H / K queries of a kv head, E head size, V vocabulary. Queries of one kv head share keys, so decoding groups
them as [B, K, G, E] and attention needs no repeated keys. Agreement with transformers is tested to 1e-5.

Invariant, on a CPU: what a sequence gets does not depend on who else is in the batch, to the last bit. The order in
which a matrix product adds up changes with its shape at a few places only, and these are kept away from: fewer than
`MIN_ROWS` rows (another kernel), lengths that are no multiple of `LENGTH_STEP` (a remainder loop), more than
`MAX_QUERIES` queries of one kv head (the keys are summed in blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape, Rope
from mettle.inference.engine.slots import SlotCache
from mettle.inference.engine.weights import FusedWeights, LayerWeights

MIN_ROWS = 8
LENGTH_STEP = 16
MAX_QUERIES = 3

StorePrompt = Callable[[int, Tensor], None]
"""Takes a layer's number and the prompts' keys and values, [N, 2K, P, E]."""


def padded_length(length: int) -> int:
    """The length at which `length` tokens are computed."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class Decoder:
    """A model that can be asked for hidden states and logits."""

    def __init__(self, shape: ModelShape, weights: FusedWeights, max_length: int) -> None:
        self.shape = shape
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        tables = rope_tables(shape, padded_length(max_length))
        self._cos_TE, self._sin_TE = (t.to(self.device, self.dtype) for t in tables)

    def with_weights(self, weights: FusedWeights) -> Decoder:
        """A decoder of the same shape with other weights; it shares nothing that either would change."""
        twin = object.__new__(Decoder)
        twin.__dict__.update(self.__dict__)
        twin.weights = weights
        return twin

    def prefill(self, token_ids_NP: Tensor, store: StorePrompt | None = None) -> Tensor:
        """Hidden states [N, P, D] of right-padded prompts; `store` is handed each layer's keys and values.

        What stands at the padding is meaningless and attended to by nothing before it. P is rounded up here; prompts
        that round up to different lengths belong into different calls (attention is computed in blocks of P).
        """
        shape = self.shape
        token_ids_NP = F.pad(token_ids_NP, (0, padded_length(token_ids_NP.shape[1]) - token_ids_NP.shape[1]))
        num_prompts, length = token_ids_NP.shape
        hidden_MD = F.embedding(token_ids_NP.reshape(-1), self.weights.embedding)
        cos_M1E = self._cos_TE[:length].repeat(num_prompts, 1)[:, None]
        sin_M1E = self._sin_TE[:length].repeat(num_prompts, 1)[:, None]
        for number, layer in enumerate(self.weights.layers):
            heads = self._project(layer, hidden_MD, cos_M1E, sin_M1E)
            heads = heads.view(num_prompts, length, -1, shape.head_size).transpose(1, 2)
            query, kv = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
            if store is not None:
                store(number, kv)
            key, value = self._repeat(kv[:, : shape.num_kv_heads]), self._repeat(kv[:, shape.num_kv_heads :])
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            attended_MD = attended.transpose(1, 2).reshape(num_prompts * length, -1)
            hidden_MD = self._finish_layer(layer, hidden_MD, attended_MD)
        return hidden_MD.view(num_prompts, length, -1)

    def decode(self, token_ids_B: Tensor, positions_B: Tensor, slots_B: Tensor, cache: SlotCache, span: Span) -> Tensor:
        """Hidden states [B, D] of one more token of each of the first B slots, which is added to the cache."""
        shape = self.shape
        batch = len(token_ids_B)
        mask = span.mask(positions_B, self.dtype)
        group = shape.num_heads // shape.num_kv_heads
        positions_R = _with_rows(positions_B)
        cos_R1E, sin_R1E = self._cos_TE[positions_R][:, None], self._sin_TE[positions_R][:, None]
        hidden_RD = F.embedding(_with_rows(token_ids_B), self.weights.embedding)
        for number, layer in enumerate(self.weights.layers):
            heads = self._project(layer, hidden_RD, cos_R1E, sin_R1E)[:batch]
            cache.append(number, heads[:, shape.num_heads :], slots_B, positions_B)
            key, value = cache.views(number, batch, span.longest)
            query = heads[:, : shape.num_heads].view(batch, shape.num_kv_heads, group, shape.head_size)
            attended = _attend(query, key, value, mask)
            hidden_RD = self._finish_layer(layer, hidden_RD, _with_rows(attended.reshape(batch, -1)))
        return hidden_RD[:batch]

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

    def _repeat(self, heads_NKPE: Tensor) -> Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return heads_NKPE if group == 1 else heads_NKPE.repeat_interleave(group, 1)


def _with_rows(rows_B: Tensor) -> Tensor:
    """At least `MIN_ROWS` rows; the added ones are zeros and nobody reads what becomes of them."""
    missing = MIN_ROWS - len(rows_B)
    return rows_B if missing <= 0 else torch.cat([rows_B, rows_B.new_zeros(missing, *rows_B.shape[1:])])


def _attend(query_BKGE: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    pieces = torch.split(query_BKGE, MAX_QUERIES, 2)
    parts = [F.scaled_dot_product_attention(piece, key, value, attn_mask=mask) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Span:
    """The lengths of the running sequences after the token at hand: what of the cache a step reads."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.longest = padded_length(longest)
        self._is_even = shortest == self.longest

    def mask(self, positions_B: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [B, 1, 1, T]; None when no sequence is shorter than what is read."""
        if self._is_even:
            return None
        places = torch.arange(self.longest, device=positions_B.device)
        mask_BT = torch.where(places <= positions_B[:, None], 0.0, -math.inf).to(dtype)
        return mask_BT[:, None, None]


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
