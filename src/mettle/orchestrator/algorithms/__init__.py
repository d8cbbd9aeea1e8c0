"""Algorithms: a group of rollouts to what its tokens are credited with. One small file each, with paper and formula.

An algorithm is registered by name, here and under the entry point group `mettle.algorithms`, or named as
`module:attribute`. Invariant of all: an errored rollout (reward None) does not shift its siblings' baseline.

Parts: `Algorithm` (the base class), `ALGORITHMS` (the registry), `make_algorithm`, `check_choice` (what a config says),
`RunAlgorithms` (those of one run, by environment).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from mettle.config.plugins import Plugins, check_options
from mettle.records.tasks import Credit, GroupRecord
from mettle.records.versions import POLICY

if TYPE_CHECKING:
    from mettle.orchestrator.services import Services

ALGORITHMS = Plugins(
    "mettle.algorithms",
    "algorithm",
    {
        "grpo": "mettle.orchestrator.algorithms.grpo:GRPO",
        "max_rl": "mettle.orchestrator.algorithms.max_rl:MaxRL",
        "rae": "mettle.orchestrator.algorithms.rae:RAE",
        "turn_returns": "mettle.orchestrator.algorithms.turn_returns:TurnReturns",
        "reference_kl": "mettle.orchestrator.algorithms.reference_kl:ReferenceKL",
        "environment": "mettle.orchestrator.algorithms.environment:EnvironmentAdvantages",
        "clipped_negatives": "mettle.orchestrator.algorithms.clipped_negatives:ClippedNegatives",
        "dapo": "mettle.orchestrator.algorithms.dapo:DAPO",
        "echo": "mettle.orchestrator.algorithms.echo:ECHO",
        "gigpo": "mettle.orchestrator.algorithms.gigpo:GiGPO",
        "global_std": "mettle.orchestrator.algorithms.global_std:GlobalStd",
        "hierarchical_grpo": "mettle.orchestrator.algorithms.hierarchical_grpo:HierarchicalGRPO",
        "imitation": "mettle.orchestrator.algorithms.imitation:Imitation",
        "opo": "mettle.orchestrator.algorithms.opo:OPO",
        "reinforce_pp": "mettle.orchestrator.algorithms.reinforce_pp:ReinforcePP",
        "rloo": "mettle.orchestrator.algorithms.rloo:RLOO",
        "tree": "mettle.orchestrator.algorithms.tree:TreeCredit",
        "turn_grpo": "mettle.orchestrator.algorithms.turn_grpo:TurnGRPO",
        "distillation": "mettle.orchestrator.algorithms.distillation:Distillation",
        "self_distillation": "mettle.orchestrator.algorithms.self_distillation:SelfDistillation",
        "reinforce_pp_baseline": "mettle.orchestrator.algorithms.reinforce_pp:ReinforcePPBaseline",
    },
)
ENVIRONMENT = "environment"
"""The algorithm of environments that provide advantages themselves."""


class Algorithm:
    """What the tokens of a group are credited with. Options are arguments of `__init__`."""

    min_group_size: int = 1
    """Fewer rollouts than this cannot be compared, so their advantages would all be 0."""
    needs: Sequence[str] = ()
    """Names of the models that it asks for; a config without one of them is refused. `POLICY` is always there."""
    teaches: Literal["", "listed", "whole"] = ""
    """Whether tokens are fitted to a teacher's distribution: to what this algorithm lists of it, or to the whole one of
    the teacher that the trainer holds."""

    async def credit(self, group: GroupRecord, services: Services) -> Sequence[Credit | None]:
        """What each rollout is credited with (see `orchestrator/credit.py`), None where it does not train.

        What it keeps from group to group changes after its last await and not before, or a kill may count one twice.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What must survive a restart, as JSON values that `restore` takes back."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state that was saved."""


def make_algorithm(name: str, options: Mapping[str, Any]) -> Algorithm:
    """The algorithm called `name`. Raises: ValueError for an unknown name or option, or a value that is none for it."""
    factory = ALGORITHMS.find(name)
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, Algorithm)):
        raise ValueError(f"algorithm {name!r} is no subclass of mettle.orchestrator.algorithms.Algorithm")
    try:
        check_options(f"algorithm {name!r}", factory, options)
        made = factory(**options)
    except ValueError as error:
        raise ValueError(f"algorithm_args: {error}") from error
    if not isinstance(made, Algorithm):
        raise ValueError(f"algorithm {name!r} is no subclass of mettle.orchestrator.algorithms.Algorithm")
    return made


def check_choice(
    name: str, options: Mapping[str, Any], *, group_size: int, temperature: float, services: Collection[str]
) -> None:
    """Raise ValueError, saying what to change, when the algorithm could not learn from such groups."""
    algorithm = make_algorithm(name, options)
    if group_size < algorithm.min_group_size:
        raise ValueError(
            f"{name} compares the rollouts of a group, so with group_size {group_size} every advantage is 0: "
            f"set group_size to at least {algorithm.min_group_size} (8 or 16 are usual)"
        )
    missing = [service for service in algorithm.needs if service not in services and service != POLICY]
    if missing:
        raise ValueError(
            f"{name} asks for the frozen model {missing[0]!r}, which is not configured: add a table "
            f"[orchestrator.services.{missing[0]}] with its base_url and model"
        )
    if algorithm.needs and temperature != 1.0:
        raise ValueError(
            f"{name} compares the policy with a model that scores at temperature 1: set sampling.temperature "
            f"({temperature:g}) to 1"
        )


class RunAlgorithms:
    """The algorithm of each environment. Environments with the same choice share one instance, and so its state."""

    def __init__(self, choices: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        self._keys = {env: f"{name}{json.dumps(options, sort_keys=True)}" for env, (name, options) in choices.items()}
        self._algorithms = {self._keys[env]: make_algorithm(*choice) for env, choice in choices.items()}

    def of(self, env: str) -> Algorithm:
        """The algorithm of an environment."""
        return self._algorithms[self._keys[env]]

    def state(self) -> dict[str, Any]:
        """The states by instance, of those that have one."""
        states = {key: algorithm.state() for key, algorithm in self._algorithms.items()}
        return {key: state for key, state in states.items() if state}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Take up states that were saved; that of an instance which the run no longer has is left out."""
        for key, state in states.items():
            if key in self._algorithms:
                self._algorithms[key].restore(state)
