"""The budget of keys and values, in bytes: what it is, and who has how much of it.

Slots, prompts that are being computed and cached prefixes share one budget, which is known before the start. Room for
something new is made by giving back free slots and then by dropping the oldest cached prefixes; if that is not enough
it is not there, and whoever asked waits or takes it from a younger sequence (`scheduler.py`).
Invariant: `used` never exceeds `budget`.
"""

from __future__ import annotations

import torch

from mettle.errors import UserError
from mettle.inference.engine.attention import whole_blocks
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.prefixes import PrefixPages
from mettle.inference.engine.slots import KvSizes, SlotCache, capacities
from mettle.processes.host import free_memory_mb

_UNKNOWN_HOST_BYTES = 2 << 30


class KvMemory:
    """Everything that holds keys and values; `promised` bytes belong to prompts that are being computed."""

    def __init__(self, sizes: KvSizes, limits: Limits, device: torch.device) -> None:
        self.sizes = sizes
        self.budget = kv_budget(sizes, limits, device)
        self.slots = SlotCache(sizes, limits.max_slots, limits.max_model_len, self.budget, device)
        self.prefixes = PrefixPages(self.claim)
        self.promised = 0

    @property
    def used(self) -> int:
        """Bytes set aside, cached prefixes among them."""
        return self.slots.num_bytes + self.prefixes.num_bytes + self.promised

    def claim(self, num_bytes: int) -> bool:
        """Make room for so many bytes more; False when they cannot be had without ending something."""
        if self.used + num_bytes <= self.budget:
            return True
        self.slots.trim()
        if self.used - self.prefixes.num_bytes + num_bytes > self.budget:
            return False
        while self.used + num_bytes > self.budget:
            self.prefixes.drop_oldest()
        return True

    def prompt_bytes(self, length: int) -> int:
        """What the keys and values of a prompt take while it is computed."""
        return whole_blocks(length) * self.sizes.token_bytes

    def slot_bytes(self, length: int) -> int:
        """What a slot for a sequence of `length` tokens takes."""
        return self.slots.class_of(length).slot_bytes


def kv_budget(sizes: KvSizes, limits: Limits, device: torch.device) -> int:
    """The bytes that keys and values may take: as configured, or a share of the memory that is free.

    Raises: UserError when not even one sequence of the greatest length fits.
    """
    longest = capacities(limits.max_model_len)[-1]
    # The longest prompt and the slot it goes into, or two slots while a sequence moves up from one to the other.
    least = 2 * longest * sizes.token_bytes
    budget = limits.kv_cache_bytes
    if budget is None:
        # As many slots as there may be, and as much again for prompts and prefixes: more would never be used up.
        most = 2 * (limits.max_slots + 1) * longest * sizes.token_bytes
        budget = min(most, int(free_memory_bytes(device) * limits.kv_cache_share))
    if budget < least:
        raise UserError(
            f"keys and values may take {_megabytes(budget)}, and one sequence of max_model_len {limits.max_model_len} "
            f"takes {_megabytes(least)} ({sizes.token_bytes:,} bytes a token, twice while it is placed): "
            f"give a larger kv_cache_bytes or a max_model_len of at most {budget // (2 * sizes.token_bytes):,}"
        )
    return budget


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def free_memory_bytes(device: torch.device) -> int:
    """What is free of the device's memory; on a CPU of the host's, or of what the containers around us leave."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free_mb = free_memory_mb()
    return _UNKNOWN_HOST_BYTES if free_mb is None else free_mb << 20
