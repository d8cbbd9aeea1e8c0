"""The trainer's core: data in, gradients added up, an optimiser step taken. RL, supervised training and the training
service share it.

Parts: `Learner` with its two verbs, `Recipe`, and the learning rate, a function of the step alone, so that a resumed
run needs no scheduler state. Invariant: the gradient is that of the whole data's loss, however many ranks and passes
it was cut into. A step whose gradient is not finite changes nothing and is counted.
"""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mettle.records.tokens import Batch, FloatArray
from mettle.trainer.config import DistillationConfig, MicroBatchConfig, OptimConfig, SchedulerConfig
from mettle.trainer.cut import is_cut
from mettle.trainer.distillation import Distiller
from mettle.trainer.layout import ComponentCounts, Index, Layout, Sequences, empty_layout, lay_out
from mettle.trainer.loss import BatchLoss, TargetLoss, TargetTensors
from mettle.trainer.losses import PolicyLoss
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.model import Policy, Traits
from mettle.trainer.passes import plan_cheapest
from mettle.trainer.tenant import OptimParams, Tenant
from mettle.trainer.world import World


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step depends on beside the batch and the state. The service's verbs need `micro_batch` alone."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    loss: PolicyLoss = field(default_factory=DefaultLoss)
    micro_batch: MicroBatchConfig = field(default_factory=MicroBatchConfig)
    max_steps: int = 100


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What `accumulate` found, of all ranks: `logprobs` [K] of the targets in the data's order, and the loss's sums."""

    logprobs: FloatArray
    sums: dict[str, float]
    max_mismatch_kl: float


class Learner:
    """A network, and the tenant whose turn it is. `on_progress` is called after each micro batch.

    `base_digest` is that of the network's files (`storage.weights.model_digest`), needed where adapters are saved.

    The verbs are `accumulate` and `step`; `train` (a step of the RL loop or of a warm-up) and `measure` stand on them.
    """

    def __init__(
        self,
        policy: Policy,
        recipe: Recipe,
        world: World,
        *,
        tenant: Tenant | None = None,
        distiller: Distiller | None = None,
        base_digest: str = "",
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self.distiller = distiller or Distiller(DistillationConfig())
        self.before_step: Callable[[], None] = lambda: None
        """Called when the trained parameters are about to change."""
        self._on_progress = on_progress
        self.recipe = recipe
        self.world = world
        self.base_digest = base_digest
        self.switch(tenant or Tenant.of_base(policy, recipe.optim))
        self._traits = Traits.of(policy)
        grid = policy.grid
        self._context, self._num_shares, self._share = grid.context, grid.num_shares, grid.share
        self._is_speaker = grid.context_rank == 0  # each rank of a context group knows all of a pass

    @property
    def optimizer(self) -> torch.optim.AdamW:
        return self.tenant.optimizer

    def switch(self, tenant: Tenant) -> None:
        """From now on it is this tenant's turn; the one before keeps all that is its own."""
        self.tenant = tenant
        self.policy.adapters.use(tenant.adapter)

    def accumulate(self, sequences: Sequences, loss: TargetLoss, *, is_forward_only: bool = False) -> Accumulated:
        """Add the gradient of `loss` over the data to the tenant's, or only compute the loss."""
        sums = torch.zeros(len(loss.sum_names), dtype=torch.float64, device=self.world.device)
        max_mismatch = torch.zeros((), dtype=torch.float64, device=self.world.device)
        logprobs = torch.zeros(len(sequences.members), device=self.world.device)
        # Sharding averages a base's gradient over the ranks; the loss is a sum over them.
        scale = self.world.size if self.tenant.is_base else 1
        with torch.set_grad_enabled(not is_forward_only):
            for layout in self.plan(sequences):
                targets = TargetTensors.of(layout.targets, self.world.device)
                scored = self.policy(
                    layout,
                    targets.token_ids,
                    targets.temperatures,
                    has_entropy_gradient=loss.has_entropy,
                    comparison=self.distiller.comparison(layout, targets) if loss.has_teacher else None,
                )
                output = loss(scored.logprobs_K, scored.entropies_K, targets, scored.divergences_K)
                if not is_forward_only:
                    (output.loss * scale).backward()  # type: ignore[no-untyped-call]
                if self._is_speaker:
                    sums += output.sums
                    logprobs[torch.from_numpy(layout.order).to(self.world.device)] = scored.logprobs_K.detach()
                max_mismatch = torch.maximum(max_mismatch, output.max_mismatch_kl)
                self._on_progress()
        figures = dict(zip(loss.sum_names, self.world.total(sums).tolist(), strict=True))
        largest = float(self.world.largest(max_mismatch).item())
        return Accumulated(self.world.total(logprobs).cpu().numpy(), figures, largest)

    def step(self, params: OptimParams) -> dict[str, float]:
        """Take the tenant's optimiser step with what was accumulated, and forget it. A parameter without a gradient
        counts as one with zeros. A gradient that is not finite changes nothing and is told."""
        tenant = self.tenant
        for parameter in tenant.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not tenant.is_base:
                self.world.total(parameter.grad)  # adapters are whole on every rank
        grad_norm = clip_gradients(tenant.trained, params.max_grad_norm)
        is_finite = math.isfinite(grad_norm)
        self.before_step()
        for optimizer in tenant.optimizers:
            if is_finite:
                set_params(optimizer, params)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        tenant.num_steps += is_finite
        return {"optim/grad_norm": grad_norm, "optim/lr": params.lr, "optim/skipped": float(not is_finite)}

    def train(
        self, batch: Batch, step: int, *, keep: Callable[[Index, FloatArray], None] | None = None
    ) -> dict[str, float]:
        """Take step `step` on `batch` and return its metrics, alike on every rank.

        `keep` is given the places [K] of the batch's trained tokens and the policy's log-probabilities of them.
        """
        started = time.perf_counter()
        routers = self.policy.routers
        if routers is not None:
            routers.forget()
        sequences = Sequences.of(batch)
        rate = learning_rate(step, self.recipe.scheduler, peak=self.recipe.optim.lr, max_steps=self.recipe.max_steps)
        done = self.accumulate(sequences, BatchLoss(self._loss_at(rate), sequences.counts))
        if keep is not None:
            keep(sequences.members, done.logprobs)
        own = self.recipe.optim
        optim = self.step(OptimParams(rate, own.betas, own.eps, own.weight_decay, own.max_grad_norm))
        metrics = _metrics(done, sequences.counts) | optim
        if routers is not None:
            metrics |= routers.figures(self.world)
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
        loss = BatchLoss(self.recipe.loss, sequences.counts)
        return _metrics(self.accumulate(sequences, loss, is_forward_only=True), sequences.counts)

    def plan(self, sequences: Sequences) -> list[Layout]:
        """This rank's forward passes; the ranks have equally many, for their collectives go in step."""
        is_packed = self._traits.can_pack and self.world.device.type == "cuda" and self._context == 1
        config = self.recipe.micro_batch
        if self._context > 1:  # the limit is a rank's
            config = config.model_copy(update={"max_tokens": config.max_tokens * self._context})
        if not self._traits.can_share:
            config = config.model_copy(update={"share_prompts": False})
        traits = self._traits
        sequences, ranks = plan_cheapest(
            sequences,
            config,
            attention_cost=traits.attention_cost,
            price=traits.pass_cost,
            num_ranks=self._num_shares,
            is_packed=is_packed,
        )
        most = max(1, *map(len, ranks))
        layouts = [lay_out(sequences, each.form, each.rows) for each in ranks[self._share]]
        return layouts + [empty_layout()] * (most - len(layouts))

    def _loss_at(self, rate: float) -> PolicyLoss:
        """The configured loss; exploration fades with the learning rate, so that the last steps can be sure."""
        form = self.recipe.loss
        if not form.entropy_tau:
            return form
        return form.model_copy(update={"entropy_tau": form.entropy_tau * rate / self.recipe.optim.lr})


