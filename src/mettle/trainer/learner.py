"""One optimiser step: a batch in, new weights and the figures of the step out. RL and supervised training share it.

Invariant: the gradient is that of the whole batch's loss, however many ranks and passes it was cut into. A step whose
gradient is not finite changes nothing and is counted.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mettle.records.tokens import Batch, MicroBatch
from mettle.trainer.config import LossConfig, MicroBatchConfig, OptimConfig, SchedulerConfig
from mettle.trainer.layout import ComponentCounts, Layout, Sequences, count_components, empty_layout, plan_layouts
from mettle.trainer.loss import SUM_NAMES, TargetTensors, total_loss
from mettle.trainer.model import Policy, Traits
from mettle.trainer.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from mettle.trainer.world import World


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step depends on beside the batch and the state."""

    optim: OptimConfig
    scheduler: SchedulerConfig
    loss: LossConfig
    micro_batch: MicroBatchConfig
    max_steps: int


class Learner:
    """A policy with its optimiser."""

    def __init__(self, policy: Policy, recipe: Recipe, world: World) -> None:
        self.policy = policy
        self.recipe = recipe
        self.world = world
        self.optimizer = build_optimizer(policy, recipe.optim)
        self._traits = Traits.of(policy)

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Take step `step` on `batch` and return its metrics, alike on every rank."""
        started = time.perf_counter()
        counts = count_components(batch)
        sums, max_mismatch = self._accumulate(batch, counts)
        rate = learning_rate(step, self.recipe.scheduler, peak=self.recipe.optim.lr, max_steps=self.recipe.max_steps)
        grad_norm = clip_gradients(self.policy, self.recipe.optim.max_grad_norm)
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures = dict(zip(SUM_NAMES, self.world.total(sums).tolist(), strict=True))
        metrics = _metrics(figures, counts)
        metrics["mismatch_kl/max"] = float(self.world.largest(max_mismatch).item())
        metrics |= {"optim/grad_norm": grad_norm, "optim/lr": rate, "optim/skipped": float(not is_finite)}
        seconds = time.perf_counter() - started
        num_tokens = sum(len(micro.token_ids) for rank in batch.ranks for micro in rank)
        metrics |= {"time/step_s": seconds, "throughput/trainer_tokens_per_s": num_tokens / max(seconds, 1e-9)}
        metrics["memory/trainer_peak_bytes"] = float(_peak_bytes(self.world.device))
        return metrics

    def plan(self, batch: Batch) -> list[Layout]:
        """This rank's forward passes; the ranks have equally many, for their collectives go in step."""
        micro_batches = _share_of(batch, self.world)
        layouts: list[Layout] = []
        if micro_batches:
            sequences = Sequences.of(micro_batches)
            is_packed = self._traits.can_pack and self.world.device.type == "cuda"
            config = self.recipe.micro_batch
            if not self._traits.can_share:
                config = config.model_copy(update={"share_prompts": False})
            layouts = plan_layouts(sequences, config, attention_cost=self._traits.attention_cost, is_packed=is_packed)
        most = int(self.world.largest(torch.tensor(len(layouts), device=self.world.device)).item())
        return layouts + [empty_layout()] * (max(most, 1) - len(layouts))

    def _accumulate(self, batch: Batch, counts: ComponentCounts) -> tuple[Tensor, Tensor]:
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.world.device)
        max_mismatch = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for layout in self.plan(batch):
            targets = TargetTensors.of(layout.targets, self.world.device)
            logprobs_K, entropy_K = self.policy(layout, targets.labels_K, targets.temperatures_K)
            output = total_loss(logprobs_K, entropy_K, targets, counts, self.recipe.loss)
            # Sharding averages gradients over the ranks; the loss is a sum over them.
            (output.loss * self.world.size).backward()  # type: ignore[no-untyped-call]
            sums += output.sums
            max_mismatch = torch.maximum(max_mismatch, output.max_mismatch_kl)
        return sums, max_mismatch


def _share_of(batch: Batch, world: World) -> Sequence[MicroBatch]:
    """What this rank computes; a batch packed for another number of ranks is dealt out anew."""
    if len(batch.ranks) == world.size:
        return batch.ranks[world.rank]
    return [micro for rank in batch.ranks for micro in rank][world.rank :: world.size]


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
        "non_finite/count": figures["num_non_finite"],
        "tokens/trained": figures["num_tokens"],
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
