"""Operations without passes: create, step, save, load. Each ends in one transaction with its outcome.

Files are written before that transaction and removed after it: a crash leaves files that no row names, never a row
without files. Invariant: carried out twice, because a crash came in between, an operation has the same effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.trainer.service.bodies import LoadBody, SaveBody, read_body_of
from mettle.trainer.service.config import TrainServeConfig
from mettle.trainer.service.encryption import encrypt_files, is_encrypted, read_recipients
from mettle.trainer.service.folders import WeightFolders
from mettle.trainer.service.models import ResidentModels, as_result
from mettle.trainer.service.records import (
    INFLIGHT,
    SEGMENTS,
    CheckpointKind,
    Operation,
    Outcome,
    Sampler,
    SavedWeights,
    TrainedModel,
)
from mettle.trainer.tenant import Tenant


class Operations:
    """What the training thread does for each kind of operation."""

    def __init__(self, models: ResidentModels, weights: WeightFolders, config: TrainServeConfig) -> None:
        self._models, self._weights, self._config = models, weights, config
        self._store = models.store
        self._by_kind: dict[str, Callable[[Operation, TrainedModel], None]] = {
            "create_model": self._create,
            "optim_step": self._step,
            "save_weights": lambda operation, model: self._save(operation, model, "training"),
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": lambda operation, model: self._save(operation, model, "external"),
            "load_weights": self._load,
            "refused": self._refuse,
        }

    def carry_out(self, operation: Operation) -> None:
        """Do it and record its outcome. Raises: UserError, and nothing has changed."""
        model = self._store.model(operation.model_id)
        assert model is not None, "an operation is accepted for a model that is there"
        self._by_kind[operation.kind](operation, model)

    def _settle(self, operation: Operation, result: bytes) -> None:
        self._store.settle(operation, Outcome("done", operation.kind, result))

    def _refuse(self, operation: Operation, model: TrainedModel) -> None:
        """A request that was wrong has its number, too: it fails when its turn comes."""
        raise UserError(operation.body.decode())

    def _create(self, operation: Operation, model: TrainedModel) -> None:
        self._models.put(model.model_id, self._models.core.create(model.model_id, model.spec))
        self._settle(operation, as_result(type="create_model", model_id=model.model_id))

    def _step(self, operation: Operation, model: TrainedModel) -> None:
        running = self._models.get(model.model_id)
        metrics = self._models.step(running, operation.body)
        self._settle(operation, as_result(type="optim_step", metrics=metrics))
        self._models.spent(model.model_id)

    def _load(self, operation: Operation, model: TrainedModel) -> None:
        body = read_body_of(LoadBody, operation.body)
        saved = self._store.checkpoint(body.path, operation.owner)
        if saved is None or saved.spec is None:
            raise UserError(f"path: there are no weights at {body.path!r}")
        if saved.base_model != model.base_model:
            raise UserError(f"path: the weights at {body.path!r} are of {saved.base_model!r}, not {model.base_model!r}")
        folder = self._weights.path(saved.folder)
        if is_encrypted(folder):
            raise UserError(f"path: {body.path!r} is encrypted for others; load the checkpoint that it is an export of")
        core = self._models.core
        running = core.load(model.model_id, folder, has_optimizer=body.optimizer)
        name = self._models.states.write(lambda into: core.save(running, into, has_optimizer=True))
        with self._store.database.transaction():
            self._store.set_model(model.model_id, saved.spec)
            result = as_result(type="load_weights", path=body.path, model_id=model.model_id)
            self._settle(operation, result)
            self._store.record_snapshot(model.model_id, name, operation.seq_id)
        self._models.states.remove(model.snapshot)
        self._models.put(model.model_id, running)

    def _save_for_sampler(self, operation: Operation, model: TrainedModel) -> None:
        body = read_body_of(SaveBody, operation.body)
        if body.sampling_session_seq_id is None:
            self._save(operation, model, "sampler")
            return
        running = self._models.get(model.model_id)
        name = self._write(running, has_optimizer=False)
        sampler_id = (
            f"{model.model_id}{INFLIGHT}"
            if body.kind == "inflight"
            else f"{model.session_id}:sample:{body.sampling_session_seq_id}"
        )
        sampler = Sampler(
            sampler_id, model.session_id, model.owner, model.base_model, "", name, self._store.clock()
        )  # fmt: skip
        with self._store.database.transaction():
            self._store.put_sampler(sampler)
            result = as_result(type="save_weights_for_sampler", sampling_session_id=sampler_id)
            self._settle(operation, result)

    def _save(self, operation: Operation, model: TrainedModel, kind: CheckpointKind) -> None:
        body = read_body_of(SaveBody, operation.body)
        recipients = read_recipients(body.age_encryption_recipients or ())
        if recipients and kind != "external":
            raise UserError("age_encryption_recipients: exports alone are encrypted (save_weights_external)")
        saved_name = body.path or f"{operation.seq_id:06d}"
        path = f"tinker://{model.model_id}/{SEGMENTS[kind]}/{saved_name}"
        before = self._store.checkpoint(path, model.owner)
        if before is not None and kind == "training" and not body.overwrite:
            raise UserError(f"path: there are weights {saved_name!r} already; choose another name or pass overwrite")
        stored = self._store.stored_bytes(model.owner)
        if stored >= self._config.max_stored_bytes:
            raise UserError(f"{stored:,} bytes are stored for this key and no more are taken; delete checkpoints")
        running = self._models.get(model.model_id)
        name = self._write(running, has_optimizer=kind == "training", recipients=recipients)
        now = self._store.clock()
        saved = SavedWeights(
            path, model.model_id, model.owner, kind, saved_name, name, self._weights.size(name), now,
            None if body.ttl_seconds is None else now + body.ttl_seconds, metadata=body.user_metadata or {},
            spec=model.spec, base_model=model.base_model,
        )  # fmt: skip
        with self._store.database.transaction():
            self._store.put_checkpoint(saved)
            size = saved.num_bytes if kind == "external" else None
            self._settle(operation, as_result(type=operation.kind, path=path, size_bytes=size))
        if before is not None:
            self._weights.remove(before.folder)

    def _write(self, running: Tenant, *, has_optimizer: bool, recipients: Sequence[Any] = ()) -> str:
        def fill(folder: Path) -> None:
            self._models.core.save(running, folder, has_optimizer=has_optimizer)
            if recipients:
                encrypt_files(folder, recipients)

        return self._weights.write(fill)
