"""The network as another engine may hold it: another version's weights, no adapter, rounded weights.

Each is a context in which the trainer's own network computes so; afterwards it is what it was, to the bit. Where
weights are cut among ranks, each rank exchanges its own part of them, in place, for FSDP2 gathers from that memory; the
products of weights that are rounded are then computed in their own type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mettle.errors import StorageError
from mettle.storage.weights import read_version, weight_file
from mettle.trainer.cut import is_cut, is_gathering
from mettle.trainer.learner import Learner
from mettle.trainer.model import Policy

INT8_LEVELS = 127


@contextmanager
def version_weights(learner: Learner, folder: Path) -> Iterator[None]:
    """Compute with the published weights in `folder`.

    Raises: StorageError, on every rank, when they are gone, damaged, or under other names than the network's.
    """
    own = {name.removeprefix("network."): parameter for name, parameter in learner.tenant.parameters.items()}
    loaded: dict[str, Tensor] = {}
    fault = ""
    try:
        loaded = _parts(weight_file(read_version(folder)), own)
    except StorageError as error:
        fault = str(error)
    if faults := [told for told in learner.world.gather(fault) if told]:
        raise StorageError(faults[0])
    with _apart(learner.policy), ExitStack() as held:
        for name, part in loaded.items():
            held.enter_context(_exchanged(own[name], part.to(device=own[name].device, dtype=own[name].dtype)))
        yield


def _parts(path: Path, own: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of each tensor in a file what this rank has of it."""
    try:
        with safe_open(path, framework="pt") as file:
            unknown = set(file.keys()) - own.keys()
            if unknown:
                raise StorageError(f"{path} names weights that the network has not: {min(unknown)}")
            return {name: _part(own[name], file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path}: {error}") from error


def _part(parameter: Tensor, whole: Tensor) -> Tensor:
    if not is_cut(parameter):
        return whole
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return cut.to_local().clone()


@contextmanager
def _apart(policy: Policy) -> Iterator[None]:
    """What FSDP2 keeps gathered after a pass is given up, so that the next one gathers what is there by then."""
    if not is_gathering(policy):
        yield
        return
    policy.reshard()
    try:
        yield
    finally:
        policy.reshard()


@contextmanager
def _exchanged(parameter: Tensor, part: Tensor) -> Iterator[None]:
    """Within the block the parameter holds `part`, or this rank's part of it does."""
    kept = parameter.data
    if not is_cut(kept):
        parameter.data = part
        try:
            yield
        finally:
            parameter.data = kept
        return
    local = kept.to_local()
    before = local.clone()
    local.copy_(part)
    try:
        yield
    finally:
        local.copy_(before)


@contextmanager
def without_adapter(learner: Learner) -> Iterator[None]:
    """Compute as the base alone does."""
    learner.policy.adapters.use(None)
    try:
        yield
    finally:
        learner.policy.adapters.use(learner.tenant.adapter)


@contextmanager
def rounded(policy: Policy, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Compute with `form` of every weight."""
    network = policy.network
    buffers = {buffer: buffer.data for buffer in network.buffers() if buffer.is_floating_point()}
    with _apart(policy), ExitStack() as held:
        for parameter in network.parameters():
            data = parameter.data.to_local() if is_cut(parameter.data) else parameter.data
            held.enter_context(_exchanged(parameter, form(data)))
        try:
            yield
        finally:
            for buffer, data in buffers.items():
                buffer.data = data


def as_bfloat16(weight: Tensor) -> Tensor:
    """The weight in bfloat16, in which its products are computed too."""
    return weight.to(torch.bfloat16)


def as_int8(weight: Tensor) -> Tensor:
    """What is left of a matrix after eight bits a number with one scale a row; vectors stay."""
    if weight.ndim < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / INT8_LEVELS
    return (weight / scale).round() * scale
