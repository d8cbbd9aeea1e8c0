"""What a run takes of a cluster, and whether the cluster has it: pure, and without ray.

Parts: `Bundle` (resources that one process takes on one node), `Placement` (all of a run's), `NodeRoom`, `place`,
`refusal`. Invariant: what writes the run (orchestrator, page, trainer rank 0) is placed on the node of its owner, so
that a node that is lost and still runs can write nothing; engines and further ranks go anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mettle.errors import UserError
from mettle.runs.config import RunConfig

OWNER = "owner"
TRAINER = "trainer"
REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one process takes on one node. `is_pinned`: on the node of the run's owner."""

    process: str
    num_cpus: float
    num_gpus: float
    is_pinned: bool = False

    def resources(self) -> dict[str, float]:
        """In Ray's words."""
        found = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in found.items() if amount}

    def __str__(self) -> str:
        gpus = f" and {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.process} ({self.num_cpus:g} CPU{gpus}{', on the owner' if self.is_pinned else ''})"


@dataclass(frozen=True, slots=True)
class Placement:
    """The bundles of a run: those of the owner and the ranks lie close together, those of the engines spread out."""

    close: tuple[Bundle, ...]
    spread: tuple[Bundle, ...]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return (*self.close, *self.spread)


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What a node has free. `is_owner`: the run is started there."""

    name: str
    num_cpus: float
    num_gpus: float
    is_owner: bool = False

    def __str__(self) -> str:
        gpus = f" and {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.name}{' (the owner)' if self.is_owner else ''} {self.num_cpus:g} CPU{gpus}"


def placement_of(config: RunConfig) -> Placement:
    """What the run needs."""
    ray = config.deployment.ray
    owner = [Bundle(OWNER, ray.cpus_for_owner, 0.0, is_pinned=True)] if ray.cpus_for_owner else []
    ranks = [
        Bundle(rank_name(rank), ray.cpus_per_rank, ray.gpus_per_rank, is_pinned=rank == 0)
        for rank in range(config.deployment.num_trainer_ranks)
    ]
    replicas = [
        Bundle(replica_name(number), ray.cpus_per_replica, ray.gpus_per_replica)
        for number in range(config.inference.replicas)
    ]
    return Placement((*owner, *ranks), tuple(replicas))


def rank_name(rank: int) -> str:
    """As a rank beats: `trainer`, `trainer-1`, ..."""
    return f"{TRAINER}-{rank}" if rank else TRAINER


def replica_name(number: int) -> str:
    """`replica-0`, ..."""
    return f"{REPLICA}-{number}"


def place(bundles: Iterable[Bundle], nodes: Sequence[NodeRoom]) -> dict[str, str]:
    """A node for each process, the pinned and the largest first, each on the emptiest node that has room.

    Ray decides where they go in the end; this says whether they can. Raises: UserError naming what has no room.
    """
    free = {node.name: [node.num_gpus, node.num_cpus] for node in nodes}
    owners = {node.name for node in nodes if node.is_owner}
    found: dict[str, str] = {}
    for bundle in sorted(bundles, key=lambda b: (not b.is_pinned, -b.num_gpus, -b.num_cpus)):
        open_to = owners if bundle.is_pinned else free.keys()
        fitting = [n for n in open_to if free[n][0] >= bundle.num_gpus and free[n][1] >= bundle.num_cpus]
        if not fitting:
            raise UserError(refusal(bundle, nodes, found))
        name = max(sorted(fitting), key=lambda n: free[n])
        free[name][0] -= bundle.num_gpus
        free[name][1] -= bundle.num_cpus
        found[bundle.process] = name
    return found


def refusal(bundle: Bundle, nodes: Sequence[NodeRoom], placed: Mapping[str, str]) -> str:
    """One line: what has no room, what the cluster has, and what to do."""
    has = ", ".join(str(node) for node in nodes) or "no node that lives"
    after = f" once {len(placed)} others are placed" if placed else ""
    return (
        f"the Ray cluster has no room for {bundle}{after}: free are {has};"
        " add a node, or take less in [deployment.ray], num_trainer_ranks or inference.replicas"
    )
