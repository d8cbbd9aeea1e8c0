"""Which files of Mettle run for one optimiser step: a probe that `architecture.py` starts in a process of its own.

It trains one step of a tiny policy on a batch of four sequences and prints the files as JSON. Making policy and batch
is outside of what is counted; from `Learner.train` to the updated weights is inside.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mettle
from mettle.records.tokens import Batch, filled
from mettle.trainer.config import TrainerConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.loop import recipe_of
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.world import World

ROOT = str(Path(mettle.__file__).parent)


def files_executed(work: Callable[[], Any]) -> list[str]:
    """The files of Mettle in which a function was called while `work` ran."""
    files: set[str] = set()

    def note(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename[len(ROOT) + 1 :])

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return sorted(files)


def make_learner(folder: Path) -> Learner:
    """A learner of two layers."""
    sizes = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
    world = World(0, 1, torch.device("cpu"))
    model = write_policy(folder / "model", sizes)
    return Learner(load_policy(model, world, dtype=torch.float32), recipe_of(TrainerConfig(max_steps=4)), world)


def make_batch() -> Batch:
    """Four sequences of four prompt tokens and a sampled completion."""
    lengths = (9, 12, 12, 15)
    rows = [sample(length) for length in lengths]
    columns: dict[str, Any] = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return Batch(sequence_lengths=np.array(lengths, np.int32), step=1, draw_ids=(1,), **columns)


def sample(length: int) -> dict[str, Any]:
    """The columns of one sequence."""
    mask = np.arange(length) >= 4
    columns = {
        "token_ids": np.arange(length),
        "loss_mask": mask,
        "logprobs": np.where(mask, -5.5, 0.0),
        "versions": np.where(mask, 0, -1),
        "advantages": np.where(mask, 1.0, 0.0),
        "rl_weights": np.where(mask, 1.0, 0.0),
    }
    return filled(length, columns)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        learner = make_learner(Path(folder))
    batch = make_batch()
    print(json.dumps({"files": files_executed(lambda: learner.train(batch, 1))}))


if __name__ == "__main__":
    main()
