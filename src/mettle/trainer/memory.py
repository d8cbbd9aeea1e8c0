"""How much memory a micro batch takes, found out by asking torch what a small one keeps for its backward pass.

Parts: `activation_bytes_per_token`, `fit_micro_batch`. The answer depends on the model and its config alone, never on
how full the machine is, so that a resumed run cuts its batches as before and gives the same bytes.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.cut import is_cut, is_gathering
from mettle.trainer.layout import Layout, bare_targets
from mettle.trainer.model import Policy
from mettle.trainer.world import World

logger = logging.getLogger(__name__)

PROBE_TOKENS = 64
GIB = 2**30


def fit_micro_batch(config: MicroBatchConfig, policy: Policy, world: World) -> MicroBatchConfig:
    """The config with `max_tokens` lowered to what `activation_gib` allows; a longer sequence still goes alone.

    Every rank calls it, and finds what the one with most to keep does.
    """
    if config.activation_gib is None:
        return config
    own = torch.tensor(activation_bytes_per_token(policy, world), dtype=torch.float64, device=world.device)
    per_token = float(world.largest(own))
    fitting = max(1, int(config.activation_gib * GIB / per_token))
    if fitting >= config.max_tokens:
        return config
    logger.info("micro batches are cut to fit", extra={"max_tokens": fitting, "bytes_per_token": round(per_token)})
    return config.model_copy(update={"max_tokens": fitting})


def activation_bytes_per_token(policy: Policy, world: World) -> float:
    """Bytes that a forward pass keeps for its backward pass, for each token, when every token is a target."""
    own: set[int] = set()
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # or an address could be used twice, and count once

    def know(module: nn.Module, _: Any = None) -> None:
        own.update(_storage(parameter) for parameter in module.parameters() if not is_cut(parameter))

    def note(tensor: Tensor) -> None:
        # Nothing is given back: a tensor that its own node would keep so were never free again.
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            alive.append(tensor.detach())

    know(policy)
    # What FSDP2 gathers for a module is there when its turn comes, and in the same storage each time.
    gathering = [module for module in policy.modules() if is_gathering(module)]
    hooks = [module.register_forward_pre_hook(know) for module in gathering]
    was_checkpointing = policy.is_checkpointing
    policy.checkpoint_activations(False)
    with torch.autograd.graph.saved_tensors_hooks(note, _no_backward):
        policy(*_probe(policy, world))
    policy.checkpoint_activations(was_checkpointing)
    for hook in hooks:
        hook.remove()
    if is_gathering(policy):
        policy.reshard()
    # Ranks that share a sequence have a part of its tokens each.
    whole = sum(kept.values()) * policy.grid.context / PROBE_TOKENS
    if not was_checkpointing:
        return whole
    # Of each layer its input stays, and one layer at a time is computed again.
    config: Any = policy.network.config
    size = torch.finfo(policy.dtype).bits // 8
    return float(config.num_hidden_layers * config.hidden_size * size + whole / config.num_hidden_layers)


def _no_backward(_: Any) -> Tensor:
    raise AssertionError("the probe has no backward pass")


def _storage(tensor: Tensor) -> int:
    """Of which storage a tensor is a view. Its address would not do: memory that was let go is used again."""
    return int(tensor.untyped_storage()._cdata)


def _probe(policy: Policy, world: World) -> tuple[Layout, Tensor, Tensor]:
    token_ids = (np.arange(PROBE_TOKENS, dtype=np.int64) % policy.vocab_size)[None]
    positions = np.arange(PROBE_TOKENS)[None]
    sources = np.arange(PROBE_TOKENS)
    layout = Layout("padded", token_ids, positions, None, sources, bare_targets(token_ids[0]), sources)
    labels_K = torch.from_numpy(token_ids[0]).to(world.device)
    return layout, labels_K, torch.ones(PROBE_TOKENS, device=world.device)
