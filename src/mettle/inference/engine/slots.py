"""Keys and values of the running sequences: slots of a few capacities, those of one capacity side by side.

Legend: L layers, S slots, K kv heads, T positions, E head size. A `SlotClass` is one tensor [S, L, 2K, T, E] whose
first slots are the running sequences' without a gap, so that a step reads them as views; a sequence that outgrows its
class is copied into the next. Why not pages with a table: eager PyTorch would gather them anew for each layer of each
step, three times the memory traffic of reading a view, and a call for each sequence costs more than the work at small
sizes. Four capacities an octave waste an eighth in the mean, and a call more a layer for each class in use.

On a CPU a class lies in memory that is only addressed until it is written to, and that is given back by `trim`; on a
device it is allocated anew when it grows. Invariant: everything in it is finite, since a masked position still takes
part in a product with 0.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.inference.engine.architecture import ModelShape
from mettle.inference.engine.attention import Span, whole_blocks
from mettle.inference.engine.sequences import RunningSequence

SMALLEST = 128
"""Positions of the least slot: where a whole batch is this short, it is one class and one call."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def capacities(max_length: int) -> list[int]:
    """The lengths that slots have, the last of them for the longest sequence."""
    longest, found, step = whole_blocks(max_length), [], SMALLEST // 2
    capacity = SMALLEST
    while capacity < longest:
        found.append(capacity)
        if capacity >= 8 * step:
            step *= 2
        capacity += step
    return [*found, longest]


@dataclass(frozen=True, slots=True)
class KvSizes:
    """What keys and values take: `shape`'s, in `dtype`."""

    shape: ModelShape
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """One position of one sequence in all layers."""
        shape = self.shape
        return shape.num_layers * 2 * shape.num_kv_heads * shape.head_size * self.dtype.itemsize

    def of_rows(self, rows: int, positions: int) -> tuple[int, ...]:
        """The sizes of a tensor for `rows` sequences."""
        shape = self.shape
        return (rows, shape.num_layers, 2 * shape.num_kv_heads, positions, shape.head_size)


@dataclass(slots=True)
class _BackedMemory:
    """What all classes have set aside: asked for with every claim, and so counted where it changes."""

    num_bytes: int = 0


class SlotClass:
    """Slots of one capacity; slot i is `rows[i]`'s."""

    def __init__(
        self, sizes: KvSizes, capacity: int, max_slots: int, device: torch.device, backed: _BackedMemory
    ) -> None:
        self.capacity = capacity
        self.slot_bytes = capacity * sizes.token_bytes
        self.rows: list[RunningSequence] = []
        self._sizes, self._max_slots, self._device = sizes, max_slots, device
        self._num_backed = 0  # slots that have memory, used or not
        self._backed = backed
        self._data: Tensor | None = None
        self._pages: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """Memory set aside, used or not."""
        return self._num_backed * self.slot_bytes

    def bytes_for(self, count: int) -> int:
        """Memory that `count` more slots would add."""
        return max(0, len(self.rows) + count - self._num_backed) * self.slot_bytes

    def span(self, lengths: Sequence[int]) -> Span:
        """The running sequences' slots, for a step."""
        return Span(self._tensor(len(self.rows))[: len(self.rows)], lengths)

    def fill(self, rows: Sequence[RunningSequence], kv_MLKTE: Tensor) -> None:
        """Give `rows` the next slots, with `kv` in their first positions."""
        first, stop = len(self.rows), len(self.rows) + len(rows)
        self._tensor(stop)[first:stop, :, :, : kv_MLKTE.shape[3]] = kv_MLKTE
        self.rows += rows

    def take(self, index: int, length: int) -> Tensor:
        """A copy [1, L, 2K, T, E] of one slot's first positions."""
        return self._tensor(0)[index : index + 1, :, :, :length].clone()

    def clear(self, index: int) -> None:
        """Put zeros in a slot that may hold values which are not finite."""
        self._tensor(0)[index] = 0

    def close_gaps(self, gone: Sequence[int]) -> None:
        """Free the slots `gone`, in ascending order, and fill them with the last ones."""
        num_left = len(self.rows) - len(gone)
        leaving = set(gone)
        holes = [i for i in gone if i < num_left]
        movers = [i for i in range(num_left, len(self.rows)) if i not in leaving]
        if movers:
            length = max(self.rows[i].length for i in movers)
            data = self._tensor(0)
            source, target = (torch.tensor(ids, device=self._device) for ids in (movers, holes))
            data[target, :, :, :length] = data[source, :, :, :length]
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[num_left:]

    def trim(self) -> None:
        """Give back the memory of slots that are free."""
        if self._num_backed == len(self.rows):
            return
        self._back(len(self.rows))
        if self._pages is not None:
            used = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if used < len(self._pages):
                self._pages.madvise(mmap.MADV_DONTNEED, used, len(self._pages) - used)
        elif self._data is not None:
            self._data = self._data[: self._num_backed].clone()

    def _tensor(self, num_slots: int) -> Tensor:
        # At least `num_slots` slots that have memory.
        if self._data is None:
            self._data = self._addressed() if self._device.type == "cpu" else self._zeros(0)
        if num_slots > len(self._data):
            more = self._zeros(num_slots - len(self._data))
            self._data = torch.cat([self._data, more])
        self._back(max(self._num_backed, num_slots))
        return self._data

    def _back(self, num_slots: int) -> None:
        self._backed.num_bytes += (num_slots - self._num_backed) * self.slot_bytes
        self._num_backed = num_slots

    def _addressed(self) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._pages = mmap.mmap(-1, self._max_slots * self.slot_bytes, flags=flags)
        sizes = self._sizes.of_rows(self._max_slots, self.capacity)
        return torch.frombuffer(self._pages, dtype=self._sizes.dtype).view(sizes)

    def _zeros(self, num_slots: int) -> Tensor:
        sizes = self._sizes.of_rows(num_slots, self.capacity)
        return torch.zeros(sizes, dtype=self._sizes.dtype, device=self._device)


