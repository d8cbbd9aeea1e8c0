"""The ranks of one trainer: how many, which one this is, and what they tell each other.

Started under torchrun (WORLD_SIZE > 1) the ranks form a process group, NCCL on GPUs and gloo on CPUs; otherwise there
is one rank and every call is local. Invariants: rank 0 alone touches the ledger and the disk's shared names; ranks of
one host meet in a file of this user's and talk over the loopback interface, so that no other host can join or listen.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mettle.errors import UserError

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(hours=1)

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""Groups of this process's ranks beside the one of all, by what they are for."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        box: list[T | None] = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def total(self, values: Tensor) -> Tensor:
        """Sum over the ranks."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        found: list[T | None] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def saving_group(self) -> dist.ProcessGroup | None:
        """Ranks that write a checkpoint talk in a group of their own: their words must not get between those of the
        step that goes on meanwhile. Every rank calls it. None for one rank."""
        if self.size > 1 and "saving" not in _GROUPS:
            _GROUPS["saving"] = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        return _GROUPS.get("saving")

    def largest(self, values: Tensor) -> Tensor:
        """Maximum over the ranks."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Take this process's place: from torchrun's environment, or alone."""
    size, rank, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    chosen = _device(device, local)
    if size == 1:
        yield World(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    place = _meeting_place(size)
    # Both, since what is offloaded or saved is in the host's memory.
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield World(rank, size, chosen)
    finally:
        _GROUPS.clear()
        dist.destroy_process_group()


def _meeting_place(size: int) -> str:
    """Where the ranks find each other: a file where one torchrun has started all of them, else its TCP store.

    Beside the file in which a rank leaves its error: torchrun makes that folder for each attempt, for this user alone.
    """
    told = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not told or os.environ.get("LOCAL_WORLD_SIZE") != str(size):
        return "env://"
    if _LOOPBACK in [name for _, name in socket.if_nameindex()]:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, _LOOPBACK)
    return f"file://{Path(told).parent.parent / 'ranks'}"


_LOOPBACK = "lo"
_VARIABLES = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but torch sees no GPU; use device 'auto' or 'cpu'")
    return torch.device("cuda", local_rank)
