"""Which files of Mettle run for one optimiser step: a probe that `architecture.py` starts in a process of its own.

It trains one step of a tiny policy on a batch of four sequences and prints the files as JSON. Making policy and batch
is outside of what is counted; from `Learner.train` to the updated weights is inside.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import mettle
from mettle.orchestrator.packing import pack
from mettle.records.tokens import Batch, Sample
from mettle.trainer.config import TrainerConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loop import _recipe
from mettle.trainer.model import load_policy
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.world import World

ROOT = str(Path(mettle.__file__).parent)
torch.set_num_threads(1)


def sample(length: int) -> Sample:
    """A prompt of four tokens and a sampled completion."""
    mask = np.arange(length) >= 4
    weights = mask.astype(np.float32)
    nothing = np.zeros(length, np.float32)
    columns = {
        "token_ids": np.arange(length, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": -5.5 * weights,
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "temperatures": np.ones(length, np.float32),
        "advantages": weights,
        "rl_weights": weights,
        "ce_weights": nothing,
        "ref_kl_weights": nothing,
        "ref_logprobs": nothing,
    }
    return Sample(**columns)


def main() -> None:
    sizes = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
    with tempfile.TemporaryDirectory() as folder:
        world = World(0, 1, torch.device("cpu"))
        model = write_policy(Path(folder) / "model", sizes)
        learner = Learner(load_policy(model, world, dtype=torch.float32), _recipe(TrainerConfig(max_steps=4)), world)
    ranks = pack(
        [sample(length) for length in (9, 12, 12, 15)], layout="padded", max_tokens=64, max_rows=4, num_ranks=1
    )
    files: set[str] = set()

    def note(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename[len(ROOT) + 1 :])

    sys.setprofile(note)
    learner.train(Batch(1, ranks, (1,)), 1)
    sys.setprofile(None)
    print(json.dumps({"files": sorted(files)}))


main()
