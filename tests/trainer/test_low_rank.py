"""Adapters of a mixture's experts: what they compute, their gradients, and the files that PEFT and the engine read."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE, make_recipe
from tests.trainer.test_adapter import canary, halved, make_tenant, train
from torch import nn

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import LowRankPair, merged_state, read_adapter
from mettle.inference.engine.weights import read_state
from mettle.trainer import low_rank
from mettle.trainer.adapter import choose_modules
from mettle.trainer.config import LoraConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.low_rank import adapted_experts
from mettle.trainer.merging import write_merged
from mettle.trainer.tenant_files import load_tenant, save_tenant


@pytest.fixture(scope="module")
def policy(mixture):
    return load_policy(mixture, ALONE, dtype=torch.float32, is_frozen=True)


@pytest.fixture(scope="module")
def trained(policy, mixture, tmp_path_factory):
    """An adapter on everything after four steps: its folder, and what it says of the canary."""
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy))
    train(learner, learner.tenant, range(4))
    folder = tmp_path_factory.mktemp("trained")
    save_tenant(folder, learner.tenant, policy, base_digest="d", base=mixture)
    return SimpleNamespace(folder=folder, tenant=learner.tenant, canary=canary(policy))


def test_experts_compute_with_a_new_adapter_what_they_do_without_and_another_thing_when_it_has_learnt(policy, mixture):
    base = canary(load_policy(mixture, ALONE, dtype=torch.float32))
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy, attention=False))
    np.testing.assert_allclose(canary(policy), base, atol=1e-6)
    losses = train(learner, learner.tenant, [0] * 6)
    assert losses[-1] < losses[0]
    assert np.abs(canary(policy) - base).max() > 1e-3
    assert all(".experts." in name for name in learner.tenant.parameters)
    policy.adapters.use(None)
    np.testing.assert_array_equal(canary(policy), base)


@pytest.mark.parametrize("kinds", [("gate_proj", "up_proj", "down_proj"), ("gate_proj", "up_proj"), ("down_proj",)])
def test_output_and_gradients_are_those_of_each_expert_s_merged_matrices(kinds):
    """E 5 experts of which one is chosen by no token, H 6, inner 4, rank 2, 7 tokens, 2 experts each; float64."""
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).requires_grad_()

    module = SimpleNamespace(gate_up_proj=draw(5, 8, 6), down_proj=draw(5, 6, 4), act_fn=nn.functional.silu)
    sizes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    pairs = {kind: LowRankPair(draw(5, 2, sizes[kind][1]), draw(5, sizes[kind][0], 2)) for kind in kinds}
    hidden, shares = draw(7, 6), torch.rand(7, 2, generator=rng, dtype=torch.float64).requires_grad_()
    index = torch.stack([torch.randperm(4, generator=rng)[:2] for _ in range(7)])

    def merged(kind, weight, expert):
        return weight if kind not in pairs else weight + 1.5 * pairs[kind].b[expert] @ pairs[kind].a[expert]

    def expected():
        rows = []
        for token in range(7):
            parts = []
            for place in range(2):
                expert = int(index[token, place])
                gate_weight, up_weight = module.gate_up_proj[expert][:4], module.gate_up_proj[expert][4:]
                gate = merged("gate_proj", gate_weight, expert) @ hidden[token]
                up = merged("up_proj", up_weight, expert) @ hidden[token]
                down = merged("down_proj", module.down_proj[expert], expert)
                parts.append(shares[token, place] * (down @ (nn.functional.silu(gate) * up)))
            rows.append(sum(parts))
        return torch.stack(rows)

    inputs = [hidden, shares, *(factor for pair in pairs.values() for factor in (pair.a, pair.b))]
    found = adapted_experts(module, pairs, 1.5, hidden, index, shares)
    torch.testing.assert_close(found, expected())
    weight = torch.randn(7, 6, generator=rng, dtype=torch.float64)
    ours = torch.autograd.grad((found * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected() * weight).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_in_the_file_each_expert_has_a_pair_under_the_name_of_its_matrix_and_merging_gives_the_same_policy(
    trained, mixture, tmp_path
):
    names = set(load_file(trained.folder / "adapter_model.safetensors"))
    wanted = {f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.lora_{half}.weight"
              for layer in range(2) for expert in range(4) for kind in ("gate", "up", "down") for half in "AB"}  # fmt: skip
    assert {name for name in names if ".experts." in name} == wanted
    merged = load_policy(write_merged(mixture, trained.folder, tmp_path / "merged"), ALONE, dtype=torch.float32)
    np.testing.assert_allclose(canary(merged), trained.canary, atol=2e-5)


def test_saved_and_loaded_it_takes_the_same_next_step_to_the_bit(policy, mixture, tmp_path):
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy))
    train(learner, learner.tenant, range(2))
    save_tenant(tmp_path, learner.tenant, policy, base_digest="d", base=mixture)
    train(learner, learner.tenant, [2])
    again = load_tenant(tmp_path, "b", policy, base_digest="d")
    train(learner, again, [2])
    for name, parameter in learner.tenant.parameters.items():
        assert torch.equal(parameter, again.parameters[name])
    expected = dict(make_tenant(policy).parameters)
    assert {name: p.shape for name, p in again.parameters.items()} == {n: p.shape for n, p in expected.items()}


def test_peft_itself_loads_experts_with_the_same_logprobs(trained, mixture):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    whole = load_policy(mixture, ALONE, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about transformers
        whole.network = peft.PeftModel.from_pretrained(whole.network, str(trained.folder)).merge_and_unload()
    np.testing.assert_allclose(canary(whole), trained.canary, atol=2e-5)


def test_a_short_base_s_canary_is_that_of_its_weights_in_float32(mixture, tmp_path):
    short = load_policy(halved(mixture, tmp_path), ALONE, dtype=torch.bfloat16, is_frozen=True)
    assert short.network.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    tenant = make_tenant(short)
    train(Learner(short, make_recipe(), ALONE, tenant=tenant), tenant, range(2))
    wide = load_policy(mixture, ALONE, dtype=torch.float32, is_frozen=True)
    wide.network.load_state_dict({name: t.float() for name, t in short.network.state_dict().items()})
    wide.adapters.use(tenant.adapter)
    np.testing.assert_array_equal(canary(short), canary(wide))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("gate_proj", "down_proj"), "gate_proj and up_proj together"),
        (("layers.1.mlp.experts.down_proj",), "those of all layers get adapters, or none"),
    ],
)
def test_what_peft_has_no_word_for_is_refused(policy, asked, said):
    with pytest.raises(UserError, match=said):
        choose_modules(policy.network, LoraConfig(target_modules=asked))


def test_a_file_without_one_of_the_experts_is_refused(trained, policy):
    file = read_adapter(trained.folder)
    for name in [name for name in file.pairs if name.endswith("layers.1.mlp.experts.2.up_proj")]:
        del file.pairs[name]
    with pytest.raises(UserError, match=r"no pair for expert 2 of 'model.layers.1.mlp.experts.up_proj'"):
        low_rank.in_network(file.pairs)


def test_the_pairs_are_added_to_the_checkpoint_s_own_names(trained, mixture):
    base = read_state(mixture)
    changed = {name for name, tensor in merged_state(base, read_adapter(trained.folder)).items()
               if not torch.equal(tensor, base[name].float())}  # fmt: skip
    assert sum(".experts." in name for name in changed) == 2 * 4 * 3
