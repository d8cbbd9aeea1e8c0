"""The models in memory: made from their snapshot and the operations since, put away when memory is wanted.

A snapshot is taken after an optimiser step, when nothing is accumulated, and only as often as it takes a tenth of the
time: what has happened since is in the database and is done again after a crash. Invariant: a model in memory is the
one that its snapshot and the recorded operations give, in their order.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from mettle.errors import UserError
from mettle.trainer.service.bodies import AdamBody, OptimStepBody, read_body_of
from mettle.trainer.service.core import LoraCore
from mettle.trainer.service.folders import WeightFolders
from mettle.trainer.service.records import Operation, TrainedModel
from mettle.trainer.service.store import Store
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.orders import read_order
from mettle.trainer.tenant import OptimParams, Tenant

logger = logging.getLogger(__name__)

SNAPSHOT_SHARE: Final = 0.1
MAX_IN_MEMORY: Final = 64


class ResidentModels:
    """Belongs to the training thread."""

    def __init__(
        self, store: Store, core: LoraCore, states: WeightFolders, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store, self.core, self.states, self._clock = store, core, states, clock
        self._running: OrderedDict[str, Tenant] = OrderedDict()
        self._snapshot_s: dict[str, float] = {}
        self._last_snapshot: dict[str, float] = {}

    def get(self, model_id: str) -> Tenant:
        """A model, made again if it is not in memory. Raises: UserError when it was never created."""
        running = self._running.get(model_id)
        if running is None:
            running = self._restore(model_id)
            self.put(model_id, running)
        self._running.move_to_end(model_id)
        return running

    def put(self, model_id: str, running: Tenant) -> None:
        """Keep a model in memory, in place of one that was there; the one used longest ago makes room."""
        self._running[model_id] = running
        while len(self._running) > MAX_IN_MEMORY:
            self.put_away(next(iter(self._running)))

    def forget(self, model_id: str) -> None:
        """Drop a model from memory as it is."""
        self._running.pop(model_id, None)

    def put_away(self, model_id: str) -> None:
        """Drop a model from memory, with a snapshot if that saves doing things again."""
        running = self._running.get(model_id)
        if running is not None and not _has_gradient(running):
            self.snapshot(model_id)
        self.forget(model_id)

    def spent(self, model_id: str) -> None:
        """An operation has changed the model and is recorded: take a snapshot if it is worth it."""
        running = self._running.get(model_id)
        if running is None:  # put away meanwhile
            return
        since = self._clock() - self._last_snapshot.get(model_id, -1e9)
        if not _has_gradient(running) and since >= self._snapshot_s.get(model_id, 0.0) / SNAPSHOT_SHARE:
            self.snapshot(model_id)

    def snapshot(self, model_id: str) -> None:
        """Put the state on disk; the one before is removed when the database knows of the new one."""
        model = self._model(model_id)
        started = self._clock()
        running = self._running[model_id]
        name = self.states.write(lambda folder: self.core.save(running, folder, has_optimizer=True))
        self.store.record_snapshot(model_id, name, model.last_seq)
        self.states.remove(model.snapshot)
        self._last_snapshot[model_id] = self._clock()
        self._snapshot_s[model_id] = self._last_snapshot[model_id] - started

    def step(self, running: Tenant, body: bytes) -> dict[str, float]:
        """One optimiser step, as a request asks for it. Raises: UserError."""
        asked = read_body_of(OptimStepBody, body)
        adam = asked.adam_params or AdamBody()
        params = OptimParams(
            adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm or None
        )
        return self.core.step(running, params)

    def _restore(self, model_id: str) -> Tenant:
        model = self._model(model_id)
        created = self.store.outcome(f"{model_id}:0")
        if model.snapshot:
            folder = self.states.path(model.snapshot)
            running = self.core.load(model_id, folder, has_optimizer=True)
        elif created is not None and created.state == "failed":
            raise UserError(f"model {model_id} was not created: {created.error}")
        else:
            running = self.core.create(model_id, model.spec)
        operations = self.store.to_repeat(model_id, model.snapshot_seq)
        for operation in operations:
            self._repeat(running, operation)
        if operations:
            logger.info("did operations again", extra={"model": model_id, "count": len(operations)})
        return running

    def _repeat(self, running: Tenant, operation: Operation) -> None:
        if operation.kind == "optim_step":
            self.step(running, operation.body)
            return
        run = self.core.begin(running, read_order(messages.parse(messages.ForwardBackwardRequest, operation.body)))
        while not run.is_over:
            self.core.advance(run)

    def _model(self, model_id: str) -> TrainedModel:
        model = self.store.model(model_id)
        assert model is not None, "an operation is accepted for a model that is there"
        return model


def _has_gradient(tenant: Tenant) -> bool:
    return any(parameter.grad is not None for parameter in tenant.trained)


def as_result(**fields: object) -> bytes:
    """A result that is JSON."""
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
