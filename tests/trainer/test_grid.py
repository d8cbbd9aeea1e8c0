"""However the ranks stand to each other, they train like one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tests.trainer.conftest import ALONE
from tests.trainer.rank_cases import train_case
from torch.distributed.fsdp import CPUOffloadPolicy

from mettle.errors import UserError
from mettle.trainer.config import TrainerConfig
from mettle.trainer.grid import Grid
from mettle.trainer.loading import load_policy, shard_policy
from mettle.trainer.loop import make_learner
from mettle.trainer.world import World

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
CLOSE = 1e-6
CURVE = (
    "loss/total",
    "loss/rl",
    "entropy/mean",
    "mismatch_kl/mean",
    "mismatch_kl/max",
    "tokens/trained",
    "masked/share",
)


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
    states = [folder / f"state-{number}.safetensors" for number in range(len(metrics))]
    return [(curve, load_file(state) if state.exists() else None) for curve, state in zip(metrics, states, strict=True)]


def assert_same(found, expected, *, has_same_rows=True):
    """The curve to a millionth; the norm of the gradient, a sum over all weights, to a hundred thousandth.

    The load of experts is of the places that are computed; those of a shared prompt are as many as there are rows.
    """
    (curve, state), (own_curve, own_state) = found, expected
    assert len(curve) == len(own_curve) > 0
    for metrics, own in zip(curve, own_curve, strict=True):
        for name in CURVE:
            assert metrics[name] == pytest.approx(own[name], rel=CLOSE, abs=CLOSE), name
        assert metrics["optim/grad_norm"] == pytest.approx(own["optim/grad_norm"], rel=1e-5)
        routed = {name: value for name, value in own.items() if name.startswith("experts/") and has_same_rows}
        assert {name: metrics[name] for name in routed} == pytest.approx(routed)
    assert state.keys() == own_state.keys()
    for name, tensor in own_state.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-4)


def case(folder, *, first=1, last=2, load=None, save=None, lora=None, **config):
    settings = {"max_steps": 10, "optim": {"lr": 1e-3}, "device": "cpu", "lora": lora, **config}
    folders = {"load": load and str(load), "save": save and str(save)}
    return {"model": str(folder), "config": settings, "steps": [first, last], **folders}


def for_one(case):
    """The case for one process."""
    one = dict.fromkeys(("num_replicas", "context_parallel", "expert_parallel"), 1)
    return case | {"config": case["config"] | one, "load": None, "save": None}


ADAPTERS = {"rank": 4, "mlp": False}
GSPO = {"type": "gspo"}


@pytest.fixture
def lopsided(mixture, tmp_path):
    """The mixture with routers that send every token to the same two experts, which one rank of two has."""
    folder = shutil.copytree(mixture, tmp_path / "lopsided")
    weights = load_file(folder / "model.safetensors")
    routers = [name for name in weights if name.endswith("mlp.gate.weight")]
    assert routers
    save_file(weights | {name: torch.zeros_like(weights[name]) for name in routers}, folder / "model.safetensors")
    return folder


@pytest.fixture
def short(mixture, tmp_path):
    """The mixture in files of bfloat16."""
    folder = shutil.copytree(mixture, tmp_path / "short")
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}))
    return folder


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_that_share_sequences_or_experts_train_like_one_process(
    tmp_path, mini_model, mixture, lopsided, short
):
    """Dense, adapters and a mixture; one state goes from one mesh to another and on in one process."""
    middle, alone = tmp_path / "middle", tmp_path / "alone"
    first_alone = train_case(for_one(case(mixture, loss=GSPO, last=1)) | {"save": str(alone)}, ALONE)
    on_short = {"lora": ADAPTERS, "dtype": "bfloat16", "activation_checkpointing": True}
    cases = [
        case(short, **on_short),
        case(short, expert_parallel=2, **on_short),
        case(mini_model, context_parallel=2),
        case(mini_model, context_parallel=2, lora=ADAPTERS),
        case(mixture, context_parallel=2, lora={"rank": 4}),
        case(mixture, expert_parallel=2, lora=ADAPTERS),
        case(lopsided, expert_parallel=2, last=1),
        case(mixture, expert_parallel=2, loss=GSPO, last=1, save=middle),
        case(mixture, context_parallel=2, loss=GSPO, first=2, load=middle),
        case(mixture, expert_parallel=2, loss=GSPO, first=2, load=alone),
    ]
    cut, shared, *ranks, early, late, after_one = train_on_ranks(tmp_path / "two", cases, 2)
    for own, metrics in zip(cut[0], shared[0], strict=True):  # a base in bfloat16 is as exact as bfloat16
        assert metrics["loss/total"] == pytest.approx(own["loss/total"], rel=1e-2)
        assert metrics["optim/grad_norm"] == pytest.approx(own["optim/grad_norm"], rel=2e-2)
    torch.testing.assert_close(shared[1]["canary"], cut[1]["canary"], rtol=0, atol=1e-2)
    for found, each in zip(ranks, cases[2:], strict=False):
        assert_same(found, train_case(for_one(each), ALONE))
    assert ranks[4][0][0]["experts/idle_share"] == 0.5, "one rank has no token of the other to compute"
    curve, state = train_case(for_one(case(mixture, loss=GSPO)), ALONE)
    assert_same((early[0] + late[0], late[1]), (curve, state))
    assert_same((first_alone[0] + after_one[0], after_one[1]), (curve, state))
    goes_on = case(mixture, loss=GSPO, first=2)
    assert_same(train_case(for_one(goes_on) | {"load": str(middle)}, ALONE), (curve[1:], state))


FOUR = {
    "context and experts": {"context_parallel": 2, "expert_parallel": 2},
    "four in a context": {"context_parallel": 4},
    "replicas of shared experts": {"num_replicas": 2, "expert_parallel": 2},
    "replicas of contexts": {"num_replicas": 2, "context_parallel": 2},
    "shards of contexts": {"context_parallel": 2},
    "shards of experts": {"expert_parallel": 2},
    "an expert each": {"expert_parallel": 4},
    "muon": {"context_parallel": 2, "expert_parallel": 2, "optim": {"lr": 1e-3, "type": "muon"}},
    "computed again": {"context_parallel": 2, "expert_parallel": 2, "activation_checkpointing": True},
    "no prompt shared": {"context_parallel": 2, "expert_parallel": 2, "micro_batch": {"share_prompts": False}},
    "short passes": {"context_parallel": 2, "expert_parallel": 2, "micro_batch": {"max_rows": 1}},
}


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_four_ranks_train_like_one_process_however_they_stand(tmp_path, mini_model, mixture):
    """Every arrangement of a mixture, full and of adapters; a dense model where there is no expert to share. What they
    save one process takes up, and they what one process saves."""
    cases = [case(mixture, last=3, **numbers) for numbers in FOUR.values()]
    cases += [case(mixture, last=3, lora=ADAPTERS, **FOUR[name]) for name in list(FOUR)[:3]]
    cases += [case(mini_model, last=3, **numbers) for numbers in FOUR.values() if "expert_parallel" not in numbers]
    folders = [tmp_path / f"state-{number}" for number in range(len(cases))]
    kept = [each | {"save": str(folder)} for each, folder in zip(cases, folders, strict=True)]
    ones = [str(tmp_path / f"one-{number}") for number in range(len(cases))]
    for each, one in zip(cases, ones, strict=True):
        train_case(for_one(each) | {"save": one}, ALONE)
    later = [each | {"steps": [4, 4], "load": one} for each, one in zip(cases, ones, strict=True)]
    for found, each in zip(train_on_ranks(tmp_path / "later", later, 4), cases, strict=True):
        curve, state = train_case(for_one(each | {"steps": [1, 4]}), ALONE)
        is_apart = each["config"].get("micro_batch") == {"share_prompts": False}
        assert_same(found, (curve[3:], state), has_same_rows=is_apart)
    for found, each, folder in zip(train_on_ranks(tmp_path / "four", kept, 4), cases, folders, strict=True):
        longer = each | {"steps": [1, 4]}
        curve, state = train_case(for_one(longer), ALONE)
        is_apart = each["config"].get("micro_batch") == {"share_prompts": False}
        assert_same((found[0], {}), (curve[:3], {}), has_same_rows=is_apart)
        assert_same(train_case(for_one(each) | {"steps": [4, 4], "load": str(folder)}, ALONE), (curve[3:], state))


def test_every_rank_has_one_place():
    grids = [Grid(2, 3, 2, 2, rank) for rank in range(24)]
    assert grids[0].size == 24
    assert grids[0].num_shares == 12
    places = {(grid.share, grid.context_rank) for grid in grids}
    assert places == {(share, context) for share in range(12) for context in range(2)}
    assert [grid.share for grid in grids[:5]] == [0, 1, 0, 1, 2], "ranks of a context group share their data"


def test_ranks_that_cannot_be_dealt_are_refused():
    with pytest.raises(UserError, match="4 trainer ranks cannot be 1 replicas of 3 context by 1 expert ranks"):
        Grid.of(World(0, 4, CPU), context_parallel=3)


def test_what_cannot_be_offloaded_is_refused_before_a_weight_is_read(tmp_path):
    config = TrainerConfig(cpu_offload=True)
    with pytest.raises(UserError, match="cpu_offload is for several ranks on GPUs, and this is CPUs"):
        make_learner(config, tmp_path / "no model", World(0, 2, CPU))
    with pytest.raises(UserError, match="and this is one rank: leave it out"):
        make_learner(config, tmp_path / "no model", World(0, 1, torch.device("cuda")))
    with pytest.raises(ValidationError, match="cpu_offload is for GPUs"):
        TrainerConfig(cpu_offload=True, device="cpu")


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_offloading_is_told_to_fsdp_for_every_part(monkeypatch, mini_model, mixture, is_offloaded):
    """No GPU is here: what FSDP2 would do with them is its own; that it is asked to, for experts too, is ours."""
    told = []
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, **options: told.append(options))
    monkeypatch.setattr("torch.distributed.tensor.parallel.parallelize_module", lambda *_: None)
    monkeypatch.setattr(Grid, "weights_mesh", lambda *_: "all")
    monkeypatch.setattr(Grid, "experts_mesh", lambda *_: {"shard": "cut", "expert": "experts"})
    world, policy = World(0, 2, torch.device("cuda")), load_policy(mixture, ALONE, dtype=torch.bfloat16)
    shard_policy(policy, world, Grid.of(world, expert_parallel=2), is_offloaded=is_offloaded)
    assert [options["mesh"] for options in told] == ["cut"] * 2 + ["all"] * 3
    assert all(options["mp_policy"].reduce_dtype == torch.float32 for options in told)
    assert {isinstance(options.get("offload_policy"), CPUOffloadPolicy) for options in told} == {is_offloaded}


def test_a_model_that_cannot_be_spread_is_refused(mini_model, mixture):
    dense, mixed = (load_policy(folder, ALONE, dtype=torch.float32) for folder in (mini_model, mixture))
    two, eight = World(0, 2, CPU), World(0, 8, CPU)
    with pytest.raises(UserError, match="is for mixtures of experts, and this model is dense"):
        shard_policy(dense, two, Grid.of(two, expert_parallel=2))
    with pytest.raises(UserError, match="8 does not divide this model's 4 experts a layer"):
        shard_policy(mixed, eight, Grid.of(eight, expert_parallel=8))
    fourteen = World(0, 14, CPU)
    with pytest.raises(UserError, match="an expert's matrix of 48 rows cannot be cut evenly among 7 ranks"):
        shard_policy(mixed, fourteen, Grid.of(fourteen, expert_parallel=2))
    dense.network.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UserError, match="one has layers of full_attention, sliding_attention: set it to 1"):
        shard_policy(dense, two, Grid.of(two, context_parallel=2))


@pytest.mark.parametrize("field", ["context_parallel", "expert_parallel"])
def test_compile_is_refused_where_ranks_compute_together(field):
    with pytest.raises(ValidationError, match=f"set it to false, or {field} to 1"):
        TrainerConfig(compile=True, **{field: 2})


def test_a_config_for_one_process_asks_for_no_ranks():
    config = TrainerConfig(num_replicas=2, context_parallel=2, expert_parallel=2, cpu_offload=True)
    assert config.alone() == TrainerConfig()
