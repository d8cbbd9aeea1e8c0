"""What a checkpoint holds, and that a full disk is a `StorageError` that names it, however torch tells of it."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.trainer.conftest import make_batch, make_group, make_learner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from mettle.errors import StorageError
from mettle.storage.batches import write_batch
from mettle.storage.checkpoints import newest_checkpoint, write_checkpoint
from mettle.trainer import checkpoint
from mettle.trainer.config import OptimConfig


class OfTwo:
    class world:
        size = 2

    class tenant:
        is_base = True


def test_a_write_that_torch_calls_short_is_a_full_disk(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise CheckpointException("", {0: (RuntimeError("unexpected pos 704 vs 598"), None)})

    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", fail)
    monkeypatch.setattr(checkpoint, "_state", lambda learner, step: {})
    with pytest.raises(StorageError, match=r"no space left.*free some space"):
        write_checkpoint(tmp_path, 3, lambda folder: checkpoint.save_learner(folder, OfTwo, 3), {})
    assert newest_checkpoint(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optim", [OptimConfig(lr=1e-3), OptimConfig(type="muon", lr=1e-3)], ids=["adamw", "muon"])
def test_one_process_saves_what_torch_itself_would_and_takes_it_up(mini_model, optim, tmp_path):
    learner = trained(mini_model, optim)
    checkpoint.save_learner(tmp_path, learner, 1)
    state = torch.load(tmp_path / "state.pt")
    weights, kept = get_state_dict(learner.policy, learner.tenant.optimizers)
    assert (flat(state["model"]), flat(state["optimizer"])) == (flat(weights), flat(kept))
    resumed = make_learner(mini_model, optim=optim)
    assert checkpoint.load_learner(tmp_path, resumed) == 1
    for each in (learner, resumed):
        each.train(make_batch(make_group(np.random.default_rng(1))), 2)
    assert flat(checkpoint._state(resumed, 2)) == flat(checkpoint._state(learner, 2))


def test_a_state_of_another_model_is_refused(mini_model, tmp_path):
    checkpoint.save_learner(tmp_path, trained(mini_model), 1)
    state = torch.load(tmp_path / "state.pt")
    state["model"] = {name.replace("layers.0", "layers.9"): weight for name, weight in state["model"].items()}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(StorageError, match=r"trainer's state in .* cannot be loaded"):
        checkpoint.load_learner(tmp_path, make_learner(mini_model))


def test_what_a_release_before_saved_in_one_process_is_taken_up(mini_model, tmp_path):
    learner = trained(mini_model)
    with checkpoint._quiet():
        save(checkpoint._state(learner, 1), checkpoint_id=tmp_path, no_dist=True)
    resumed = make_learner(mini_model)
    assert checkpoint.load_learner(tmp_path, resumed) == 1
    assert flat(checkpoint._state(resumed, 1)) == flat(checkpoint._state(learner, 1))


def trained(model, optim=None):
    learner = make_learner(model, optim=optim or OptimConfig(lr=1e-3))
    learner.train(make_batch(make_group(np.random.default_rng(0))), 1)
    return learner


def flat(value):
    """Tensors as lists, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


SAVES = """
import sys
from pathlib import Path
import torch
from mettle.storage.batches import read_batch
from mettle.trainer.checkpoint import save_learner
from mettle.trainer.config import TrainerConfig
from mettle.trainer.loop import make_learner
from mettle.trainer.world import join_world

model, folder, digest = sys.argv[1:]
with join_world("cpu") as world:
    learner = make_learner(TrainerConfig(max_steps=10), Path(model), world)
    learner.train(read_batch(Path(folder), digest), 1)
    save_learner(Path(folder) / "saved", learner, 1)
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_neither_a_step_nor_its_checkpoint_imports_the_compiler_or_what_it_needs(mini_model, tmp_path):
    batch = make_batch(make_group(np.random.default_rng(0)))
    digest, _ = write_batch(tmp_path, batch)
    (tmp_path / "saved").mkdir()
    command = [sys.executable, "-c", SAVES, str(mini_model), str(tmp_path), digest]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    assert checkpoint.load_learner(tmp_path / "saved", make_learner(mini_model)) == 1
