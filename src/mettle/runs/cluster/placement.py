"""What a run takes of a cluster, and whether the cluster has it: pure, and without ray.

Parts: `NodeBundle` (resources that one process takes on one node), `Placement` (all of a run's), `NodeRoom`, `place`,
`refusal`. Invariant: what writes the run (orchestrator, page, trainer rank 0) is placed on the node of its owner, so
that a node that is lost and still runs can write nothing; engines, further ranks, environments' workers and
sandboxes go anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mettle.errors import UserError
from mettle.runs.config import RunConfig

OWNER = "owner"
TRAINER = "trainer"
REPLICA = "replica"
WORKERS = "workers"
SANDBOXES = "sandboxes"
APART = frozenset({REPLICA, WORKERS, SANDBOXES})
"""Kinds of process that stand on as many nodes as there are, and of which one may be away while another answers."""


@dataclass(frozen=True, slots=True)
class NodeBundle:
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
    """The bundles of a run, in pools by name: what lives and dies together is taken, lost and taken again together."""

    pools: dict[str, tuple[NodeBundle, ...]]

    @property
    def bundles(self) -> tuple[NodeBundle, ...]:
        return tuple(bundle for pool in self.pools.values() for bundle in pool)


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What a node has free. `is_owner`: the run is started there."""

    name: str
    num_cpus: float
    num_gpus: float
    is_owner: bool = False
    id: str = ""

    def __str__(self) -> str:
        gpus = f" and {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"{self.name}{' (the owner)' if self.is_owner else ''} {self.num_cpus:g} CPU{gpus}"


def placement_of(config: RunConfig) -> Placement:
    """What the run needs."""
    ray = config.deployment.ray
    owner = [NodeBundle(OWNER, ray.cpus_for_owner, 0.0, is_pinned=True)] if ray.cpus_for_owner else []
    ranks = [
        NodeBundle(rank_name(rank), ray.cpus_per_rank, ray.gpus_per_rank, is_pinned=rank == 0)
        for rank in range(config.deployment.num_trainer_ranks)
    ]
    replicas = [
        NodeBundle(replica_name(number), ray.cpus_per_replica, ray.gpus_per_replica)
        for number in range(config.inference.replicas)
    ]
    workers = [NodeBundle(name, ray.cpus_per_worker_place, 0.0) for name in worker_place_names(config)]
    sandboxes = [NodeBundle(name, ray.cpus_per_sandbox_service, 0.0) for name in sandbox_service_names(config)]
    pools = {OWNER: tuple(owner), TRAINER: tuple(ranks)} if owner else {TRAINER: tuple(ranks)}
    return Placement(pools | {bundle.process: (bundle,) for bundle in (*replicas, *workers, *sandboxes)})


def rank_name(rank: int) -> str:
    """As a rank beats: `trainer`, `trainer-1`, ..."""
    return f"{TRAINER}-{rank}" if rank else TRAINER


def replica_name(number: int) -> str:
    """`replica-0`, ..."""
    return f"{REPLICA}-{number}"


def worker_place_names(config: RunConfig) -> list[str]:
    """`workers-0`, ...: where environments' workers are started; none where they are the orchestrator's children."""
    return [f"{WORKERS}-{number}" for number in range(config.deployment.ray.num_worker_places)]


def sandbox_service_names(config: RunConfig) -> list[str]:
    """`sandboxes-0`, ...: where environments' sandboxes are made; none where each environment's config says where."""
    return [f"{SANDBOXES}-{number}" for number in range(config.deployment.ray.num_sandbox_services)]


def kind_of(process: str) -> str:
    """What a process is, whatever its number."""
    return process.partition("-")[0]


def place(bundles: Iterable[NodeBundle], nodes: Sequence[NodeRoom]) -> dict[str, NodeRoom]:
    """A node for each process, the pinned and the largest first: ranks close together; engines, and workers, apart.

    Raises: UserError naming what has no room.
    """
    free = {node.name: [node.num_gpus, node.num_cpus] for node in nodes}
    found: dict[str, NodeRoom] = {}
    for bundle in sorted(bundles, key=lambda b: (not b.is_pinned, -b.num_gpus, -b.num_cpus)):
        fitting = [
            node
            for node in nodes
            if free[node.name][0] >= bundle.num_gpus
            and free[node.name][1] >= bundle.num_cpus
            and (node.is_owner or not bundle.is_pinned)
        ]
        if not fitting:
            raise UserError(refusal(bundle, nodes, found))
        kind = kind_of(bundle.process)
        alike = Counter(node.name for process, node in found.items() if kind_of(process) == kind)
        sign = -1 if kind in APART else 1
        node = max(fitting, key=lambda n: (sign * alike[n.name], free[n.name], n.name))
        free[node.name][0] -= bundle.num_gpus
        free[node.name][1] -= bundle.num_cpus
        found[bundle.process] = node
    return found


def refusal(bundle: NodeBundle, nodes: Sequence[NodeRoom], placed: Mapping[str, NodeRoom]) -> str:
    """One line: what has no room, what the cluster has, and what to do."""
    has = ", ".join(str(node) for node in nodes) or "no node that lives"
    after = f" once {len(placed)} others are placed" if placed else ""
    return (
        f"the Ray cluster has no room for {bundle}{after}: free are {has};"
        " add a node, or take less in [deployment.ray], num_trainer_ranks or inference.replicas"
    )
