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
more queries at once. There the blocks are of `TILE`, and from `FARTHER` on of `WIDE_TILE`: what the keys before give
and what the block gives are computed apart and weighed by their sums (8,192 positions, four heads of 32: 213 ms a
layer in blocks of 512, 242 in blocks of 128, and one causal call 232). The keys before are read for the rows that are
asked for alone, where a trial shows that this keeps the bits: else a few tokens behind a long prompt would cost 512.
The first `NEAR` positions are one causal call where a trial shows that it gives the bits of blocks with a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape

BLOCK = 32
NEAR = 128
"""A multiple of `BLOCK`."""
TILE = 128
"""A multiple of `BLOCK`."""
FAR = 1024
"""A multiple of `TILE`."""
WIDE_TILE = 512
FARTHER = 4096
"""A multiple of `WIDE_TILE`."""
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
        kind = (shape.head_size, kv_NLKTE.dtype, torch.get_num_threads())
        self._has_free_rows = self._has_tiles and end > FAR and _keeps_bits(*kind)
        has_windows = any(window is not None and window < NEAR for window in shape.windows)
        self._has_free_start = self._has_tiles and not has_windows and NEAR <= FAR and _begins_alike(*kind)
        self._masks = {window: self._mask(window) for window in shape.windows}

    def __call__(self, layer: int, heads_RHE: Tensor) -> Tensor:
        shape, start, end = self._shape, self._start, self._end
        num_prompts, length = len(self._kv), end - start
        heads = heads_RHE[: num_prompts * length].view(num_prompts, length, -1, shape.head_size).transpose(1, 2)
        kv = self._kv[:, layer]
        kv[:, :, start:end] = heads[:, shape.num_heads :]
        window = shape.layers[layer].window
        attended = heads.new_empty(num_prompts, length, shape.num_heads, shape.head_size)
        at = start
        if start == 0 and self._has_free_start:
            at = min(NEAR, end)
            query = heads[:, : shape.num_heads, :at]
            attended[:, :at] = self._beginning(kv, query).transpose(1, 2)
        while at < end:
            size = self._size(at, window)
            first = at // size * size
            stop = min(first + size, end)
            query = heads[:, : shape.num_heads, at - start : stop - start]
            found = self._block(kv, query, at, window) if size == BLOCK else self._tile(kv, query, at, size)
            attended[:, at - start : stop - start] = found.transpose(1, 2)
            at = stop
        return attended.view(num_prompts * length, -1)

    def _size(self, position: int, window: int | None) -> int:
        """Positions of the block that this one lies in."""
        if not self._is_far(position, window):
            return BLOCK
        return TILE if position < FARTHER else WIDE_TILE

    def _is_far(self, position: int, window: int | None) -> bool:
        return self._has_tiles and window is None and position >= FAR

    def _beginning(self, kv: Tensor, query: Tensor) -> Tensor:
        """What a prompt's first queries [N, H, P, E], `NEAR` at most, attend to."""
        shape, length = self._shape, query.shape[2]
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        query = F.pad(query, (0, 0, 0, -length % BLOCK))
        own = kv[:, :, : query.shape[2]].repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
        key, value = own.chunk(2, 1)
        found: Tensor = attend(query, key, value, 0.0, True, scale=shape.attention_scale)[0]
        return found[:, :, :length]

    def _block(self, kv: Tensor, query: Tensor, at: int, window: int | None) -> Tensor:
        """What queries [N, H, P, E] attend to, which begin the block at position `at` or are all of it."""
        stop, length = at + BLOCK, query.shape[2]
        if length < BLOCK:  # rows that nobody asked for
            query = F.pad(query, (0, 0, 0, BLOCK - length))
        key, value, grouped = self._before(kv, query, stop)
        mask = self._masks[window][:, -stop:]
        found = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=self._shape.attention_scale)
        return found.view(query.shape)[:, :, :length]

    def _tile(self, kv: Tensor, query: Tensor, at: int, size: int) -> Tensor:
        """What queries [N, H, P, E] from position `at` on attend to, which lie in a block of `size`."""
        shape, attend = self._shape, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        first, length = at // size * size, query.shape[2]
        own = kv[:, :, first : first + size]
        own = F.pad(own, (0, 0, 0, size - own.shape[2])).repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
        key, value = own.chunk(2, 1)
        whole = F.pad(query, (0, 0, at - first, first + size - at - length))  # with rows that nobody asked for
        found, sums_NHP = attend(whole, key, value, 0.0, True, scale=shape.attention_scale)
        asked, skipped = whole, 0
        if self._has_free_rows:  # whole blocks: what is left over after 32 numbers may be computed in another way
            asked, skipped = F.pad(query, (0, 0, 0, -length % BLOCK)), at - first
            found, sums_NHP = (part[:, :, skipped : skipped + asked.shape[2]] for part in (found, sums_NHP))
        key, value, grouped = self._before(kv, asked, first)
        earlier, earlier_sums = attend(grouped, key, value, 0.0, False, scale=shape.attention_scale)
        weight_NHP1 = torch.sigmoid(earlier_sums.reshape(asked.shape[:3]) - sums_NHP)[..., None]
        merged: Tensor = torch.lerp(found, earlier.view(asked.shape), weight_NHP1.to(found.dtype))
        return merged[:, :, at - first - skipped :][:, :, :length]

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


@lru_cache(maxsize=16)
def _keeps_bits(head_size: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether queries get the same bits from keys before them whatever their number, from a block on."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    noise = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, num_threads, count, head_size, generator=noise).to(dtype) for count in (2 * WIDE_TILE, FAR, FAR)
    )
    whole = attend(query, key, value, 0.0, False)
    for first, stop in ((0, BLOCK), (BLOCK, 3 * BLOCK), (TILE, 3 * TILE), (WIDE_TILE - 5 * BLOCK, WIDE_TILE)):
        part = attend(query[:, :, first:stop].contiguous(), key, value, 0.0, False)
        if not all(torch.equal(some, all_of[:, :, first:stop]) for some, all_of in zip(part, whole, strict=True)):
            return False
    return True


@lru_cache(maxsize=16)
def _begins_alike(head_size: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether one causal call for a prompt's first blocks gives the bits of a call with a mask for each of them."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    noise = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, num_threads, NEAR, head_size, generator=noise).to(dtype).unbind()
    places = torch.arange(NEAR)
    mask = _seen(places, places[-BLOCK:], None).to(dtype)
    blocks = [
        F.scaled_dot_product_attention(
            query[:, :, at : at + BLOCK], key[:, :, : at + BLOCK], value[:, :, : at + BLOCK],
            attn_mask=mask[:, NEAR - BLOCK - at :],
        )
        for at in range(0, NEAR, BLOCK)
    ]  # fmt: skip
    for stop in range(BLOCK, NEAR + 1, BLOCK):
        parts = (query[:, :, :stop], key[:, :, :stop], value[:, :, :stop])
        if not torch.equal(attend(*parts, 0.0, True)[0], torch.cat(blocks, 2)[:, :, :stop]):
            return False
    return True


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
