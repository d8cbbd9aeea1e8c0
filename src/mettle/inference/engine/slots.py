"""Keys and values of the running sequences: one slot each, the running ones first and without a gap.

Legend: L layers, S slots, K kv heads, T positions, E head size. One tensor [L, S, 2K, T, E] holds keys in the first K
heads and values in the rest, so that both are written at once and read as views. It grows in both directions when
needed. Invariant: everything in it is finite, since a masked position still takes part in a product with 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape

_FIRST_SLOTS = 16
_FIRST_POSITIONS = 128


class SlotCache:
    """KV memory for at most `max_slots` sequences of at most `max_length` tokens."""

    def __init__(
        self, shape: ModelShape, max_slots: int, max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._shape = shape
        self._max_slots, self._max_length = max_slots, max_length
        self._device, self._dtype = device, dtype
        self._data = self._zeros(min(_FIRST_SLOTS, max_slots), min(_FIRST_POSITIONS, max_length))

    @property
    def num_bytes(self) -> int:
        """Memory set aside, used or not."""
        return self._data.numel() * self._data.element_size()

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for the first `num_slots` slots with `length` positions each, keeping what is there."""
        slots, positions = self._data.shape[1], self._data.shape[3]
        if num_slots <= slots and length <= positions:
            return
        assert num_slots <= self._max_slots, f"{num_slots} slots were asked for, there are {self._max_slots}"
        assert length <= self._max_length, f"{length} positions were asked for, there are {self._max_length}"
        old = self._data
        wanted_slots = slots if num_slots <= slots else min(max(num_slots, 2 * slots), self._max_slots)
        wanted_length = positions if length <= positions else min(max(length, 2 * positions), self._max_length)
        self._data = self._zeros(wanted_slots, wanted_length)
        self._data[:, :slots, :, :positions] = old

    def write_prompts(self, layer: int, kv_N2KTE: Tensor, owner_M: Tensor, first_slot: int) -> None:
        """Fill the slots from `first_slot` on with prompts: slot `first_slot + m` gets prompt `owner_M[m]`."""
        num_rows, length = len(owner_M), kv_N2KTE.shape[2]
        self._data[layer, first_slot : first_slot + num_rows, :, :length] = kv_N2KTE.index_select(0, owner_M)

    def append(self, layer: int, kv_B2KE: Tensor, slots_B: Tensor, positions_B: Tensor) -> None:
        """Write one position of each of the first B slots."""
        self._data[layer][slots_B, :, positions_B] = kv_B2KE

    def views(self, layer: int, num_slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots, [B, K, T, E] each, without a copy."""
        num_kv = self._shape.num_kv_heads
        data = self._data[layer, :num_slots, :, :length]
        return data[:, :num_kv], data[:, num_kv:]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy slots onto others, so that the running ones stay without a gap."""
        if not sources:
            return
        if len(sources) == 1:
            self._data[:, targets[0], :, :length] = self._data[:, sources[0], :, :length]
            return
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        self._data[:, target, :, :length] = self._data[:, source, :, :length]

    def clear(self, slot: int) -> None:
        """Put zeros in a slot that may hold values which are not finite."""
        self._data[:, slot] = 0

    def _zeros(self, num_slots: int, length: int) -> Tensor:
        shape = self._shape
        sizes = (shape.num_layers, num_slots, 2 * shape.num_kv_heads, length, shape.head_size)
        return torch.zeros(sizes, dtype=self._dtype, device=self._device)
