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
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.adapters import AdapterRows, AdapterWeights, LayerRows, group_rows
from mettle.inference.engine.architecture import LayerShape, ModelShape, Rope
from mettle.inference.engine.layers import Rotation, finish, project, with_rows
from mettle.inference.engine.rotary import rope_tables
from mettle.inference.engine.slots import SlotCache
from mettle.inference.engine.weights import FusedWeights

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
        ropes = {layer.rope for layer in shape.layers if layer.rope is not None}
        self._tables = {rope: self._table(rope, padded_length(max_length)) for rope in ropes}

    def with_weights(self, weights: FusedWeights) -> Decoder:
        """A decoder of the same shape with other weights; it shares nothing that either would change."""
        twin = object.__new__(Decoder)
        twin.__dict__.update(self.__dict__)
        twin.weights = weights
        return twin

    def prefill(
        self,
        token_ids_NP: Tensor,
        store: StorePrompt | None = None,
        adapters: Sequence[AdapterWeights | None] = (),
    ) -> Tensor:
        """Hidden states [N, P, D] of right-padded prompts; `store` is handed each layer's keys and values.

        `adapters` are those of the prompts, none meaning the base for all.

        What stands at the padding is meaningless and attended to by nothing before it. P is rounded up here; prompts
        that round up to different lengths belong into different calls (attention is computed in blocks of P).
        """
        shape = self.shape
        token_ids_NP = F.pad(token_ids_NP, (0, padded_length(token_ids_NP.shape[1]) - token_ids_NP.shape[1]))
        num_prompts, length = token_ids_NP.shape
        hidden_MD = self._embed(token_ids_NP.reshape(-1))
        rotations = self._rotations(torch.arange(length, device=self.device).repeat(num_prompts))
        groups = group_rows(adapters, self.device, length)
        for number, (kind, layer) in enumerate(zip(shape.layers, self.weights.layers, strict=True)):
            added = [LayerRows(weights.layers[number], *rows) for weights, *rows in groups]
            heads = project(shape, layer, hidden_MD, _of(rotations, kind), added)
            heads = heads.view(num_prompts, length, -1, shape.head_size).transpose(1, 2)
            query, kv = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
            if store is not None:
                store(number, kv)
            key, value = self._repeat(kv[:, : shape.num_kv_heads]), self._repeat(kv[:, shape.num_kv_heads :])
            attended = self._attend_prompts(query, key, value, kind.window)
            attended_MD = attended.transpose(1, 2).reshape(num_prompts * length, -1)
            hidden_MD = finish(shape, layer, hidden_MD, attended_MD, added)
        return hidden_MD.view(num_prompts, length, -1)

    def decode(
        self,
        token_ids_B: Tensor,
        positions_B: Tensor,
        slots_B: Tensor,
        cache: SlotCache,
        span: Span,
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Hidden states [B, D] of one more token of each of the first B slots, which is added to the cache."""
        shape = self.shape
        batch = len(token_ids_B)
        masks = {window: span.mask(positions_B, self.dtype, window) for window in shape.windows}
        group = shape.num_heads // shape.num_kv_heads
        rotations = self._rotations(with_rows(positions_B))
        hidden_RD = self._embed(with_rows(token_ids_B))
        for number, (kind, layer) in enumerate(zip(shape.layers, self.weights.layers, strict=True)):
            added = [LayerRows(weights.layers[number], *rows) for weights, *rows in adapters]
            heads = project(shape, layer, hidden_RD, _of(rotations, kind), added)[:batch]
            cache.append(number, heads[:, shape.num_heads :], slots_B, positions_B)
            key, value = cache.views(number, batch, span.longest)
            query = heads[:, : shape.num_heads].view(batch, shape.num_kv_heads, group, shape.head_size)
            attended = _attend(query, key, value, masks[kind.window], shape.attention_scale)
            hidden_RD = finish(shape, layer, hidden_RD, with_rows(attended.reshape(batch, -1)), added)
        return hidden_RD[:batch]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 of hidden states [R, D]."""
        shape = self.shape
        normed = F.rms_norm(hidden, (shape.hidden_size,), self.weights.norm, shape.norm_eps)
        logits = F.linear(with_rows(normed), self.weights.head)[: len(hidden)].float()
        return logits if shape.logit_cap is None else torch.tanh(logits / shape.logit_cap) * shape.logit_cap

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self.weights.embedding)
        scale = self.shape.embedding_scale
        # The scale is rounded to the weights' type first, as it is in training.
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=self.dtype, device=self.device)

    def _rotations(self, positions_R: Tensor) -> dict[Rope, Rotation]:
        return {
            rope: Rotation(cos_TE[positions_R][:, None], sin_TE[positions_R][:, None])
            for rope, (cos_TE, sin_TE) in self._tables.items()
        }

    def _table(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(rope, self.shape.head_size, length)
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)

    def _attend_prompts(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        length, scale = query.shape[2], self.shape.attention_scale
        if window is None or window >= length:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        places = torch.arange(length, device=self.device)
        ages_PP = places[:, None] - places
        mask_PP = torch.where((ages_PP >= 0) & (ages_PP < window), 0.0, -math.inf).to(self.dtype)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask_PP, scale=scale)

    def _repeat(self, heads_NKPE: Tensor) -> Tensor:
        group = self.shape.num_heads // self.shape.num_kv_heads
        return heads_NKPE if group == 1 else heads_NKPE.repeat_interleave(group, 1)


def _of(rotations: dict[Rope, Rotation], kind: LayerShape) -> Rotation | None:
    return None if kind.rope is None else rotations[kind.rope]


def _attend(query_BKGE: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    pieces = torch.split(query_BKGE, MAX_QUERIES, 2)
    parts = [F.scaled_dot_product_attention(piece, key, value, attn_mask=mask, scale=scale) for piece in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Span:
    """The lengths of the running sequences after the token at hand: what of the cache a step reads."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.longest = padded_length(longest)
        self._is_even = shortest == self.longest

    def mask(self, positions_B: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Additive mask [B, 1, 1, T]; None when no sequence is shorter than what is read, nor longer than a window."""
        is_whole = window is None or window >= self.longest
        if self._is_even and is_whole:
            return None
        places = torch.arange(self.longest, device=positions_B.device)
        is_seen = places <= positions_B[:, None]
        if window is not None and not is_whole:
            is_seen &= places > positions_B[:, None] - window
        return torch.where(is_seen, 0.0, -math.inf).to(dtype)[:, None, None]
