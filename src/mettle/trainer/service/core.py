"""What the service computes, on the trainer's core: a tenant's passes, its optimiser steps, its state on disk.

Parts: `LoraCore`, `Running` (a tenant in memory), `PassRun` (one operation cut into passes). One thread owns it.
Invariants: how an operation is cut depends on the operation alone, and a tenant's tensors on its own operations alone,
so that its numbers are the same to the last bit whoever else is served in between; an operation that fails leaves no
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mettle.errors import UserError
from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.datums import TrainingDatum, sequences_of, split_by_datum
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.model import full_state, load_policy
from mettle.trainer.service.adapters import Adapter, AdapterNetwork
from mettle.trainer.service.records import AdapterSpec
from mettle.trainer.service.wire.orders import Datum, LossOrder
from mettle.trainer.sum_losses import make_sum_loss
from mettle.trainer.tenant import OptimParams, Tenant
from mettle.trainer.world import World

OPTIMIZER: Final = "optimizer.safetensors"
_TOLERATED: Final = frozenset({"weights", "mask"})
"""Inputs that old clients send with losses that do not read them."""
_SCORED_AT_ONCE: Final = 256


@dataclass(slots=True)
class Running:
    """A model in memory."""

    adapter: Adapter
    tenant: Tenant

    @property
    def has_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self.tenant.trained)


@dataclass(slots=True)
class PassRun:
    """A forward or forward_backward under way: pieces that are left, and what came of those before."""

    running: Running
    order: LossOrder
    loss: Any
    pieces: list[list[TrainingDatum]]
    gradients: list[Tensor | None]
    done: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Tokens of the next piece."""
        return sum(len(datum.token_ids) for datum in self.pieces[self.done])

    @property
    def is_over(self) -> bool:
        return self.done == len(self.pieces)