def _metrics(done: Accumulated, counts: ComponentCounts) -> dict[str, float]:
    figures = done.sums
    rl = figures["rl"] / max(1, counts.rl)
    ce = figures["ce"] / max(1, counts.ce)
    ref_kl = figures["ref_kl"] / max(1, counts.ref_kl)
    distill = figures["distill"] / max(1, counts.distill)
    return {
        "loss/total": rl + ce + ref_kl + distill,
        "loss/rl": rl,
        "loss/ce": ce,
        "loss/ref_kl": ref_kl,
        "loss/distill": distill,
        "entropy/mean": figures["entropy"] / max(1, figures["num_tokens"]),
        "mismatch_kl/mean": figures["mismatch_kl"] / max(1, figures["num_sampled"]),
        "masked/share": figures["num_masked"] / max(1, figures["num_rl"]),
        "clamped/count": figures["num_clamped"],
        "non_finite/count": float(counts.non_finite),
        "tokens/trained": figures["num_tokens"],
        "mismatch_kl/max": done.max_mismatch_kl,
    }


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


def set_params(optimizer: torch.optim.Optimizer, params: OptimParams) -> None:
    """Use these numbers from the next step on; vectors do not decay."""
    for group in optimizer.param_groups:
        decays = all(parameter.ndim > 1 for parameter in group["params"])
        group["lr"] = params.lr
        group["weight_decay"] = params.weight_decay if decays else 0.0
        if "betas" in group:
            group["betas"], group["eps"] = params.betas, params.eps


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients to a common norm of at most `max_norm`; returns the norm before, which may not be finite.

    Parameters may be cut in several ways; each gradient counts once, however many ranks have a part of it.
    """
    limit = math.inf if max_norm is None else max_norm
    groups: defaultdict[DeviceMesh | None, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh if is_cut(parameter) else None].append(parameter)
    if len(groups) == 1:
        norm = _whole(nn.utils.clip_grad_norm_(parameters, limit))
    else:
        grads = [[p.grad for p in group if p.grad is not None] for group in groups.values()]
        norm = torch.linalg.vector_norm(torch.stack([_whole(nn.utils.get_total_norm(each)) for each in grads]))
        for group in groups.values():
            nn.utils.clip_grads_with_norm_(group, limit, norm)
    value: float = norm.item()
    return value


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if is_cut(tensor) else tensor
