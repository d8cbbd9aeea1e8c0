"""The network as another engine may hold it: another version's weights, no adapter, rounded weights.

Each is a context in which the trainer's own network computes so; afterwards it is what it was, to the bit. One rank
only: sharded weights are not to be exchanged one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mettle.errors import StorageError
from mettle.storage.weights import read_version, weight_file
from mettle.trainer.learner import Learner

INT8_LEVELS = 127


@contextmanager
def version_weights(learner: Learner, folder: Path) -> Iterator[None]:
    """Compute with the published weights in `folder`.

    Raises: StorageError when they are gone, damaged, or under other names than the network's.
    """
    path = weight_file(read_version(folder))
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path}: {error}") from error
    own = {name.removeprefix("network."): parameter for name, parameter in learner.tenant.parameters.items()}
    unknown = loaded.keys() - own.keys()
    if unknown:
        raise StorageError(f"{path} names weights that the network has not: {min(unknown)}")
    kept = {name: own[name].data for name in loaded}
    try:
        for name, tensor in loaded.items():
            own[name].data = tensor.to(device=own[name].device, dtype=own[name].dtype)
        yield
    finally:
        for name, data in kept.items():
            own[name].data = data


@contextmanager
def without_adapter(learner: Learner) -> Iterator[None]:
    """Compute as the base alone does."""
    learner.policy.adapters.use(None)
    try:
        yield
    finally:
        learner.policy.adapters.use(learner.tenant.adapter)


@contextmanager
def rounded(network: nn.Module, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Compute with `form` of every weight."""
    kept = {parameter: parameter.data for parameter in network.parameters()}
    buffers = {buffer: buffer.data for buffer in network.buffers() if buffer.is_floating_point()}
    try:
        for parameter, data in kept.items():
            parameter.data = form(data)
        yield
    finally:
        for tensor, data in [*kept.items(), *buffers.items()]:
            tensor.data = data


def as_bfloat16(weight: Tensor) -> Tensor:
    """The weight in bfloat16, in which its products are computed too."""
    return weight.to(torch.bfloat16)


def as_int8(weight: Tensor) -> Tensor:
    """What is left of a matrix after eight bits a number with one scale a row; vectors stay."""
    if weight.ndim < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / INT8_LEVELS
    return (weight / scale).round() * scale
