"""One optimiser step: a batch in, new weights and the figures of the step out. RL and supervised training share it.

Parts: `Learner`, `Recipe`, and the optimiser with its learning rate, a function of the step alone, so that a resumed
run needs no scheduler state. Invariant: the gradient is that of the whole batch's loss, however many ranks and passes
it was cut into. A step whose gradient is not finite changes nothing and is counted.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mettle.records.tokens import Batch
from mettle.trainer.config import MicroBatchConfig, OptimConfig, SchedulerConfig
from mettle.trainer.layout import ComponentCounts, Layout, Sequences, deal_sequences, empty_layout, plan_layouts
from mettle.trainer.loss import SUM_NAMES, TargetTensors, total_loss
from mettle.trainer.losses import PolicyLoss
from mettle.trainer.model import Policy, Traits
from mettle.trainer.world import World


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step depends on beside the batch and the state."""

    optim: OptimConfig
    scheduler: SchedulerConfig
    loss: PolicyLoss
    micro_batch: MicroBatchConfig
    max_steps: int


class Learner:
    """A policy with its optimiser. `on_progress` is called after each micro batch."""

    def __init__(
        self, policy: Policy, recipe: Recipe, world: World, *, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        self.policy = policy
        self._on_progress = on_progress
        self.recipe = recipe
        self.world = world
        self.optimizer = build_optimizer(policy, recipe.optim)
        self._traits = Traits.of(policy)

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Take step `step` on `batch` and return its metrics, alike on every rank."""
        started = time.perf_counter()
        sequences = Sequences.of(batch)
        rate = learning_rate(step, self.recipe.scheduler, peak=self.recipe.optim.lr, max_steps=self.recipe.max_steps)
        sums, max_mismatch = self._accumulate(sequences, self._loss_at(rate))
        grad_norm = clip_gradients(self.policy, self.recipe.optim.max_grad_norm)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures = dict(zip(SUM_NAMES, self.world.total(sums).tolist(), strict=True))
        metrics = _metrics(figures, sequences.counts)
        metrics["mismatch_kl/max"] = float(self.world.largest(max_mismatch).item())
        metrics |= {"optim/grad_norm": grad_norm, "optim/lr": rate, "optim/skipped": float(not is_finite)}
        seconds = time.perf_counter() - started
        metrics |= {
            "time/step_s": seconds,
            "throughput/trainer_tokens_per_s": len(batch.token_ids) / max(seconds, 1e-9),
        }
        metrics["memory/trainer_peak_bytes"] = float(_peak_bytes(self.world.device))
        return metrics

    def measure(self, batch: Batch) -> dict[str, float]:
        """The metrics of a batch under the policy as it is, at the loss's full strength; nothing is changed."""
        sequences = Sequences.of(batch)
        sums, max_mismatch = self._accumulate(sequences, self.recipe.loss)
        self.optimizer.zero_grad(set_to_none=True)
        metrics = _metrics(dict(zip(SUM_NAMES, self.world.total(sums).tolist(), strict=True)), sequences.counts)
        return metrics | {"mismatch_kl/max": float(self.world.largest(max_mismatch).item())}

    def plan(self, sequences: Sequences) -> list[Layout]:
        """This rank's forward passes; the ranks have equally many, for their collectives go in step."""
        own = deal_sequences(sequences, self.world.size)[self.world.rank]
        is_packed = self._traits.can_pack and self.world.device.type == "cuda"
        config = self.recipe.micro_batch
        if not self._traits.can_share:
            config = config.model_copy(update={"share_prompts": False})
        layouts = plan_layouts(sequences, own, config, attention_cost=self._traits.attention_cost, is_packed=is_packed)
        most = int(self.world.largest(torch.tensor(len(layouts), device=self.world.device)).item())
        missing = max(most, 1) - len(layouts)
        return layouts + [empty_layout()] * missing if missing else layouts

    def _loss_at(self, rate: float) -> PolicyLoss:
        """The configured loss; exploration fades with the learning rate, so that the last steps can be sure."""
        form = self.recipe.loss
        if not form.entropy_tau:
            return form
        return form.model_copy(update={"entropy_tau": form.entropy_tau * rate / self.recipe.optim.lr})

    def _accumulate(self, sequences: Sequences, form: PolicyLoss) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.world.device)
        max_mismatch = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for layout in self.plan(sequences):
            targets = TargetTensors.of(layout.targets, self.world.device)
            logprobs_K, entropy_K = self.policy(
                layout, targets.token_ids, targets.temperatures, has_entropy_gradient=form.entropy_tau > 0
            )
            output = total_loss(logprobs_K, entropy_K, targets, sequences.counts, form)
            # Sharding averages gradients over the ranks; the loss is a sum over them.
            (output.loss * self.world.size).backward()  # type: ignore[no-untyped-call]
            sums += output.sums
            max_mismatch = torch.maximum(max_mismatch, output.max_mismatch_kl)
            self._on_progress()
        return sums, max_mismatch


def _metrics(figures: dict[str, float], counts: ComponentCounts) -> dict[str, float]:
    rl = figures["rl"] / max(1, counts.rl)
    ce = figures["ce"] / max(1, counts.ce)
    ref_kl = figures["ref_kl"] / max(1, counts.ref_kl)
    return {
        "loss/total": rl + ce + ref_kl,
        "loss/rl": rl,
        "loss/ce": ce,
        "loss/ref_kl": ref_kl,
        "entropy/mean": figures["entropy"] / max(1, figures["num_tokens"]),
        "mismatch_kl/mean": figures["mismatch_kl"] / max(1, figures["num_sampled"]),
        "masked/share": figures["num_masked"] / max(1, figures["num_rl"]),
        "clamped/count": figures["num_clamped"],
        "non_finite/count": float(counts.non_finite),
        "tokens/trained": figures["num_tokens"],
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
