"""Muon: what it computes, what it is given, and that a state of it is saved and loaded."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.trainer.conftest import make_batch, make_group, make_learner

from mettle.trainer.checkpoint import load_learner, save_learner
from mettle.trainer.config import LoraConfig, OptimConfig, TrainerConfig
from mettle.trainer.muon import Muon, is_muon_matrix, orthogonalised

MUON = OptimConfig(type="muon", lr=2e-3, weight_decay=0.1)


def batch_of(seed):
    rng = np.random.default_rng(seed)
    return make_batch([sample for _ in range(3) for sample in make_group(rng)])


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 7)], ids=str)
def test_an_orthogonalised_matrix_keeps_its_singular_vectors_and_loses_its_singular_values(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    result = orthogonalised(matrix)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.mT @ result @ right.mT
    values = torch.diagonal(inside, dim1=-2, dim2=-1)
    assert values.min() > 0.3
    assert values.max() < 1.3
    assert (inside - torch.diag_embed(values)).abs().max() < 1e-4
    assert not orthogonalised(torch.zeros(shape)).any()


def test_its_step_is_that_of_torch_but_for_the_rounding_of_bfloat16():
    """torch.optim.Muon orthogonalises in bfloat16 wherever it runs; three steps with momentum and decay."""
    torch.manual_seed(1)
    start, gradients = torch.randn(12, 20), [torch.randn(12, 20) for _ in range(3)]
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    own = Muon([ours], lr=0.02, momentum=0.95, weight_decay=0.1)
    peer = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        own.step()
        peer.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    assert (ours - start).norm().item() == pytest.approx(moved.item(), rel=0.02)


def test_matrices_inside_layers_are_its_own_and_all_else_is_adamws(mini_model):
    learner = make_learner(mini_model, optim=MUON)
    names = {id(parameter): name for name, parameter in learner.tenant.parameters.items()}
    assert learner.tenant.muon is not None
    given = {names[id(p)] for group in learner.tenant.muon.param_groups for p in group["params"]}
    left = {names[id(p)] for group in learner.optimizer.param_groups for p in group["params"]}
    assert len(given) == 2 * 7
    assert given | left == set(names.values())
    assert not given & left
    assert {name.split(".")[-2] for name in given} >= {"q_proj", "down_proj"}
    assert any("embed_tokens" in name for name in left)
    assert not is_muon_matrix("network.lm_head.weight", torch.nn.Parameter(torch.zeros(4, 4)))
    assert is_muon_matrix("network.layers.0.mlp.experts.gate_up_proj", torch.nn.Parameter(torch.zeros(2, 4, 4)))


def test_a_saved_state_goes_on_to_the_same_bits(mini_model, tmp_path):
    whole, first, second = (make_learner(mini_model, optim=MUON) for _ in range(3))
    for step in (1, 2):
        whole.train(batch_of(step), step)
    first.train(batch_of(1), 1)
    save_learner(tmp_path, first, 1)
    assert load_learner(tmp_path, second) == 1
    second.train(batch_of(2), 2)
    for name, parameter in whole.tenant.parameters.items():
        assert torch.equal(parameter, second.tenant.parameters[name]), name


def test_decay_and_rate_reach_it_and_a_step_of_zeros_moves_nothing(mini_model):
    learner = make_learner(mini_model, optim=MUON.model_copy(update={"weight_decay": 0.0}))
    before = {name: p.detach().clone() for name, p in learner.tenant.parameters.items()}
    learner.train(batch_of(0), 1)
    assert learner.tenant.muon is not None
    assert [(g["lr"], g["weight_decay"]) for g in learner.tenant.muon.param_groups] == [(2e-3, 0.0)]
    name = next(name for name, p in before.items() if is_muon_matrix(name, p))
    moved = learner.tenant.parameters[name] - before[name]
    # .2 of the learning rate, root mean square, which the iteration reaches to within its spread of singular values
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2 * 2e-3, rel=0.35)


def test_what_would_be_ignored_is_refused():
    with pytest.raises(ValidationError, match=r"momentum 0\.9 is muon's"):
        OptimConfig(momentum=0.9)
    for wrong in ({"betas": (0.9, 1.5)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}):
        with pytest.raises(ValidationError, match="at least 0 and less than 1"):
            OptimConfig(**wrong)
    with pytest.raises(ValidationError, match="finite number"):
        OptimConfig(lr=math.inf)
    with pytest.raises(ValidationError, match="an adapter's factors are trained by 'adamw'"):
        TrainerConfig(optim=MUON, lora=LoraConfig())
