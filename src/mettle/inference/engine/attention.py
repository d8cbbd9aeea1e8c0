"""How queries read keys and values: prompts in blocks of positions, running sequences one position at a time.

Legend: N prompts, R rows, B running sequences, L layers, H heads, K kv heads, G = H / K queries of a kv head, T
positions, E head size. Keys and values lie as [N, L, 2K, T, E]: keys in the first K heads, values in the rest.

Invariant, on a CPU: what a position gets depends on the positions before it alone, to the last bit; neither on who else
is in the batch nor on where a prompt was cut into chunks or taken up from a cached prefix. A matrix product adds up in
an order that hangs on its shape, so a shape may hang only on where a position stands. A prompt's positions are computed
in blocks of `BLOCK`, each of which reads the keys up to its own end, whether all of its rows are asked for or one. A
running sequence's position with up to `MAX_QUERIES` queries is added up key by key, so that masked keys behind it
change nothing; with more queries the keys are summed in pieces, and then exactly its slot's capacity is read, which
hangs on its own length. So a decoded position differs in the last bit from the same one in a prompt, and only what was
computed in a prompt may be used again for a prompt. Blocks of 32 cost no more than the whole prompt in one call
(0.5B shape, 512 tokens: 10.4 ms a layer against 14.7; 2,048: 117 against 121; blocks of 256: 157).

Far into a prompt, from `FAR` on, most of a block's work is the keys before it, which need no mask and are quicker for
more queries at once. There the blocks are of `TILE`: what the keys before give and what the block itself gives are
computed apart and weighed by their sums (8,192 positions, four heads of 32: 480 ms a layer where blocks with a mask
took 680, and one causal call 450).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape

BLOCK = 32
TILE = 128
"""A multiple of `BLOCK`."""
FAR = 1024
"""A multiple of `TILE`."""
LENGTH_STEP = 16
MAX_QUERIES = 3

Attend = Callable[[int, Tensor], Tensor]
"""Takes a layer's number and its rows' heads [R, H + 2K, E] and gives what they attended to, [rows, H * E]."""


def whole_blocks(length: int) -> int:
    """The positions of the blocks that `length` tokens lie in."""
    return -(-length // BLOCK) * BLOCK


class PromptAttention:
    """Positions from `start` to `end` of N prompts, whose earlier ones lie in `kv` already; theirs are added there.

    `start` begins a block, and `kv` holds whole blocks.
    """

    def __init__(self, shape: ModelShape, kv_NLKTE: Tensor, start: int, end: int) -> None:
        assert start % BLOCK == 0, "prompts are taken up where a block begins"
        self._shape = shape
        self._kv = kv_NLKTE
        self._start, self._end = start, end
        self._has_tiles = kv_NLKTE.device.type == "cpu" and _knows_sums()
        self._masks = {window: self._mask(window) for window in shape.windows}

    def __call__(self, layer: int, heads_RHE: Tensor) -> Tensor:
        shape, start, end = self._shape, self._start, self._end
        num_prompts, length = len(self._kv), end - start
        heads = heads_RHE[: num_prompts * length].view(num_prompts, length, -1, shape.head_size).transpose(1, 2)
        kv = self._kv[:, layer]
        kv[:, :, start:end] = heads[:, shape.num_heads :]
        window = shape.layers[layer].window
        parts, at = [], start
        while at < end:
            is_far = self._is_far(at, window)
            size = TILE if is_far else BLOCK
            first = at // size * size
            stop = min(first + size, end)
            query = heads[:, : shape.num_heads, at - start : stop - start]
            if stop - at < size:  # rows that nobody asked for
                query = F.pad(query, (0, 0, at - first, first + size - stop))
            found = self._tile(kv, query, first) if is_far else self._block(kv, query, first, window)
            parts.append(found[:, :, at - first : stop - first])
            at = stop
        attended = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return attended.transpose(1, 2).reshape(num_prompts * length, -1)

    def _is_far(self, position: int, window: int | None) -> bool:
        return self._has_tiles and window is None and position >= FAR

    def _block(self, kv: Tensor, query: Tensor, first: int, window: int | None) -> Tensor:
        """What `BLOCK` queries [N, H, BLOCK, E] from position `first` on attend to."""
        stop = first + BLOCK
        key, value, grouped = self._before(kv, query, stop)
        mask = self._masks[window][:, -stop:]
        found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=self._shape.attention_scale)
        return found.view(query.shape)

    def _tile(self, kv: Tensor, query: Tensor, first: int) -> Tensor:
        """What `TILE` queries [N, H, TILE, E] from position `first` on attend to."""
        shape, attend = self._shape, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own = kv[:, :, first : first + TILE]
        own = F.pad(own, (0, 0, 0, TILE - own.shape[2])).repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
        key, value = own.chunk(2, 1)
        found, sums_NHP = attend(query, key, value, 0.0, True, scale=shape.attention_scale)
        key, value, grouped = self._before(kv, query, first)
        earlier, earlier_sums = attend(grouped, key, value, 0.0, False, scale=shape.attention_scale)
        weight_NHP1 = torch.sigmoid(earlier_sums.reshape(sums_NHP.shape) - sums_NHP)[..., None]
        merged: Tensor = torch.lerp(found, earlier.view(query.shape), weight_NHP1.to(found.dtype))
        return merged

    def _before(self, kv: Tensor, query: Tensor, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        # Queries as [N, K, G * P, E]: those of one kv head share its keys without a copy.
        num_kv = self._shape.num_kv_heads
        grouped = query.reshape(len(query), num_kv, -1, self._shape.head_size)
        return kv[:, :num_kv, :stop], kv[:, num_kv:, :stop], grouped

    def _mask(self, window: int | None) -> Tensor:
        # [G * BLOCK, T] of the last block that has one; an earlier one has the same seen from its own end.
        end = min(self._end, FAR) if self._is_far(FAR, window) else self._end
        places = torch.arange(whole_blocks(end), device=self._kv.device)
        mask_PT = _seen(places, places[-BLOCK:], window).to(self._kv.dtype)
        return mask_PT.repeat(self._shape.num_heads // self._shape.num_kv_heads, 1)


def _knows_sums() -> bool:
    """Whether this build of torch tells the logarithm of attention's sums, by which two parts of it can be joined."""
    return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


