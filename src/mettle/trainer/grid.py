"""How the ranks of a trainer stand to each other: a mesh of (replicate, shard, context, expert), one number for each.

    replicate   copies of the weights (HSDP): only sums of gradients cross
    shard       the weights are cut, each rank has its own sequences
    context     the weights are cut, and the ranks share sequences: each has some of their tokens
    expert      the weights are cut, each rank has its own sequences, and some of the experts for all of them

What is not of experts is cut over shard, context and expert alike, for there each token is a term of the sum, wherever
it is computed. The last number counts fastest, so the ranks that talk most are neighbours. Invariant: all that is known
here follows from the numbers and the rank, so every rank knows of every other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mettle.errors import UserError
from mettle.trainer.world import World


@dataclass(frozen=True, slots=True)
class Grid:
    """The four numbers, and this rank's place."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    rank: int = 0

    @classmethod
    def of(cls, world: World, *, num_replicas: int = 1, context_parallel: int = 1, expert_parallel: int = 1) -> Grid:
        """Raises: UserError when the ranks cannot be dealt so."""
        wanted = num_replicas * context_parallel * expert_parallel
        if world.size % wanted:
            raise UserError(
                f"{world.size} trainer ranks cannot be {num_replicas} replicas of {context_parallel} context by"
                f" {expert_parallel} expert ranks: take a multiple of {wanted} in deployment.num_trainer_ranks, or less"
                " in trainer.num_replicas, context_parallel or expert_parallel"
            )
        return cls(num_replicas, world.size // wanted, context_parallel, expert_parallel, world.rank)

    @property
    def size(self) -> int:
        """All ranks."""
        return self.replicate * self.shard * self.context * self.expert

    @property
    def num_shares(self) -> int:
        """Parts that the data is dealt in: ranks of one context group have one together."""
        return self.size // self.context

    @property
    def share(self) -> int:
        """The part of this rank."""
        return self.rank // (self.expert * self.context) * self.expert + self.rank % self.expert

    @property
    def context_rank(self) -> int:
        """This rank's place in its context group. Who has place 0 speaks for the group where all know the same."""
        return self.rank // self.expert % self.context

    def weights_mesh(self, device_type: str) -> DeviceMesh:
        """Of what is not of experts: ("replicate", "shard"), or "shard" alone where there is one copy."""
        cut = self.size // self.replicate
        if self.replicate == 1:
            return init_device_mesh(device_type, (cut,), mesh_dim_names=("shard",))
        return init_device_mesh(device_type, (self.replicate, cut), mesh_dim_names=("replicate", "shard"))

    def context_mesh(self, device_type: str) -> DeviceMesh:
        """This rank's context group."""
        shape = (self.replicate * self.shard, self.context, self.expert)
        return init_device_mesh(device_type, shape, mesh_dim_names=("shard", "context", "expert"))["context"]

    def experts_mesh(self, device_type: str) -> DeviceMesh:
        """("replicate", "shard", "expert"): who has copies of the same experts, parts of them, and others."""
        shape = (self.replicate, self.shard * self.context, self.expert)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "expert"))