class LoraCore:
    """The base model with its `Learner`."""

    def __init__(self, base_model: Path, device: torch.device, *, pass_tokens: int, max_length: int | None) -> None:
        world = World(0, 1, device)
        self.policy = load_policy(base_model, world, dtype=torch.float32)
        config: Any = self.policy.network.config
        self.base_state = full_state(self.policy)
        recipe = Recipe(micro_batch=MicroBatchConfig(max_tokens=max(pass_tokens, 1)))
        self._learner = Learner(self.policy, recipe, world)
        self.network = AdapterNetwork(self.policy.network)
        self.device = device
        positions = int(getattr(config, "max_position_embeddings", 4096))
        self.max_length = min(max_length or min(positions, 4096), positions)
        self.vocab_size = self.policy.vocab_size
        self._pass_tokens = pass_tokens

    def create(self, name: str, spec: AdapterSpec) -> Running:
        """A new model, equal to the base."""
        return self._running(name, self.network.new(spec))

    def load(self, name: str, folder: Path, spec: AdapterSpec, *, has_optimizer: bool) -> Running:
        """A model from its files. Raises: UserError."""
        running = self._running(name, self.network.load(folder, spec))
        if has_optimizer:
            path = folder / OPTIMIZER
            if not path.exists():
                raise UserError("this checkpoint has no optimiser state; load it without, or one of save_state")
            _put_moments(running.tenant, load_file(str(path)))
        return running

    def save(self, running: Running, folder: Path, base_model: str, *, has_optimizer: bool) -> None:
        """Write a model's files into a folder that is there."""
        running.adapter.save(folder, base_model)
        if has_optimizer:
            save_file(_moments(running.tenant), str(folder / OPTIMIZER))

    def begin(self, running: Running, order: LossOrder) -> PassRun:
        """Check an operation and cut it into pieces. Raises: UserError, and nothing has changed."""
        if not order.data:
            raise UserError("data: there is no datum in the request")
        try:
            loss = make_sum_loss(order.loss_fn, order.config)
        except ValueError as error:
            raise UserError(f"loss_fn: {error}") from None
        data = [self._datum(datum, place, loss.inputs) for place, datum in enumerate(order.data)]
        gradients = [parameter.grad for parameter in running.tenant.trained]
        return PassRun(running, order, loss, self._cut(data), gradients)

    def advance(self, run: PassRun) -> None:
        """Compute the next piece. The gradient of the whole operation is added when the last is done."""
        tenant = run.running.tenant
        if run.done == 0:
            # The operation's own gradient is summed by itself, whatever stands before it.
            for parameter in tenant.trained:
                parameter.grad = None
        piece = run.pieces[run.done]
        self._learner.tenant = tenant
        with self.network.using(run.running.adapter):
            found = self._learner.accumulate(sequences_of(piece), run.loss, is_forward_only=run.order.is_forward_only)
        run.logprobs += split_by_datum(found.logprobs, piece)
        for name, value in found.sums.items():
            run.sums[name] = run.sums.get(name, 0.0) + value
        run.done += 1
        if run.is_over:
            if not np.isfinite(run.sums["loss"]):
                raise UserError(f"the loss is {run.sums['loss']}: look at the inputs, and at the learning rate before")
            for parameter, before in zip(tenant.trained, run.gradients, strict=True):
                if before is not None:
                    parameter.grad = before if parameter.grad is None else before + parameter.grad

    def abandon(self, run: PassRun) -> None:
        """Leave no trace of an operation that failed."""
        for parameter, before in zip(run.running.tenant.trained, run.gradients, strict=True):
            parameter.grad = before

    def step(self, running: Running, params: OptimParams) -> dict[str, float]:
        """One optimiser step with what has been accumulated."""
        self._learner.tenant = running.tenant
        return self._learner.step(params)

    @torch.no_grad()
    def score(self, adapter: Adapter | None, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [N, V] of what follows each of N tokens, at temperature 1."""
        network: Any = self.policy.network
        with self.network.using(adapter):
            ids = torch.tensor([list(token_ids)], device=self.device)
            hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            head = network.get_output_embeddings()
            rows = [head(part).float().log_softmax(-1).cpu() for part in hidden.split(_SCORED_AT_ONCE)]
        return torch.cat(rows)

    def _running(self, name: str, adapter: Adapter) -> Running:
        return Running(adapter, Tenant(name, adapter.parameters()))

    def _datum(self, datum: Datum, place: int, inputs: Sequence[str]) -> TrainingDatum:
        where = f"data[{place}]"
        if len(datum.token_ids) > self.max_length:
            raise UserError(f"{where}: {len(datum.token_ids)} tokens, the model is served with {self.max_length}")
        targets = datum.inputs.get("target_tokens")
        if targets is None or targets.dtype.kind != "i":
            raise UserError(f"{where}: loss_fn_inputs need target_tokens, of int64")
        given = {
            name: np.asarray(values, np.float32)
            for name, values in datum.inputs.items()
            if name != "target_tokens" and (name in inputs or name not in _TOLERATED)
        }
        try:
            found = TrainingDatum(datum.token_ids, targets, given)
            found.check(vocab_size=self.vocab_size, inputs=inputs)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        return found

    def _cut(self, data: list[TrainingDatum]) -> list[list[TrainingDatum]]:
        """Pieces in the data's order, of at most `pass_tokens` with padding, equally many targets a position each."""
        pieces: list[list[TrainingDatum]] = []
        longest = 0
        for datum in data:
            longest = max(longest, len(datum.token_ids))
            fits = pieces and pieces[-1][0].num_labels == datum.num_labels
            if fits and (len(pieces[-1]) + 1) * longest <= self._pass_tokens:
                pieces[-1].append(datum)
            else:
                pieces.append([datum])
                longest = len(datum.token_ids)
        return pieces


def _moments(tenant: Tenant) -> dict[str, Tensor]:
    """The optimiser's state by parameter and name, and how many steps were taken."""
    state = {"num_steps": torch.tensor(tenant.num_steps)}
    for name, parameter in tenant.parameters.items():
        for key, value in tenant.optimizer.state.get(parameter, {}).items():
            state[f"{name}:{key}"] = value.detach().cpu().contiguous()
    return state


def _put_moments(tenant: Tenant, state: dict[str, Tensor]) -> None:
    tenant.num_steps = int(state.pop("num_steps"))
    for full, value in state.items():
        name, _, key = full.rpartition(":")
        parameter = tenant.parameters.get(name)
        if parameter is None:
            raise UserError(f"the optimiser state is not this adapter's: it has {name!r}")
        tenant.optimizer.state[parameter][key] = value if key == "step" else value.to(parameter.device)
