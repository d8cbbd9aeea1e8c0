"""Which files of Mettle run for one optimiser step: a probe that `architecture.py` starts in a process of its own.

It trains one step of a tiny policy on a batch of four sequences and prints the files as JSON. Making policy and batch
is outside of what is counted; from `Learner.train` to the updated weights is inside. It runs in this tree and in those
before the columns of a token were declared once, so that two trees can be compared.
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
from mettle.records import tokens
from mettle.records.tokens import Batch, Sample
from mettle.trainer.config import TrainerConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loop import _recipe
from mettle.trainer.model import load_policy
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
    return Learner(load_policy(model, world, dtype=torch.float32), _recipe(TrainerConfig(max_steps=4)), world)


def make_batch() -> Batch:
    """Four sequences of four prompt tokens and a sampled completion."""
    samples = [sample(length) for length in (9, 12, 12, 15)]
    if hasattr(tokens, "end_to_end"):
        lengths = np.array([len(each) for each in samples], np.int32)
        return Batch(sequence_lengths=lengths, step=1, draw_ids=(1,), **tokens.end_to_end(samples))
    from mettle.orchestrator.packing import pack  # the trees before

    return Batch(1, pack(samples, layout="padded", max_tokens=64, max_rows=4, num_ranks=1), (1,))


def sample(length: int) -> Sample:
    """One sequence."""
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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        learner = make_learner(Path(folder))
    batch = make_batch()
    print(json.dumps({"files": files_executed(lambda: learner.train(batch, 1))}))


if __name__ == "__main__":
    main()
