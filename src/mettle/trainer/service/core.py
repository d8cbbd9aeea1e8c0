"""What the service computes, on the trainer's core: a tenant's passes, its optimiser steps, its state on disk.

Parts: `LoraCore`, `PassRun` (one operation cut into passes). One thread owns it.
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
from torch import Tensor

from mettle.errors import ServiceError, StorageError, UserError
from mettle.inference.engine.adapter_files import read_adapter
from mettle.storage.weights import model_digest
from mettle.trainer.adapter import Adapter
from mettle.trainer.config import LoraConfig, MicroBatchConfig
from mettle.trainer.datums import TrainingDatum, sequences_of, split_by_datum
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.service.records import AdapterSpec
from mettle.trainer.service.wire.orders import Datum, LossOrder
from mettle.trainer.sum_losses import make_sum_loss
from mettle.trainer.tenant import OptimParams, Tenant
from mettle.trainer.tenant_files import OPTIMISER_FILE, load_tenant, save_tenant
from mettle.trainer.world import World

DEFAULT_LENGTH: Final = 4096
_TOLERATED: Final = frozenset({"weights", "mask"})
"""Inputs that old clients send with losses that do not read them."""
_SCORED_AT_ONCE: Final = 256


@dataclass(slots=True)
class PassRun:
    """A forward or forward_backward under way: pieces that are left, and what came of those before."""

    tenant: Tenant
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
        self.base_model, self.device = base_model, device
        self.policy = load_policy(base_model, world, dtype=torch.float32, is_frozen=True)
        self.base_digest = model_digest(base_model)
        config: Any = self.policy.network.config
        positions = int(getattr(config, "max_position_embeddings", DEFAULT_LENGTH))
        self.max_length = min(max_length or DEFAULT_LENGTH, positions)
        self.vocab_size = self.policy.vocab_size
        self._pass_tokens = pass_tokens
        recipe = Recipe(micro_batch=MicroBatchConfig(max_tokens=pass_tokens))
        self._learner = Learner(self.policy, recipe, world, base_digest=self.base_digest)

    def create(self, name: str, spec: AdapterSpec) -> Tenant:
        """A new model, equal to the base. Raises: UserError when the spec leaves nothing to train."""
        config = LoraConfig(
            rank=spec.rank, alpha=spec.alpha, attention=spec.is_attention, mlp=spec.is_mlp, unembed=spec.is_unembedding
        )
        return Tenant.of_adapter(name, Adapter.create(self.policy.network, config, spec.seed % 2**63))

    def load(self, name: str, folder: Path, *, has_optimizer: bool) -> Tenant:
        """A model from its files. Raises: UserError, and ServiceError when they are damaged."""
        if has_optimizer and not (folder / OPTIMISER_FILE).exists():
            raise UserError("these weights have no optimiser state; load them without, or those of save_state")
        try:
            return load_tenant(folder, name, self.policy, base_digest=self.base_digest, has_optimiser=has_optimizer)
        except StorageError as error:  # files of one model are damaged: no reason to try again
            raise ServiceError(str(error)) from error

    def save(self, tenant: Tenant, folder: Path, *, has_optimizer: bool) -> None:
        """Write a model's files into a folder that is there."""
        save_tenant(folder, tenant, self.policy, base_digest=self.base_digest, base=self.base_model.resolve())
        if not has_optimizer:
            (folder / OPTIMISER_FILE).unlink()

    def begin(self, tenant: Tenant, order: LossOrder) -> PassRun:
        """Check an operation and cut it into pieces. Raises: UserError, and nothing has changed."""
        if not order.data:
            raise UserError("data: there is no datum in the request")
        try:
            loss = make_sum_loss(order.loss_fn, order.config)
        except ValueError as error:
            raise UserError(f"loss_fn: {error}") from None
        data = [self._datum(datum, place, loss.inputs) for place, datum in enumerate(order.data)]
        gradients = [parameter.grad for parameter in tenant.trained]
        return PassRun(tenant, order, loss, self._cut(data), gradients)

    def advance(self, run: PassRun) -> None:
        """Compute the next piece. The gradient of the whole operation is added when the last is done."""
        tenant = run.tenant
        if run.done == 0:
            # The operation's own gradient is summed by itself, whatever stands before it.
            for parameter in tenant.trained:
                parameter.grad = None
        piece = run.pieces[run.done]
        self._learner.switch(tenant)
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
        for parameter, before in zip(run.tenant.trained, run.gradients, strict=True):
            parameter.grad = before

    def step(self, tenant: Tenant, params: OptimParams) -> dict[str, float]:
        """One optimiser step with what has been accumulated."""
        self._learner.switch(tenant)
        return self._learner.step(params)

    @torch.no_grad()
    def score(self, folder: Path | None, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities [N, V] of what follows each of N tokens, by the adapter in a folder, at temperature 1."""
        network: Any = self.policy.network
        adapter = None if folder is None else Adapter.of_file(network, read_adapter(folder))
        self.policy.adapters.use(adapter)
        ids = torch.tensor([list(token_ids)], device=self.device)
        hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        head = network.get_output_embeddings()
        rows = [head(part).float().log_softmax(-1).cpu() for part in hidden.split(_SCORED_AT_ONCE)]
        self._learner.switch(self._learner.tenant)
        return torch.cat(rows)

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
