"""The policy of a model's folder: read whole or by each rank its own part, and cut among the ranks.

Parts: `load_policy`, `shard_policy`, `full_state` (its weights again, as files have them). Invariant: weights are never
rounded on the way in or out.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mettle.errors import UserError
from mettle.trainer.cut import is_cut
from mettle.trainer.dense import DenseNetwork, dense_network
from mettle.trainer.grid import Grid
from mettle.trainer.model import Policy, blocks, layer_kinds
from mettle.trainer.widened import widen
from mettle.trainer.world import World

logger = logging.getLogger(__name__)


def load_policy(
    folder: Path,
    world: World,
    *,
    dtype: torch.dtype,
    is_frozen: bool = False,
    is_whole: bool = False,
    grid: Grid | None = None,
    is_offloaded: bool = False,
) -> Policy:
    """The policy in a Hugging Face model directory, sharded among several ranks (see `shard_policy`) unless it is to be
    `is_whole`. Of what is sharded each rank reads its own part, where the files and the model allow it.

    Weights are float32. A base under adapters, which `is_frozen`, keeps the type of its files where `dtype` is that: it
    is mapped then and not copied, so that the processes of a host share it; a CPU that multiplies no such numbers
    widens them as it goes. Never are its weights rounded, for an engine that reads the files would serve others.
    """
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} is not a model directory: it has no config.json")
    if world.size > 1 and not is_whole:
        from mettle.trainer.parts import CannotCut

        try:
            return _load_parts(folder, world, dtype, grid, is_frozen=is_frozen, is_offloaded=is_offloaded)
        except CannotCut as why:  # by what all ranks see alike, and before they have said a word to each other
            logger.info("every rank reads the whole model", extra={"why": str(why)})
    is_ours = world.size == 1 and world.device.type == "cpu" and not is_frozen
    network: Any = dense_network(folder) if is_ours else None
    if network is None:
        network = transformers_network(folder, dtype, is_frozen=is_frozen).to(world.device)
    is_widened = is_frozen and world.size == 1 and network.dtype != torch.float32 and widen(network, world.device)
    policy = Policy(network, torch.float32 if is_widened else dtype, is_widened=is_widened)
    policy.train()
    policy.requires_grad_(not is_frozen)
    if not is_whole:
        shard_policy(policy, world, grid, is_offloaded=is_offloaded)
    return policy


def transformers_network(folder: Path, dtype: torch.dtype, *, is_frozen: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be written to a log
    try:
        network = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if is_frozen else torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        return network if network.dtype == dtype else network.float()
    except (OSError, ValueError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {error}") from error


def _load_parts(
    folder: Path, world: World, dtype: torch.dtype, grid: Grid | None, *, is_frozen: bool, is_offloaded: bool
) -> Policy:
    """The same of a model that is cut before it is read. Raises: CannotCut."""
    from mettle.trainer.parts import ModelFiles, bare_network, read_parts, restore_buffers, sources_of

    checkpoint = ModelFiles(folder)
    is_as_stored = is_frozen and checkpoint.holds_only(dtype)
    try:
        network = bare_network(folder, dtype if is_as_stored else torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(f"the model in {folder} cannot be loaded: {error}") from error
    sources = sources_of(network, checkpoint)
    restore_buffers(network, world.device)
    policy = Policy(network, dtype)
    policy.train()
    policy.requires_grad_(not is_frozen)
    shard_policy(policy, world, grid, is_offloaded=is_offloaded)
    place = torch.device("cpu") if is_offloaded else world.device
    policy._apply(lambda tensor: torch.empty_like(tensor, device=place) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    network.tie_weights()
    read_parts({**dict(network.named_parameters()), **dict(network.named_buffers())}, sources, checkpoint)
    return policy


def shard_policy(policy: Policy, world: World, grid: Grid | None = None, *, is_offloaded: bool = False) -> None:
    """Divide the weights, and what is computed, among the ranks as `grid` says; one rank keeps all. Done once, before
    there is an optimiser. Without a grid the weights are cut among all ranks.

    Several replicas (HSDP) are groups of ranks with all weights each: neighbours by rank, so that those of a host share
    a copy, and only sums of gradients cross between hosts. `is_offloaded` keeps each rank's part in the host's memory.
    Raises: UserError when the model cannot be computed so.
    """
    grid = policy.grid = grid or Grid.of(world)
    if world.size == 1:
        return
    # Imported here: they bring sympy with them, which one rank has no use for.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    from mettle.trainer.context import ContextGroup, refuse_attention

    if grid.context > 1:
        refuse_attention(layer_kinds(policy))
        policy.context = ContextGroup(grid.context_mesh(world.device.type))
        policy.context.join(policy.network)
    dtype = policy.dtype
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else None
    options: dict[str, Any] = {} if precision is None else {"mp_policy": precision}
    if is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy()
    if grid.expert > 1:
        _share_experts(policy, grid, world.device.type, options)
    options["mesh"] = grid.weights_mesh(world.device.type)
    for layer in blocks(policy):
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for name in ("logits_at", "logprobs_at"):
        register_fsdp_forward_method(policy, name)


def _share_experts(policy: Policy, grid: Grid, device_type: str, options: dict[str, Any]) -> None:
    """Give each rank of an expert group its experts, and cut these among the groups."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from mettle.trainer.experts import INSIDE, ExpertParallel, check_experts, stacked_experts

    check_experts(blocks(policy), num_ranks=grid.expert, num_cuts=grid.shard * grid.context)
    mesh = grid.experts_mesh(device_type)
    cut = mesh["replicate", "shard"] if grid.replicate > 1 else mesh["shard"]
    for layer in blocks(policy):
        for experts in stacked_experts(layer):
            parallelize_module(experts, mesh["expert"], ExpertParallel())
            fully_shard(experts, mesh=cut, shard_placement_fn=lambda _: Shard(INSIDE), **options)


def full_state(policy: Policy) -> dict[str, Tensor]:
    """All weights on the CPU under their Hugging Face names, tied ones once. Every rank calls it; rank 0 has them.

    On one CPU rank these are the live weights themselves, not copies: use them before the next step.
    """
    named = policy.state_dict()
    # The general way asks every parameter for its name, its mesh and its device: that takes twenty times as long.
    if any(is_cut(tensor) or tensor.device.type != "cpu" for tensor in named.values()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        named = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = {
        name.removeprefix("network."): tensor.contiguous()
        for name, tensor in named.items()
        if isinstance(tensor, Tensor)
    }
    network: Any = policy.network
    if network.config.tie_word_embeddings:
        for name in network.all_tied_weights_keys:
            state.pop(name, None)
    if isinstance(network, DenseNetwork):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(network, state)
    return reverted
