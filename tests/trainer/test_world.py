"""Two ranks over gloo give what one process gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SOURCE = Path(__file__).parents[2] / "src"


def train_with_ranks(run_dir, ranks):
    command = [sys.executable, "-m", "mettle.trainer", str(run_dir.path)]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launcher, *command[1:]]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.e2e
def test_two_ranks_train_like_one_process_and_resume_from_its_checkpoint(make_run, ledger_of):
    one = make_run("one", shipped=4, max_steps=4, device="cpu")
    two = make_run("two", shipped=4, max_steps=4, device="cpu")
    train_with_ranks(one, 1)
    # The first half alone, the second half on two ranks from the checkpoint of one.
    config = two.config("trainer")
    config.write_text(config.read_text().replace('"max_steps": 4', '"max_steps": 2'))
    train_with_ranks(two, 1)
    config.write_text(config.read_text().replace('"max_steps": 2', '"max_steps": 4'))
    train_with_ranks(two, 2)
    names = ("loss/total", "optim/grad_norm", "entropy/mean", "mismatch_kl/mean", "tokens/trained")
    for name in names:
        left, right = (dict(ledger_of(run).journal.metric(name)) for run in (one, two))
        assert left.keys() == right.keys() == {1, 2, 3, 4}
        for step, value in left.items():
            tolerance = 1e-5 if name == "optim/grad_norm" else 1e-6
            assert right[step] == pytest.approx(value, rel=tolerance, abs=tolerance), (name, step)
    left, right = (load_file(run.version(4) / "model.safetensors") for run in (one, two))
    assert left.keys() == right.keys()
    assert max((left[name] - right[name]).abs().max().item() for name in left) < 1e-4
    assert all(tensor.dtype == torch.float32 for tensor in right.values())