class Span(NamedTuple):
    """Running sequences whose slots lie side by side: their keys and values [B, L, 2K, T, E] and their lengths."""

    kv: Tensor
    lengths: Sequence[int]


class StepAttention:
    """One more position of each running sequence, which is added to its slot; spans follow each other in the batch."""

    def __init__(self, shape: ModelShape, spans: Sequence[Span], positions_B: Tensor) -> None:
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._parts: list[_SpanPart] = []
        first = 0
        for span in spans:
            positions = positions_B[first : first + len(span.lengths)]
            self._parts.append(self._part(span, first, positions))
            first += len(span.lengths)

    def _part(self, span: Span, first: int, positions: Tensor) -> _SpanPart:
        capacity, longest = span.kv.shape[3], max(span.lengths)
        reads_all = self._group > MAX_QUERIES
        read = capacity if reads_all else min(capacity, -(-longest // LENGTH_STEP) * LENGTH_STEP)
        rows = torch.arange(len(positions), device=positions.device)
        masks: dict[int | None, Tensor | None] = {}
        for window in self._shape.windows:
            is_whole = min(span.lengths) >= read and (window is None or window >= read)
            places = torch.arange(0 if is_whole else read, device=positions.device)
            masks[window] = None if is_whole else _seen(places, positions, window).to(span.kv.dtype)[:, None, None]
        return _SpanPart(span.kv, first, rows, positions, read, masks)

    def __call__(self, layer: int, heads_RHE: Tensor) -> Tensor:
        shape, num_kv = self._shape, self._shape.num_kv_heads
        window, scale = shape.layers[layer].window, shape.attention_scale
        found = []
        for part in self._parts:
            kv = part.kv[:, layer]
            heads = heads_RHE[part.first : part.first + len(part.rows)]
            kv[part.rows, :, part.positions] = heads[:, shape.num_heads :]
            query = heads[:, : shape.num_heads].view(len(part.rows), num_kv, self._group, shape.head_size)
            key, value = kv[:, :num_kv, : part.read], kv[:, num_kv:, : part.read]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=part.masks[window], scale=scale)
            found.append(attended.reshape(len(part.rows), -1))
        return found[0] if len(found) == 1 else torch.cat(found)


class _SpanPart(NamedTuple):
    kv: Tensor
    first: int
    rows: Tensor
    positions: Tensor
    read: int
    masks: dict[int | None, Tensor | None]


def _seen(places_T: Tensor, positions_P: Tensor, window: int | None) -> Tensor:
    """Additive mask [P, T]: a position sees itself and those before it, or the last `window` of them."""
    is_seen_PT = places_T <= positions_P[:, None]
    if window is not None:
        is_seen_PT &= places_T > positions_P[:, None] - window
    return torch.where(is_seen_PT, 0.0, -math.inf)
