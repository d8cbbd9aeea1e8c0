"""What a prompt's positions attend to where they see all before them: level by level, each level in one call.

Legend: N prompts, B blocks, P positions, H query heads, K kv heads, G = H / K, E head size, T positions of the cache.

A position sees its own tile of `TILE` in one causal call. What lies before it is cut at every power of two: the second
tile of two reads the first, the second two of four the first two, and so on by doubling. Nothing on a level needs a
mask, all blocks of a level are one call, and a prompt has as many levels as its length has doublings. What the levels
give is joined by the logarithms of their sums. So no key is computed that is not seen, but for half of the own tile;
one causal call for all computes blocks of 256 (four heads of 32, Zen 5, against one causal call: 1,024 positions .92,
4,096 .97).

Invariant, on a CPU: what a position gets hangs on where it stands and on the keys before it, whatever rows are asked
for and whatever the number of prompts, to the last bit. Nobody promises that of the kernel, so it is tried out once a
process (`keeps_bits`). Rows come in multiples of 32, since what is left over may be computed in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape
from mettle.inference.engine.elementwise import log_add_exp, sigmoid

TILE = 128
ROWS = 32
"""Rows come in multiples of this."""
_TRIED_ROWS = ((0, 32), (32, 128), (128, 288), (96, 320), (0, 800), (224, 1024))
_TRIED_KEYS = (128, 256, 1024)


class _LevelPart(NamedTuple):
    """Positions from `at` to `stop` on the level of blocks of `size`: part of one, or `num_blocks` whole ones, every
    other. Each reads the block before it."""

    size: int
    at: int
    stop: int
    num_blocks: int


class LevelAttention:
    """Positions from `start` to `end` of N prompts, whose keys and values the cache has already.

    `start` is a multiple of `ROWS`, and the cache has room up to the next one after `end`.
    """

    def __init__(self, shape: ModelShape, start: int, end: int) -> None:
        self._num_kv, self._group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self._scale = shape.attention_scale
        self._first = start // TILE * TILE
        self._before, self._after = start - self._first, -end % ROWS
        self._parts = list(_level_parts(start, end + self._after))

    def __call__(self, kv_NKTE: Tensor, query_NPHE: Tensor) -> Tensor:
        """What the queries attend to, [N, P, H, E]. `kv` has the keys' heads first, then the values'."""
        length = query_NPHE.shape[1]
        if self._before or self._after:  # with rows that nobody asked for
            query_NPHE = F.pad(query_NPHE, (0, 0, 0, 0, self._before, self._after))
        if not self._parts:  # it is all one tile
            own = kv_NKTE[:, :, : query_NPHE.shape[1]].repeat_interleave(self._group, 1)
            return _causal(query_NPHE, own, self._scale)[0][:, self._before : self._before + length]
        # The first queries of all kv heads, then the second ones: so positions and those of one kv head are rows of it.
        by_kv_head_NPKGE = query_NPHE.view(*query_NPHE.shape[:2], self._num_kv, self._group, -1)
        query_NPGKE = by_kv_head_NPKGE.transpose(2, 3).contiguous()
        found_NPHE, sums_NPH = self._own_tiles(kv_NKTE, query_NPGKE.flatten(2, 3))
        found_NPGKE = found_NPHE.view(query_NPGKE.shape)
        for part in self._parts:
            self._add_part(part, kv_NKTE, query_NPGKE, found_NPGKE, sums_NPH)
        return found_NPGKE[:, self._before : self._before + length].transpose(2, 3).flatten(2, 3)

    def _own_tiles(self, kv_NKTE: Tensor, query_NPHE: Tensor) -> tuple[Tensor, Tensor]:
        # What each position gets of its own tile, and the logarithms of the sums, [N, P, H].
        length, group = query_NPHE.shape[1], self._group
        key, value = kv_NKTE[:, :, self._first : self._first + length].chunk(2, 1)
        own = torch.cat([key] * group + [value] * group, 1)
        whole = length // TILE * TILE
        found: list[tuple[Tensor, Tensor]] = []
        if whole > TILE:
            pairs = zip(query_NPHE[:, :whole], own[:, :, :whole], strict=True)
            tiles = [
                _causal(
                    query.view(-1, TILE, *query.shape[1:]),
                    kv.view(len(kv), -1, TILE, kv.shape[-1]).transpose(0, 1),
                    self._scale,
                )
                for query, kv in pairs
            ]
            found.append((_stacked([found for found, _ in tiles]), _stacked([sums for _, sums in tiles])))
        elif whole:
            found.append(_causal(query_NPHE[:, :whole], own[:, :, :whole], self._scale))
        if whole < length:
            found.append(_causal(query_NPHE[:, whole:], own[:, :, whole:], self._scale))
        if len(found) == 1:
            return found[0]
        return torch.cat([found for found, _ in found], 1), torch.cat([sums for _, sums in found], 1)

    def _add_part(
        self, part: _LevelPart, kv_NKTE: Tensor, query_NPGKE: Tensor, found_NPGKE: Tensor, sums_NPH: Tensor
    ) -> None:
        size, count = part.size, part.num_blocks
        key_at, at, stop = part.at // size * size - size, part.at - self._first, part.stop - self._first
        if count == 1:
            own = slice(at, stop)
            kv = kv_NKTE[:, :, key_at : key_at + size]
            self._add(kv, query_NPGKE[:, own], found_NPGKE[:, own], sums_NPH[:, own])
            return
        for kv, query, found, sums in zip(kv_NKTE, query_NPGKE, found_NPGKE, sums_NPH, strict=True):
            rows = [_every_other(each, 0, at, size, count) for each in (query, found, sums)]
            self._add(_every_other(kv, 1, key_at, size, count), *rows)

    def _add(self, kv_BKTE: Tensor, query_BPGKE: Tensor, found_BPGKE: Tensor, sums_BPH: Tensor) -> None:
        # Join what the queries get of these keys to what they have.
        key, value = kv_BKTE.chunk(2, 1)
        more_BKRE, more_sums_BKR = _attend(query_BPGKE.flatten(1, 2).transpose(1, 2), key, value, self._scale)
        more_BPGKE = more_BKRE.transpose(1, 2).view(query_BPGKE.shape)
        more_sums_BPH = more_sums_BKR.transpose(1, 2).reshape(sums_BPH.shape)
        weight_BPH = sigmoid(more_sums_BPH - sums_BPH).to(found_BPGKE.dtype)
        found_BPGKE.lerp_(more_BPGKE, weight_BPH.view(*found_BPGKE.shape[:-1], 1))
        sums_BPH.copy_(log_add_exp(sums_BPH, more_sums_BPH))


def _level_parts(start: int, end: int) -> Iterator[_LevelPart]:
    """The parts of the positions from `start` to `end` on every level, from the least to the greatest."""
    size = TILE
    while size < end:
        at = start if start // size % 2 else (start // size + 1) * size
        if at % size and at < end:
            stop = min(at // size * size + size, end)
            yield _LevelPart(size, at, stop, 1)
            at = stop + size
        if count := max(0, end - at + size) // (2 * size):
            yield _LevelPart(size, at, at + (2 * count - 1) * size, count)
            at += 2 * count * size
        if at < end:
            yield _LevelPart(size, at, end, 1)
        size *= 2


def _every_other(rows: Tensor, dim: int, first: int, size: int, count: int) -> Tensor:
    """Every other block of `size` along `dim`, from `first` on: [count, ...], a view."""
    blocks = rows.narrow(dim, first, (2 * count - 1) * size).unfold(dim, size, 2 * size)
    return blocks.movedim((dim, -1), (0, dim + 1))


def _stacked(parts: list[Tensor]) -> Tensor:
    # [B, TILE, ...] of each prompt as [N, P, ...], without a copy where there is one.
    joined = [part.flatten(0, 1) for part in parts]
    return joined[0][None] if len(joined) == 1 else torch.stack(joined)


def _causal(query_BPHE: Tensor, kv_BHTE: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """What positions get of themselves and those before them, [B, P, H, E], and logarithms of the sums [B, P, H]."""
    key, value = kv_BHTE.chunk(2, 1)
    found, sums = _attend(query_BPHE.transpose(1, 2), key, value, scale, is_causal=True)
    return found.transpose(1, 2), sums.transpose(1, 2)


def _attend(
    query_BKRE: Tensor, key_BKTE: Tensor, value_BKTE: Tensor, scale: float | None, *, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    found, sums = attend(query_BKRE, key_BKTE, value_BKTE, 0.0, is_causal, scale=scale)
    return found, sums


@lru_cache(maxsize=16)
def keeps_bits(head_size: int, dtype: torch.dtype, num_threads: int) -> bool:
    """Whether torch has the kernel here, and a position gets the same bits of it whatever rows are asked for."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    noise = torch.Generator().manual_seed(0)
    sizes = (1, num_threads, max(_TRIED_KEYS), head_size)
    query, key, value = (torch.randn(sizes, generator=noise).to(dtype) for _ in range(3))
    for count in _TRIED_KEYS:
        keys, values = key[:, :, :count], value[:, :, :count]
        whole = _attend(query, keys, values, None)
        for first, stop in _TRIED_ROWS:
            part = _attend(query[:, :, first:stop], keys, values, None)
            if not all(torch.equal(some, all_of[:, :, first:stop]) for some, all_of in zip(part, whole, strict=True)):
                return False
    own = [part[:, :, :TILE] for part in (query, key, value)]
    whole = _attend(own[0], own[1], own[2], None, is_causal=True)
    for stop in range(ROWS, TILE, ROWS):
        query, key, value = (one[:, :, :stop] for one in own)
        part = _attend(query, key, value, None, is_causal=True)
        if not all(torch.equal(some, all_of[:, :, :stop]) for some, all_of in zip(part, whole, strict=True)):
            return False
    return True
