"""Adapters on a network: which modules, what they compute, tenants that do not touch each other, states on disk."""

import json
import warnings

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE, make_recipe
from tests.trainer.test_datums import make_datum
from transformers import AutoModelForCausalLM

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import merged_state, read_adapter
from mettle.inference.engine.architecture import read_shape
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.published import load_published, prove
from mettle.inference.engine.weights import fuse
from mettle.storage.weights import model_digest
from mettle.trainer import low_rank, widened
from mettle.trainer.adapter import Adapter, choose_modules, linear_modules
from mettle.trainer.config import LoraConfig, OptimConfig
from mettle.trainer.datums import sequences_of
from mettle.trainer.learner import Learner
from mettle.trainer.loading import full_state, load_policy
from mettle.trainer.publish import compute_canary, fixed_sequences, publish_version
from mettle.trainer.sum_losses import make_sum_loss
from mettle.trainer.tenant import OptimParams, Tenant
from mettle.trainer.tenant_files import load_tenant, save_tenant

LOSS = make_sum_loss("importance_sampling")
PARAMS = OptimParams(1e-2, (0.9, 0.95), 1e-12, max_grad_norm=1.0)


@pytest.fixture(scope="module")
def policy(mini_model):
    return load_policy(mini_model, ALONE, dtype=torch.float32, is_frozen=True)


def make_tenant(policy, name="a", seed=0, **changes):
    config = LoraConfig(**{"rank": 4, "alpha": 8, **changes})
    return Tenant.of_adapter(name, Adapter.create(policy.network, config, seed), OptimConfig())


def data(seed):
    rng = np.random.default_rng(seed)
    return sequences_of([make_datum(rng, int(n)) for n in rng.integers(2, 9, 3)])


def train(learner, tenant, seeds):
    """One step a seed; returns the losses."""
    losses = []
    for seed in seeds:
        learner.switch(tenant)
        losses.append(learner.accumulate(data(seed), LOSS).sums["loss"])
        learner.step(PARAMS)
    return losses


def canary(policy):
    return compute_canary(policy, fixed_sequences(264, 3), ALONE).logprobs


def test_a_new_adapter_computes_what_the_base_does_and_none_again_afterwards(policy, mini_model):
    expected = canary(load_policy(mini_model, ALONE, dtype=torch.float32))
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy))
    np.testing.assert_array_equal(canary(policy), expected)
    train(learner, learner.tenant, range(2))
    assert np.abs(canary(policy) - expected).max() > 1e-3
    policy.adapters.use(None)
    np.testing.assert_array_equal(canary(policy), expected)
    state = load_file(mini_model / "model.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in full_state(policy).items())


def test_a_tenant_alone_and_between_others_has_the_same_bits(policy):
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy))
    alone = train(learner, learner.tenant, range(4))
    crowd = [make_tenant(policy, f"t{i}", seed=0, rank=4 if i == 0 else 2 + i) for i in range(4)]
    together = []
    for step in range(4):
        for tenant in crowd:
            learner.switch(tenant)
            figure = learner.accumulate(data(step if tenant is crowd[0] else 10 + step), LOSS).sums["loss"]
            if tenant is crowd[0]:
                together.append(figure)
        for tenant in crowd:
            learner.switch(tenant)
            learner.step(PARAMS)
    assert together == alone


