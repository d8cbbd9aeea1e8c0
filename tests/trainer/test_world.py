"""Two ranks over gloo give what one process gives."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mettle.sandbox.zygote import watch
from mettle.trainer.config import LoraConfig
from mettle.trainer.ranks import ENVIRONMENT, LAUNCHER, launcher_arguments

pytestmark = pytest.mark.usefixtures("forked")

LISTENING, LOOPBACK = "0A", "0100007F"  # in /proc/net/tcp
SOURCE = Path(__file__).parents[2] / "src"


NAMES = ("loss/total", "optim/grad_norm", "entropy/mean", "mismatch_kl/mean", "tokens/trained")


def assert_same_curve(left_ledger, right_ledger, steps):
    for name in NAMES:
        left, right = (dict(ledger.journal.metric(name)) for ledger in (left_ledger, right_ledger))
        assert left.keys() == right.keys() == steps
        for step, value in left.items():
            tolerance = 1e-5 if name == "optim/grad_norm" else 1e-6
            assert right[step] == pytest.approx(value, rel=tolerance, abs=tolerance), (name, step)


def assert_same_weights(left_run, right_run, version):
    left, right = (load_file(run.version(version) / "model.safetensors") for run in (left_run, right_run))
    assert left.keys() == right.keys()
    assert max((left[name] - right[name]).abs().max().item() for name in left) < 1e-4
    assert all(tensor.dtype == torch.float32 for tensor in right.values())


def train_with_ranks(run_dir, ranks):
    """The addresses on which the launcher and its ranks were seen to listen meanwhile."""
    command = [sys.executable, "-m", "mettle.trainer", str(run_dir.path)]
    if ranks > 1:
        command = [sys.executable, "-m", LAUNCHER, *launcher_arguments(ranks), *command[1:]]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    seen = set()
    with tempfile.TemporaryFile("w+") as told, subprocess.Popen(command, env=environment, stderr=told) as started:
        while started.poll() is None:
            seen |= listening({started.pid, *watch.descendants(started.pid)})
            time.sleep(0.25)
        told.seek(0)
        assert started.returncode == 0, told.read()[-2000:]
    return seen


def listening(pids):
    """The addresses (as the kernel writes them, without the port) of these processes' listening sockets."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in held}


def assert_same_adapters(left_run, right_run, version):
    left, right = (load_file(run.version(version) / "adapter_model.safetensors") for run in (left_run, right_run))
    assert left.keys() == right.keys()
    assert max(left[name].abs().max().item() for name in left if "lora_B" in name) > 1e-3, "nothing was trained"
    assert max((left[name] - right[name]).abs().max().item() for name in left) < 1e-4


def set_steps(run, number):
    config = run.config("trainer")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_steps": number}))


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_ranks_train_adapters_like_one_process_and_go_on_from_another_number_of_them(
    make_run, ledger_of, mini_model, mixture, kind, ranks
):
    """The first two steps on the ranks, the others alone, and the other way round."""
    model, lora = (mini_model, LoraConfig(rank=4)) if kind == "dense" else (mixture, LoraConfig(rank=4, mlp=False))
    runs = [make_run(name, shipped=4, max_steps=4, device="cpu", model=model, lora=lora) for name in ("one", "a", "b")]
    one, *mixed = runs
    train_with_ranks(one, 1)
    for run, numbers in zip(mixed, [(ranks, 1), (1, ranks)], strict=True):
        set_steps(run, 2)
        train_with_ranks(run, numbers[0])
        set_steps(run, 4)
        train_with_ranks(run, numbers[1])
        assert_same_curve(ledger_of(one), ledger_of(run), {1, 2, 3, 4})
        assert_same_adapters(one, run, 4)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.e2e
def test_two_ranks_train_like_one_process_and_resume_from_its_checkpoint(make_run, train_here, ledger_of):
    one = make_run("one", shipped=4, max_steps=4, device="cpu")
    two = make_run("two", shipped=4, max_steps=4, device="cpu")
    train_here(one)
    # The first half alone, the second half on two ranks from the checkpoint of one.
    config = two.config("trainer")
    config.write_text(config.read_text().replace('"max_steps": 4', '"max_steps": 2'))
    train_here(two)
    config.write_text(config.read_text().replace('"max_steps": 2', '"max_steps": 4'))
    assert train_with_ranks(two, 2) == {LOOPBACK}, "a store of torchrun's, or gloo, is open to other hosts"
    assert_same_curve(ledger_of(one), ledger_of(two), {1, 2, 3, 4})
    assert_same_weights(one, two, 4)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_four_ranks_in_two_replicas_train_like_one_process(make_run, ledger_of, kind):
    """HSDP: two copies of the weights, each cut in two; Muon's matrices are orthogonalised whole."""
    one, four = make_run("one", shipped=3, max_steps=3, device="cpu"), make_run("four", shipped=3, max_steps=3)
    for run, replicas in ((one, 1), (four, 2)):
        settings = json.loads(run.config("trainer").read_text())
        settings["optim"]["type"] = kind
        run.config("trainer").write_text(json.dumps(settings | {"num_replicas": replicas}))
    train_with_ranks(one, 1)
    train_with_ranks(four, 4)
    assert_same_curve(ledger_of(one), ledger_of(four), {1, 2, 3})
    assert_same_weights(one, four, 3)
