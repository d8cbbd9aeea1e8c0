"""The optimiser and its learning rate, a function of the step alone: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mettle.trainer.config import OptimConfig, SchedulerConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all trainable parameters; vectors (norms, biases) do not decay."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def learning_rate(step: int, config: SchedulerConfig, *, peak: float, max_steps: int) -> float:
    """The rate of step `step` (from 1): linear warm-up, constant, then decay to `min_lr_ratio` at `max_steps`."""
    if step <= config.warmup_steps:
        return peak * step / config.warmup_steps
    if config.type == "constant":
        return peak
    length = min(config.decay_steps or max_steps, max_steps - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - (max_steps - length)) / length))
    left = 1 - progress if config.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(module: nn.Module, max_norm: float) -> float:
    """Scale all gradients to a common norm of at most `max_norm`; returns the norm before, which may not be finite."""
    norm: Tensor = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    value: float = norm.item()
    return value
