"""The state of a network and its optimisers that one process has whole: in torch's form, without torch's checkpoints.

torch's own `get_state_dict` comes to the same (`tests/trainer/test_checkpoint.py`), but imports torch's checkpoints,
its tensors that are cut and its compiler, to find out that nothing is so: one to two seconds of a processor.
Parts: `whole_state`, `take_whole_state`. Invariant: parameters are known by their names, so that other arrangements can
take the state up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def whole_state(network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[dict[str, Any], Any]:
    """(weights, what the optimisers keep), both by the names of parameters."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer, names in _named(network, optimizers):
        saved = optimizer.state_dict()
        state |= {names[number]: moments for number, moments in saved["state"].items()}
        groups += [
            {**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]
        ]
    return network.state_dict(), {"state": state, "param_groups": groups}


def take_whole_state(
    network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], weights: dict[str, Any], kept: Any
) -> None:
    """Bring all of it to a state. Raises: RuntimeError, KeyError or ValueError when it is of another network."""
    network.load_state_dict(weights)
    groups = iter(kept["param_groups"])
    for optimizer, names in _named(network, optimizers):
        numbers = {name: number for number, name in enumerate(names)}
        own = [next(groups) for _ in optimizer.param_groups]
        optimizer.load_state_dict(
            {
                "state": {numbers[name]: moments for name, moments in kept["state"].items() if name in numbers},
                "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in own],
            }
        )


def _named(
    network: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[torch.optim.Optimizer, list[str]]]:
    """Each optimiser, with the names of its parameters in the order in which it numbers them."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for optimizer in optimizers:
        yield optimizer, [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
