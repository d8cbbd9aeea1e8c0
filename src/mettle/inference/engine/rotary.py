"""Rotary positions as tables of cosines and sines. Legend: T positions, E head size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mettle.inference.engine.architecture import Rope


def rope_tables(rope: Rope, head_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, E]: rotated = x * cos + roll(x, E/2) * sin."""
    frequencies = _frequencies(rope, head_size)
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