class SlotCache:
    """Slots for at most `max_slots` sequences of at most `max_length` tokens; the batch is in the order of classes."""

    def __init__(self, sizes: KvSizes, max_slots: int, max_length: int, max_bytes: int, device: torch.device) -> None:
        self._backed = _BackedMemory()
        self.classes: list[SlotClass] = []
        for capacity in capacities(max_length):
            most = max(1, min(max_slots, max_bytes // (capacity * sizes.token_bytes)))
            self.classes.append(SlotClass(sizes, capacity, most, device, self._backed))

    @property
    def num_bytes(self) -> int:
        """Memory set aside, used or not."""
        return self._backed.num_bytes

    @property
    def rows(self) -> list[RunningSequence]:
        """The batch: every running sequence, those of one class together."""
        return [row for one in self.classes for row in one.rows]

    def class_of(self, length: int) -> SlotClass:
        """The class for sequences of `length` tokens."""
        return next(one for one in self.classes if one.capacity >= length)

    def in_use(self) -> Iterator[SlotClass]:
        """The classes that have running sequences."""
        return (one for one in self.classes if one.rows)

    def outgrown(self) -> Iterator[tuple[SlotClass, int]]:
        """Slots, with their class, whose sequences need a larger one for their newest token."""
        for one in self.classes:
            for index in reversed(range(len(one.rows))):
                if one.rows[index].length > one.capacity:
                    yield one, index

    def place(self, rows: Sequence[RunningSequence], prompts: Sequence[int], kv_NLKTE: Tensor) -> None:
        """Give new sequences slots that begin with the prompts they have: `rows[i]` that of `prompts[i]`."""
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            alike.setdefault(self.classes.index(self.class_of(row.length)), []).append(i)
        for number, members in alike.items():
            owners = torch.tensor([prompts[i] for i in members], device=kv_NLKTE.device)
            self.classes[number].fill([rows[i] for i in members], kv_NLKTE.index_select(0, owners))

    def move_up(self, source: SlotClass, index: int) -> None:
        """Copy an outgrown sequence into the class for its length."""
        row = source.rows[index]
        self.class_of(row.length).fill([row], source.take(index, row.length - 1))
        source.close_gaps([index])

    def drop_ended(self) -> None:
        """Free the slots of what has ended."""
        for one in self.classes:
            if gone := [i for i, row in enumerate(one.rows) if row.has_ended]:
                one.close_gaps(gone)

    def find(self, row: RunningSequence) -> tuple[SlotClass, int] | None:
        """Where a running sequence is; None when it has no slot."""
        return next(((one, one.rows.index(row)) for one in self.classes if row in one.rows), None)

    def trim(self) -> None:
        """Give back the memory of all free slots."""
        for one in self.classes:
            one.trim()