def test_only_the_factors_have_gradients_and_moments(policy):
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy, target_modules=("q_proj", "v_proj")))
    train(learner, learner.tenant, [0])
    assert len(learner.tenant.trained) == 2 * 2 * 2
    assert len(learner.optimizer.state) == 8
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_state_goes_on_from_the_disk_bit_for_bit_with_what_was_accumulated(policy, tmp_path):
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy))
    tenant = learner.tenant
    train(learner, tenant, range(2))
    learner.accumulate(data(5), LOSS)
    save_tenant(tmp_path, tenant, policy, base_digest="d", has_gradients=True)
    again = load_tenant(tmp_path, "b", policy, base_digest="d")
    for one in (tenant, again):
        learner.switch(one)
        learner.step(PARAMS)
        train(learner, one, [6])
    pairs = zip(tenant.trained, again.trained, strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert tenant.num_steps == again.num_steps == 4
    fresh = load_tenant(tmp_path, "c", policy, base_digest="d", has_optimiser=False)
    assert (fresh.num_steps, len(fresh.optimizer.state)) == (0, 0)
    with pytest.raises(UserError, match="is of another base: it was trained on d, this is e"):
        load_tenant(tmp_path, "b", policy, base_digest="e")


@pytest.mark.parametrize("is_rslora", [False, True])
def test_a_merged_base_computes_what_the_adapter_did(policy, mini_model, tmp_path, is_rslora):
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy, use_rslora=is_rslora))
    train(learner, learner.tenant, range(3))
    expected = canary(policy)
    save_tenant(tmp_path, learner.tenant, policy, base_digest="d")
    merged = merged_state(load_file(mini_model / "model.safetensors"), read_adapter(tmp_path))
    whole = load_policy(mini_model, ALONE, dtype=torch.float32)
    whole.network.load_state_dict(merged, strict=False)
    np.testing.assert_allclose(canary(whole), expected, atol=2e-5)


def test_a_base_is_never_rounded(mini_model, tmp_path):
    """Float32 files trained in bfloat16 stay float32, so that the canary is that of the files."""
    wide = load_policy(mini_model, ALONE, dtype=torch.bfloat16, is_frozen=True)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    np.testing.assert_array_equal(canary(wide), canary(load_policy(mini_model, ALONE, dtype=torch.float32)))
    short = load_policy(halved(mini_model, tmp_path), ALONE, dtype=torch.float32, is_frozen=True)
    assert {parameter.dtype for parameter in short.parameters()} == {torch.float32}


