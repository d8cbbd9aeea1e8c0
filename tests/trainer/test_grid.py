"""However the ranks stand to each other, they train like one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE
from tests.trainer.rank_cases import train_case

from mettle.errors import UserError
from mettle.trainer.grid import Grid
from mettle.trainer.world import World

ROOT = Path(__file__).parents[2]
CLOSE = 1e-6
CURVE = ("loss/total", "loss/rl", "entropy/mean", "mismatch_kl/mean", "mismatch_kl/max", "tokens/trained", "masked/share")


def train_on_ranks(folder, cases, ranks):
    """[(metrics of each step, weights)] of each case, trained by as many processes."""
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.trainer.rank_cases", str(folder / "cases.json"), str(ranks)]
    paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | paths, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout.decode()[-3000:]
    metrics = json.loads((folder / "OUT.json").read_text())
    return [(curve, load_file(folder / f"state-{number}.safetensors")) for number, curve in enumerate(metrics)]


def assert_same(found, expected):
    """The curve to a millionth; the norm of the gradient, a sum over all weights, to a hundred thousandth."""
    (curve, state), (own_curve, own_state) = found, expected
    assert len(curve) == len(own_curve) > 0
    for metrics, own in zip(curve, own_curve, strict=True):
        for name in CURVE:
            assert metrics[name] == pytest.approx(own[name], rel=CLOSE, abs=CLOSE), name
        assert metrics["optim/grad_norm"] == pytest.approx(own["optim/grad_norm"], rel=1e-5)
        routed = {name: value for name, value in own.items() if name.startswith("experts/")}
        assert {name: metrics[name] for name in routed} == pytest.approx(routed)
    assert state.keys() == own_state.keys()
    for name, tensor in own_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-4)


def case(model, *, first=1, last=2, load=None, save=None, lora=None, **config):
    settings = {"max_steps": 10, "optim": {"lr": 1e-3}, "device": "cpu", "lora": lora, **config}
    folders = {"load": load and str(load), "save": save and str(save)}
    return {"model": str(model), "config": settings, "steps": [first, last], **folders}


ADAPTERS = {"rank": 4, "mlp": False}
GSPO = {"type": "gspo"}


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_that_share_sequences_or_experts_train_like_one_process(tmp_path, mini_model, mixture):
    cases = [
        case(mini_model, context_parallel=2),
        case(mini_model, context_parallel=2, lora=ADAPTERS),
        case(mixture, context_parallel=2, loss=GSPO),
    ]
    alone = [train_case({**each, "config": {**each["config"], "context_parallel": 1}}, ALONE) for each in cases]
    for found, expected in zip(train_on_ranks(tmp_path / "two", cases, 2), alone, strict=True):
        assert_same(found, expected)


def test_every_rank_has_one_place():
    grids = [Grid(2, 3, 2, 2, rank) for rank in range(24)]
    assert grids[0].size == 24
    assert grids[0].num_shares == 12
    places = {(grid.share, grid.context_rank) for grid in grids}
    assert places == {(share, context) for share in range(12) for context in range(2)}
    assert [grid.share for grid in grids[:5]] == [0, 1, 0, 1, 2], "ranks of a context group share their data"


def test_ranks_that_cannot_be_dealt_are_refused():
    with pytest.raises(UserError, match="4 trainer ranks cannot be 1 replicas of 3 context by 1 expert ranks"):
        Grid.of(World(0, 4, torch.device("cpu")), context_parallel=3)
