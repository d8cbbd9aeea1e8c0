"""The trainer's half of a checkpoint: model, optimiser and random state, written while the trainer waits or, from a
copy in memory, while it goes on.

One process that waits writes one file; several ranks, or a copy, a distributed checkpoint (DCP) of torch's. Where
adapters are trained it is the tenant's files and the random state instead, since the base does not change. Each may be
loaded by another number of ranks than saved it. torch's checkpoints are imported when one is written or read: half a
second of a processor. The folder, its manifest and what "complete" means belong to `storage.checkpoints`.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mettle.errors import StorageError
from mettle.storage.checkpoints import Checkpoint, damage_of, newest_checkpoint
from mettle.trainer.learner import Learner
from mettle.trainer.tenant_files import load_tenant, save_tenant
from mettle.trainer.whole_state import take_whole_state, whole_state

_ALONE = "torch.distributed is disabled"
_WHOLE_FILE = "state.pt"
"""What one process saves while it waits."""
_PROCESS_FILE = "process.pt"
"""Beside a tenant's files: the random state and the step."""


def import_writer() -> None:
    """Import what writes a distributed checkpoint, so that the next one begins at once."""
    import torch.distributed.checkpoint.state_dict_saver  # noqa: F401


def save_learner(folder: Path, learner: Learner, step: int) -> None:
    """Write the state after step `step` into `folder`. Every rank calls it."""
    if not learner.tenant.is_base:
        if learner.world.is_main:
            save_tenant(folder, learner.tenant, learner.policy, base_digest=learner.base_digest)
            torch.save({"rng": torch.get_rng_state(), "step": step}, folder / _PROCESS_FILE)
        return
    if learner.world.size == 1:
        with (folder / _WHOLE_FILE).open("wb") as file:
            torch.save(_state(learner, step), file)
            file.flush()
            os.fsync(file.fileno())
        return
    from torch.distributed.checkpoint.state_dict_saver import save

    with _ordinary_errors():
        save(_state(learner, step), checkpoint_id=folder)


def save_learner_beside(folder: Path, learner: Learner, step: int) -> Future[Any]:
    """Copy the state after step `step` to memory of its own, and write the copy into `folder` in a thread.

    Every rank calls it, for a tenant that trains the base itself, and may change the state when this returns; where the
    future is done on a rank, every rank has written. What it raises is told by `outcome`.
    """
    from torch.distributed.checkpoint.state_dict_saver import async_save

    # Not for the length of a block: the thread that warns outlives it.
    warnings.filterwarnings("ignore", message=_ALONE)
    with _ordinary_errors():
        saving = async_save(
            _state(learner, step),
            checkpoint_id=folder,
            no_dist=learner.world.size == 1,
            process_group=learner.world.saving_group(),
        )
    assert isinstance(saving, Future), "torch's own stager copies before it returns"
    return saving


def outcome(saving: Future[Any]) -> None:
    """Wait until what `save_learner_beside` writes is on disk. Raises: what kept it from being written."""
    with _ordinary_errors():
        saving.result()


def load_learner(folder: Path, learner: Learner) -> int:
    """Bring a learner to a saved state and return the step it was saved after. Every rank calls it.

    Raises: StorageError when the state is of another model or cannot be read.
    """
    if not learner.tenant.is_base:
        return _load_adapter(folder, learner)
    whole = folder / _WHOLE_FILE
    try:
        state = _load_whole(whole, learner) if whole.exists() else _load_parts(folder, learner)
    except (RuntimeError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise StorageError(f"the trainer's state in {folder} cannot be loaded: {reason[0]}") from error
    torch.set_rng_state(state["rng"])
    return int(state["step"].item())


def _load_adapter(folder: Path, learner: Learner) -> int:
    """Raises: StorageError, or UserError when the state is of another base or of adapters of another form."""
    before = learner.tenant
    tenant = load_tenant(
        folder, before.name, learner.policy, base_digest=learner.base_digest, optim=learner.recipe.optim
    )
    if {name: p.shape for name, p in tenant.parameters.items()} != {n: p.shape for n, p in before.parameters.items()}:
        raise StorageError(f"the trainer's state in {folder} has adapters of another rank or on other modules")
    assert tenant.adapter is not None
    assert before.adapter is not None
    tenant.adapter.config = before.adapter.config
    try:
        process = torch.load(folder / _PROCESS_FILE, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise StorageError(f"the trainer's state in {folder} cannot be loaded: {error}") from error
    learner.switch(tenant)
    torch.set_rng_state(process["rng"])
    return int(process["step"])


def newest_complete(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint; each newer one that is passed over is told to `warn`."""
    chosen = newest_checkpoint(root)
    for folder in root.glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and (chosen is None or int(number) > chosen.step):
            warn(f"checkpoint {folder.name} is passed over: {damage_of(folder)}")
    return chosen


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """Torch derives its error from BaseException: whoever looks for a failed write further up would not see it."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Saving with one rank is meant, so torch need not warn of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ALONE)
        yield


def _state(learner: Learner, step: int) -> dict[str, Any]:
    policy, optimizers = learner.policy, learner.tenant.optimizers
    if learner.world.size == 1:
        model, optimizer = whole_state(policy, optimizers)
    else:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(policy, optimizers)
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "step": torch.tensor(step)}


def _load_whole(file: Path, learner: Learner) -> dict[str, Any]:
    """Every rank reads the file, and takes of it what it has; returns all that it holds."""
    policy, optimizers = learner.policy, learner.tenant.optimizers
    is_alone = learner.world.size == 1
    # Of what several ranks map each has in memory what it takes.
    saved: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=not is_alone)
    if is_alone:
        take_whole_state(policy, optimizers, saved["model"], saved["optimizer"])
        return saved
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        policy,
        optimizers,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    return saved


def _load_parts(folder: Path, learner: Learner) -> dict[str, Any]:
    """A distributed checkpoint, by however many ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    model, optimizer = get_state_dict(learner.policy, learner.tenant.optimizers)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "rng": torch.get_rng_state(),
        "step": torch.tensor(0),
    }
    with _quiet(), _ordinary_errors():
        load(state, checkpoint_id=folder, no_dist=learner.world.size == 1)
    set_state_dict(
        learner.policy, learner.tenant.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state