def halved(model, folder):
    """The same model with bfloat16 files."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_products", [True, False])
def test_a_short_base_computes_canaries_exactly(mini_model, tmp_path, monkeypatch, has_products):
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda: has_products)
    short = load_policy(halved(mini_model, tmp_path), ALONE, dtype=torch.bfloat16, is_frozen=True)
    tenant = make_tenant(short)
    learner = Learner(short, make_recipe(), ALONE, tenant=tenant)
    train(learner, tenant, range(2))
    wide = load_policy(mini_model, ALONE, dtype=torch.float32, is_frozen=True)
    wide.network.load_state_dict({name: t.float() for name, t in short.network.state_dict().items()})
    wide.adapters.use(tenant.adapter)
    np.testing.assert_array_equal(canary(short), canary(wide))
    assert {parameter.dtype for parameter in short.parameters() if parameter.ndim > 1} == {torch.bfloat16}
    assert {parameter.dtype for parameter in tenant.trained} == {torch.float32}


def test_switches_and_names_choose_modules(policy):
    def chosen(**options):
        return {name.rpartition(".")[2] for name in choose_modules(policy.network, LoraConfig(**options))}

    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert chosen() == attention | mlp
    assert chosen(attention=False) == mlp
    assert chosen(mlp=False, unembed=True) == attention, "the tied head is left alone"
    assert chosen(target_modules=("q_proj", "lm_head")) == {"q_proj"}
    assert set(choose_modules(policy.network, LoraConfig(target_modules=("layers.1.mlp.up_proj",)))) == {
        "model.layers.1.mlp.up_proj"
    }


def test_an_engine_on_short_files_serves_what_was_trained(mini_model, tmp_path):
    """Merged weights that were rounded to bfloat16 again would be 1e-3 away."""
    model = halved(mini_model, tmp_path / "model")
    short = load_policy(model, ALONE, dtype=torch.bfloat16, is_frozen=True)
    learner = Learner(short, make_recipe(), ALONE, tenant=make_tenant(short), base_digest=model_digest(model))
    train(learner, learner.tenant, range(3))
    publish_version(tmp_path / "weights", 3, learner, fixed_sequences(264, 3), served_as="bfloat16")
    manifest = json.loads((tmp_path / "weights" / "v3" / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["served_as"]) == ("float32", "bfloat16")
    shape, device = read_shape(model), torch.device("cpu")
    folder = tmp_path / "weights" / "v3"
    policy = load_published(
        folder, 3, model, lambda state: Decoder(shape, fuse(shape, state, device, torch.float32), 64)
    )
    check = prove(policy.decoder, folder, 3, 1e-3, policy.adapter)
    assert check.max_abs_diff < 2e-5


def test_what_cannot_be_an_adapter_is_refused(policy):
    with pytest.raises(
        UserError, match=r"no linear module of this model is called 'qkv'; there are down_proj, gate_proj"
    ):
        choose_modules(policy.network, LoraConfig(target_modules=("qkv",)))
    with pytest.raises(UserError, match="tied to the input embedding and left alone"):
        choose_modules(policy.network, LoraConfig(target_modules=("lm_head",)))
    for bad in (
        {"rank": 0},
        {"alpha": 0},
        {"dropout": 0.1},
        {"target_modules": ()},
        {"attention": False, "mlp": False},
    ):
        with pytest.raises(ValidationError):
            LoraConfig(**bad)


@pytest.mark.parametrize(
    "asked", [{}, {"attention": False}, {"target_modules": ("q_proj", "down_proj")}, {"target_modules": ("gate_proj",)}]
)
def test_experts_of_a_family_that_is_not_known_are_refused_and_not_left_out(mixture, monkeypatch, asked):
    network = load_policy(mixture, ALONE, dtype=torch.float32, is_frozen=True).network
    monkeypatch.setattr(low_rank, "FAMILIES", ("another",))
    with pytest.raises(UserError, match=r"and this model is qwen3_moe; set lora\.mlp = false") as refused:
        choose_modules(network, LoraConfig(**asked))
    assert "\n" not in str(refused.value)


def test_the_attention_of_a_mixture_gets_adapters(mixture):
    network = load_policy(mixture, ALONE, dtype=torch.float32, is_frozen=True).network
    for asked in ({"mlp": False}, {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}):
        chosen = choose_modules(network, LoraConfig(**asked))
        assert len(chosen) == 4 * 2
        assert all(".self_attn." in name for name in chosen)


def test_adapters_that_do_not_fit_are_refused(policy, tmp_path):
    save_tenant(tmp_path, make_tenant(policy), policy, base_digest="d")
    file = read_adapter(tmp_path)
    assert set(file.pairs) == set(linear_modules(policy.network)) - {"lm_head"}
    base = dict(policy.network.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(UserError, match=r"of another base: 'model.layers.0.mlp.up_proj' is"):
        merged_state(base | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(UserError, match=r"of another base: this one has no 'model.layers.0.mlp.up_proj'"):
        merged_state({key: tensor for key, tensor in base.items() if key != name}, file)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, said in (
        ({"use_dora": True}, "more than plain LoRA: it sets use_dora"),
        ({"peft_type": "IA3"}, "kind 'IA3'"),
        ({"r": 5}, "not two of rank 5"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=said):
            read_adapter(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        read_adapter(tmp_path)


def test_peft_itself_loads_an_adapter_with_the_same_logprobs(policy, mini_model, tmp_path):
    peft = pytest.importorskip("peft")
    learner = Learner(policy, make_recipe(), ALONE, tenant=make_tenant(policy, target_modules=("q_proj", "down_proj")))
    train(learner, learner.tenant, range(3))
    expected = canary(policy)
    save_tenant(tmp_path, learner.tenant, policy, base_digest="d", base=mini_model)
    whole = load_policy(mini_model, ALONE, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about transformers
        whole.network = peft.PeftModel.from_pretrained(whole.network, str(tmp_path)).merge_and_unload()
    np.testing.assert_allclose(canary(whole), expected, atol=2e-5)
