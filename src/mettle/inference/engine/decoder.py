"""The forward pass, eager: rows of tokens through the layers, whoever they belong to.

Legend: R rows (tokens), N prompts, P positions of each, B running sequences, D hidden, K kv heads, T positions, E head
size, V vocabulary. How a row reads the keys and values of others is `attention.py`'s, what a layer does besides is
`layers.py`'s. Agreement with transformers is tested to 1e-5.

Invariant, on a CPU: what a row gets does not depend on the other rows, to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.adapters import HEAD, AdapterWeights, LayerRows, RowsOfAdapters, group_rows
from mettle.inference.engine.allocator import keep_freed_memory
from mettle.inference.engine.architecture import LayerShape, ModelShape, Rope
from mettle.inference.engine.attention import Attend, Kin, PromptAttention, Span, StepAttention, whole_blocks
from mettle.inference.engine.layers import Rotation, finish, project
from mettle.inference.engine.matrices import min_rows, row_steps, with_rows
from mettle.inference.engine.rotary import rope_tables
from mettle.inference.engine.weights import FusedWeights, fuse


class AskedRows(NamedTuple):
    """Rows of prompts of which the last layer computes more than keys and values: those after the first `skipped`
    positions of each of N prompts of P positions. `adapters` are theirs alone."""

    num_prompts: int
    skipped: int
    adapters: Sequence[RowsOfAdapters]

    def of(self, hidden_RD: Tensor, num_rows: int) -> Tensor:
        """Their hidden states among those of all rows, of which `num_rows` are no padding."""
        by_prompt_NPD = hidden_RD[:num_rows].view(self.num_prompts, -1, hidden_RD.shape[-1])
        return by_prompt_NPD[:, self.skipped :].flatten(0, 1)


class Decoder:
    """A model that can be asked for hidden states and logits."""

    def __init__(self, shape: ModelShape, weights: FusedWeights, max_length: int) -> None:
        self.shape = shape
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        if self.device.type == "cpu":
            keep_freed_memory()
        self._take(weights)
        ropes = {layer.rope for layer in shape.layers if layer.rope is not None}
        self._leaves_out_rows = True
        self._tables = {rope: self._table(rope, whole_blocks(max_length)) for rope in ropes}

    @property
    def forward_of(self) -> str:
        """Whose forward pass it is."""
        return "mettle"

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones once."""
        return self.weights.num_parameters

    def with_state(self, state: Mapping[str, Tensor]) -> Decoder:
        """A decoder of the same model with the weights of a Hugging Face state dict, which are copied.

        Raises: UserError when they do not fit.
        """
        return self.with_weights(fuse(self.shape, state, self.device, self.dtype))

    def with_weights(self, weights: FusedWeights) -> Decoder:
        """A decoder of the same shape with other weights; it shares nothing that either would change."""
        twin = object.__new__(Decoder)
        twin.__dict__.update(self.__dict__)
        twin._take(weights)
        return twin

    def _take(self, weights: FusedWeights) -> None:
        self.weights = weights
        packed = [matrix.is_packed for matrix in weights.matrices]
        self._has_packed, self._has_plain = any(packed), not all(packed)

    def _padded(self, num_rows: int) -> int:
        # With how many rows so many are computed.
        padded = row_steps(num_rows) if self._has_packed else num_rows
        return max(padded, min_rows()) if self._has_plain else padded

    def forward(
        self,
        token_ids_R: Tensor,
        positions_R: Tensor,
        attend: Attend,
        adapters: Sequence[RowsOfAdapters] = (),
        routes: list[Tensor] | None = None,
        asked: AskedRows | None = None,
    ) -> Tensor:
        """Hidden states [R, D] of R tokens at their positions; `attend` says what each of them sees of the others.

        `routes` takes the experts that each layer with a router chose, [R + padding, K] each. Where only some rows are
        asked for, `attend` gives theirs alone in the last layer.
        """
        num_rows, last = len(token_ids_R), self.shape.num_layers - 1
        padded = self._padded(num_rows)
        rotations = self._rotations(with_rows(positions_R, padded))
        hidden_RD = self._embed(with_rows(token_ids_R, padded))
        for number, (kind, layer) in enumerate(zip(self.shape.layers, self.weights.layers, strict=True)):
            added = [LayerRows(rows, number) for rows in adapters]
            heads = project(self.shape, layer, hidden_RD, _of(rotations, kind), added)
            attended = attend(number, heads)
            if asked is not None and number == last:
                hidden_RD, num_rows = asked.of(hidden_RD, num_rows), len(attended)
                if num_rows == 0:
                    break
                padded = self._padded(num_rows)
                hidden_RD = with_rows(hidden_RD, padded)
                added = [LayerRows(rows, number) for rows in asked.adapters]
            hidden_RD = finish(self.shape, layer, hidden_RD, with_rows(attended, padded), added, routes)
        return hidden_RD[:num_rows]

    def prefill(
        self,
        token_ids_NP: Tensor,
        kv_NLKTE: Tensor | None = None,
        start: int = 0,
        adapters: Sequence[AdapterWeights | None] = (),
        routes: list[Tensor] | None = None,
        since: int = 0,
    ) -> Tensor:
        """Hidden states [N, P, D] of prompts' tokens from position `start` on, whose keys and values `kv` takes.

        `adapters` are those of the prompts, none meaning the base for all. Only the hidden states from position `since`
        on are given, which begins a block; what is computed for the others are their keys and values.
        """
        num_prompts, length = token_ids_NP.shape
        if kv_NLKTE is None:
            kv_NLKTE = self.prompt_room(num_prompts, length)
        skipped = min(max(0, since - start), length)
        leaves_out = self._leaves_out_rows and skipped > 0
        attend = PromptAttention(self.shape, kv_NLKTE, start, start + length, skipped if leaves_out else 0)
        groups = group_rows(adapters, self.device, length)
        asked = None
        if leaves_out:
            asked = AskedRows(num_prompts, skipped, group_rows(adapters, self.device, length - skipped))
        positions_P = torch.arange(start, start + length, device=self.device)
        positions_R, ids_R = positions_P.repeat(num_prompts), token_ids_NP.reshape(-1)
        hidden_RD = self.forward(ids_R, positions_R, attend, groups, routes, asked)
        hidden_NPD = hidden_RD.view(num_prompts, -1, hidden_RD.shape[-1])
        return hidden_NPD if leaves_out else hidden_NPD[:, skipped:]

    def decode(
        self,
        token_ids_B: Tensor,
        positions_B: Tensor,
        spans: Sequence[Span],
        adapters: Sequence[RowsOfAdapters] = (),
        routes: list[Tensor] | None = None,
        kin: Kin | None = None,
    ) -> Tensor:
        """Hidden states [B, D] of one more token of each running sequence, which is added to its slot in `spans`.

        With `kin`, [U, D]: of one sequence of each kind.
        """
        attend = StepAttention(self.shape, spans, positions_B, kin)
        if kin is not None:
            token_ids_B, positions_B = token_ids_B[kin.first_U], positions_B[kin.first_U]
        return self.forward(token_ids_B, positions_B, attend, adapters, routes)

    def prompt_room(self, num_prompts: int, length: int) -> Tensor:
        """Keys and values [N, L, 2K, T, E] for prompts of up to `length` tokens, all zeros."""
        shape = self.shape
        sizes = (num_prompts, shape.num_layers, 2 * shape.num_kv_heads, whole_blocks(length), shape.head_size)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def logits(self, hidden: Tensor, adapters: Sequence[RowsOfAdapters] = ()) -> Tensor:
        """Logits [R, V] in float32 of hidden states [R, D], with what the rows' adapters add to the head."""
        shape = self.shape
        normed = with_rows(
            F.rms_norm(hidden, (shape.hidden_size,), self.weights.norm, shape.norm_eps), self._padded(len(hidden))
        )
        made = self.weights.head.times(normed)
        for rows in adapters:
            rows.add(HEAD, "head", made, normed)
        logits = made[: len(hidden)].float()
        return logits if shape.logit_cap is None else torch.tanh(logits / shape.logit_cap) * shape.logit_cap

    def _embed(self, token_ids: Tensor) -> Tensor:
        hidden = F.embedding(token_ids, self.weights.embedding)
        scale = self.shape.embedding_scale
        # The scale is rounded to the weights' type first, as it is in training.
        return hidden if scale == 1.0 else hidden * torch.tensor(scale, dtype=self.dtype, device=self.device)

    def _rotations(self, positions_R: Tensor) -> dict[Rope, Rotation]:
        return {
            rope: Rotation(cos_TE.index_select(0, positions_R)[:, None], sin_TE.index_select(0, positions_R)[:, None])
            for rope, (cos_TE, sin_TE) in self._tables.items()
        }

    def _table(self, rope: Rope, length: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(rope, self.shape.head_size, length)
        return cos.to(self.device, self.dtype), sin.to(self.device, self.dtype)


def _of(rotations: dict[Rope, Rotation], kind: LayerShape) -> Rotation | None:
    return None if kind.rope is None else rotations[kind.rope]
