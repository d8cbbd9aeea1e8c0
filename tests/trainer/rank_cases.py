"""`python -m tests.trainer.rank_cases CASES.json N`: N ranks that train small models, one after the other.

A case: `model` (a folder), `config` (of a trainer), `steps` ([first, last]), and folders `load` and `save` of a state, or
None. What rank 0 found of each is written to `OUT.json` beside the cases: the metrics of every step, and the weights.
With `compare` (the digest of a batch, its folder, and that of published versions) it is what every rank's monitor finds.
In a test's own process `train_case` is the same with one rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tests.trainer.conftest import branching, make_batch, make_group

from mettle.storage.batches import read_batch
from mettle.trainer import loading
from mettle.trainer.checkpoint import load_learner, save_learner
from mettle.trainer.config import MismatchConfig, TrainerConfig
from mettle.trainer.loop import make_learner
from mettle.trainer.mismatch.monitor import MismatchMonitor
from mettle.trainer.process import setup_torch
from mettle.trainer.publish import compute_canary, fixed_sequences, published_state
from mettle.trainer.world import join_world


def batch_of(step):
    """Groups of all components, and one sequence that is much longer than the others."""
    rng = np.random.default_rng((5, step))
    kinds = ("rl", "rl", "ce", "ref_kl")
    samples = [sample for kind in kinds for sample in make_group(rng, component=kind)]
    alike = branching(make_group(rng, 6, max_completion=9))
    return make_batch([*samples, *alike, *make_group(rng, 1, prompt_length=3, max_completion=40)], step=step)


def train_case(case, world):
    """(metrics of each step, published weights)."""
    config = TrainerConfig.model_validate(case["config"])
    setup_torch(1, config.seed)
    learner = make_learner(config, Path(case["model"]), world)
    first, last = case["steps"]
    if case.get("load"):
        assert load_learner(Path(case["load"]), learner) == first - 1
    metrics = [learner.train(batch_of(step), step) for step in range(first, last + 1)]
    canary = compute_canary(learner.policy, fixed_sequences(learner.policy.vocab_size, 2), world)
    if case.get("save"):
        folder = Path(case["save"])
        if world.is_main:
            folder.mkdir(exist_ok=True)
        world.share(None)
        save_learner(folder, learner, last)
    state = published_state(learner)
    return metrics, {"canary": torch.from_numpy(canary.logprobs), **{name: t.clone() for name, t in state.items()}}


def compare_case(case, world):
    """What the monitor of each rank finds."""
    config = TrainerConfig.model_validate(case["config"])
    setup_torch(1, config.seed)
    learner = make_learner(config, Path(case["model"]), world)
    before = {name: tensor.clone() for name, tensor in published_state(learner).items()}
    digest, batches, published = case["compare"]
    batch = read_batch(Path(batches), digest)
    found = MismatchMonitor(MismatchConfig(interval=1), learner, Path(published), seed=0).look(batch.step, batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_state(learner).items())
    return world.gather(dataclasses.asdict(found))


def play(cases: Path) -> None:
    """As one rank, train all cases."""
    with join_world("cpu") as world:
        found = []
        loading.transformers_network = None  # what reads a model whole: each rank reads its own part
        for number, case in enumerate(json.loads(cases.read_text())):
            if "compare" in case:
                found.append(compare_case(case, world))
                continue
            metrics, state = train_case(case, world)
            found.append(metrics)
            if world.is_main:
                save_file(state, cases.with_name(f"state-{number}.safetensors"))
        if world.is_main:
            cases.with_name("OUT.json").write_text(json.dumps(found))


def main(cases: Path, num_ranks: int) -> int:
    """Forked ranks import nothing again, which would cost more than all that they train."""
    meeting = cases.parent / "attempt" / "0" / "error.json"  # they meet beside its folder
    meeting.parent.mkdir(parents=True)
    sizes = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_ERROR_FILE": str(meeting)}
    started = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(sizes | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            code = 1
            try:
                play(cases)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        started.append(pid)
    while started:
        pid, status = os.wait()
        started.remove(pid)
        if status:
            for other in started:  # they would wait for it for an hour
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
