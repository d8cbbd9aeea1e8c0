"""How queries read keys and values: prompts many positions at a time, running sequences one.

Legend: N prompts, R rows, B running sequences, L layers, H heads, K kv heads, G = H / K queries of a kv head, T
positions, E head size. Keys and values lie as [N, L, 2K, T, E]: keys in the first K heads, values in the rest.

Invariant, on a CPU: what a position gets depends on the positions before it alone, to the last bit; neither on who else
is in the batch nor on where a prompt was cut into chunks or taken up from a cached prefix. A matrix product adds up in
an order that hangs on its shape, so a shape may hang only on where a position stands. A prompt's positions are computed
level by level (`levels.py`). Where a layer has a window, or a trial shows that levels would not keep the bits, they are
computed in blocks of `BLOCK`, each of which reads the keys up to its own end, whether all of its rows are asked for or
one. A running sequence's position with up to `MAX_QUERIES` queries is added up key by key, so that masked keys behind
it change nothing; with more queries the keys are summed in pieces, and then exactly its slot's capacity is read, which
hangs on its own length. So a decoded position differs in the last bit from the same one in a prompt, and only what was
computed in a prompt may be used again for a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape
from mettle.inference.engine.levels import LevelAttention, keeps_bits

BLOCK = 32
"""Positions that a prompt may be cut after, a multiple of what levels ask for."""
LENGTH_STEP = 16
MAX_QUERIES = 3

Attend = Callable[[int, Tensor], Tensor]
"""Takes a layer's number and its rows' heads [R, H + 2K, E] and gives what they attended to, [rows, H * E]."""


def whole_blocks(length: int) -> int:
    """The positions of the blocks that `length` tokens lie in."""
    return -(-length // BLOCK) * BLOCK


class PromptAttention:
    """Positions from `start` to `end` of N prompts, whose earlier ones lie in `kv` already; theirs are added there.

    `start` begins a block, and `kv` holds whole blocks. In the last layer the first `skipped` positions, whole blocks
    too or all, are only added, and nobody asks what they attend to.
    """

    def __init__(self, shape: ModelShape, kv_NLKTE: Tensor, start: int, end: int, skipped: int = 0) -> None:
        assert start % BLOCK == 0, "prompts are taken up where a block begins"
        assert skipped % BLOCK == 0 or start + skipped == end, "and left out up to where one begins"
        self._shape = shape
        self._kv = kv_NLKTE
        self._start, self._end, self._asked = start, end, start + skipped
        self._levels: dict[int, LevelAttention] = {}  # by the position that they begin with
        if kv_NLKTE.device.type == "cpu" and keeps_bits(shape.head_size, kv_NLKTE.dtype, torch.get_num_threads()):
            self._levels = {at: LevelAttention(shape, at, end) for at in (start, self._asked) if at < end}
        in_blocks = [window for window in shape.windows if window is not None or not self._levels]
        self._masks = {window: self._mask(window) for window in in_blocks}

    def __call__(self, layer: int, heads_RHE: Tensor) -> Tensor:
        shape, start, end = self._shape, self._start, self._end
        num_prompts, length = len(self._kv), end - start
        heads = heads_RHE[: num_prompts * length].view(num_prompts, length, -1, shape.head_size)
        kv = self._kv[:, layer]
        kv[:, :, start:end] = heads[:, :, shape.num_heads :].transpose(1, 2)
        first = self._asked if layer == shape.num_layers - 1 else start
        query = heads[:, first - start :, : shape.num_heads]
        window = shape.layers[layer].window
        if first == end:
            return query.reshape(0, shape.num_heads * shape.head_size)
        if window is None and self._levels:
            return self._levels[first](kv, query).reshape(num_prompts * (end - first), -1)
        attended = torch.empty_like(query, memory_format=torch.contiguous_format)
        for at in range(first, end, BLOCK):
            own = slice(at - first, min(at + BLOCK, end) - first)
            attended[:, own] = self._block(kv, query[:, own].transpose(1, 2), at, window).transpose(1, 2)
        return attended.view(num_prompts * (end - first), -1)

    def _block(self, kv: Tensor, query: Tensor, at: int, window: int | None) -> Tensor:
        """What queries [N, H, P, E] attend to, which begin the block at position `at` or are all of it."""
        num_kv, stop, length = self._shape.num_kv_heads, at + BLOCK, query.shape[2]
        if length < BLOCK:  # rows that nobody asked for
            query = F.pad(query, (0, 0, 0, BLOCK - length))
        # As [N, K, G * P, E]: queries of one kv head share its keys without a copy.
        grouped = query.reshape(len(query), num_kv, -1, self._shape.head_size)
        key, value = kv[:, :num_kv, :stop], kv[:, num_kv:, :stop]
        mask = self._masks[window][:, -stop:]
        found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=self._shape.attention_scale)
        return found.view(query.shape)[:, :, :length]

    def _mask(self, window: int | None) -> Tensor:
        # [G * BLOCK, T] of the last block; an earlier one has the same seen from its own end.
        places = torch.arange(whole_blocks(self._end), device=self._kv.device)
        mask_PT = _seen(places, places[-BLOCK:], window).to(self._kv.dtype)
        return mask_PT.repeat(self._shape.num_heads // self._shape.num_kv_heads, 1)


class Span(NamedTuple):
    """Running sequences whose slots lie side by side: their keys and values [B, L, 2K, T, E] and their lengths."""

    kv: Tensor
    lengths: Sequence[int]


class Kin(NamedTuple):
    """Which rows of a step are the first of their kind, `first_U`, ascending, and of which of these each row is one."""

    first_U: Tensor
    which_B: Tensor


class StepAttention:
    """One more position of each running sequence, which is added to its slot; spans follow each other in the batch.

    With `kin` it is asked for one row of each kind alone, and adds that row's keys and values to the slots of all.
    """

    def __init__(self, shape: ModelShape, spans: Sequence[Span], positions_B: Tensor, kin: Kin | None = None) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._parts: list[_SpanPart] = []
        first = 0
        for span in spans:
            end = first + len(span.lengths)
            self._parts.append(self._part(span, first, positions_B[first:end], kin))
            first = end

    def _part(self, span: Span, first: int, positions: Tensor, kin: Kin | None) -> _SpanPart:
        capacity, longest = span.kv.shape[3], max(span.lengths)
        reads_all = self._group > MAX_QUERIES
        read = capacity if reads_all else min(capacity, -(-longest // LENGTH_STEP) * LENGTH_STEP)
        rows = torch.arange(len(positions), device=positions.device)
        masks: dict[int | None, Tensor | None] = {}
        for window in self._shape.windows:
            is_whole = min(span.lengths) >= read and (window is None or window >= read)
            places = torch.arange(0 if is_whole else read, device=positions.device)
            masks[window] = None if is_whole else _seen(places, positions, window).to(span.kv.dtype)[:, None, None]
        if kin is None:
            return _SpanPart(span.kv, first, first + len(positions), rows, positions, read, masks)
        begin, end = (int((kin.first_U < edge).sum()) for edge in (first, first + len(positions)))
        asking = kin.first_U[begin:end] - first
        masks = {window: None if mask is None else mask[asking] for window, mask in masks.items()}
        which = kin.which_B[first : first + len(positions)]
        return _SpanPart(span.kv, begin, end, rows, positions, read, masks, which, asking)

    def __call__(self, layer: int, heads_RHE: Tensor) -> Tensor:
        shape, num_kv = self._shape, self._shape.num_kv_heads
        window, scale = shape.layers[layer].window, shape.attention_scale
        found = []
        for part in self._parts:
            kv = part.kv[:, layer]
            heads = heads_RHE[part.first : part.end]
            added = heads if part.which is None else heads_RHE[part.which]
            kv[part.rows, :, part.positions] = added[:, shape.num_heads :]
            if not len(heads):  # all of its sequences are of a kind with earlier ones
                continue
            query = heads[:, : shape.num_heads].view(len(heads), num_kv, self._group, shape.head_size)
            read = kv[:, :, : part.read] if part.asking is None else kv[part.asking, :, : part.read]
            attended = F.scaled_dot_product_attention(
                query, read[:, :num_kv], read[:, num_kv:], attn_mask=part.masks[window], scale=scale
            )
            found.append(attended.reshape(len(heads), -1))
        return found[0] if len(found) == 1 else torch.cat(found)


class _SpanPart(NamedTuple):
    """`first` to `end` are the rows that ask; with kin, `which` of all that ask each slot belongs to, and `asking` the
    slots of those of this span."""

    kv: Tensor
    first: int
    end: int
    rows: Tensor
    positions: Tensor
    read: int
    masks: dict[int | None, Tensor | None]
    which: Tensor | None = None
    asking: Tensor | None = None


def _seen(places_T: Tensor, positions_P: Tensor, window: int | None) -> Tensor:
    """Additive mask [P, T]: a position sees itself and those before it, or the last `window` of them."""
    is_seen_PT = places_T <= positions_P[:, None]
    if window is not None:
        is_seen_PT &= places_T > positions_P[:, None] - window
    return torch.where(is_seen_PT, 0.0, -math.inf)
