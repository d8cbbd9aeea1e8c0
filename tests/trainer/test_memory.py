"""What a micro batch keeps: more without checkpointing, less under adapters; budgets cut batches and change no number."""

import weakref

import numpy as np
import pytest
import torch
from tests.trainer.conftest import ALONE, gradients, make_batch, make_group, make_learner, make_recipe

from mettle.trainer.adapter import Adapter
from mettle.trainer.config import LoraConfig, MicroBatchConfig
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.memory import activation_bytes_per_token, fit_micro_batch


def test_adapters_and_checkpointing_keep_less(mini_model):
    whole = load_policy(mini_model, ALONE, dtype=torch.float32)
    full = activation_bytes_per_token(whole, ALONE)
    whole.checkpoint_activations(True)
    assert activation_bytes_per_token(whole, ALONE) < 0.6 * full
    assert whole.is_checkpointing
    frozen = load_policy(mini_model, ALONE, dtype=torch.float32, is_frozen=True)
    frozen.adapters.use(Adapter.create(frozen.network, LoraConfig(rank=2, target_modules=("q_proj",)), 0))
    assert 0 < activation_bytes_per_token(frozen, ALONE) < full


def test_it_counts_what_torch_holds(mini_model):
    """Twice the tokens keep twice the bytes, and what is counted is at least the hidden states that must be there."""
    policy = load_policy(mini_model, ALONE, dtype=torch.float32)
    per_token = activation_bytes_per_token(policy, ALONE)
    least = 2 * (2 * 32 + 3 * 48) * 4  # two layers: two norms' inputs, three vectors inside the MLP, float32
    assert least < per_token < 40 * least


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_asking_leaves_nothing_of_the_pass_in_memory(mini_model, is_checkpointing):
    policy = load_policy(mini_model, ALONE, dtype=torch.float32)
    policy.checkpoint_activations(is_checkpointing)
    made = []
    for module in policy.network.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, inputs, output: made.append(weakref.ref(output)))
    activation_bytes_per_token(policy, ALONE)
    assert len(made) > 2
    assert [output for output in made if output() is not None] == []


def test_a_budget_lowers_the_tokens_of_a_micro_batch_and_no_number(mini_model):
    policy = load_policy(mini_model, ALONE, dtype=torch.float32)
    per_token = activation_bytes_per_token(policy, ALONE)
    config = MicroBatchConfig(activation_gib=per_token * 100.5 / 2**30)
    assert fit_micro_batch(config, policy, ALONE).max_tokens == 100
    assert fit_micro_batch(MicroBatchConfig(), policy, ALONE) == MicroBatchConfig()
    assert fit_micro_batch(MicroBatchConfig(activation_gib=None), policy, ALONE).max_tokens == 8192
    rng = np.random.default_rng(0)
    batch = make_batch([sample for _ in range(3) for sample in make_group(rng)])
    expected, _ = gradients(make_learner(mini_model), batch)
    small = Learner(policy, make_recipe(micro_batch=config.model_copy(update={"max_tokens": 20})), ALONE)
    found, _ = gradients(small, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_checkpointing_changes_no_bit(mini_model, is_frozen):
    rng = np.random.default_rng(0)
    batch = make_batch([sample for _ in range(3) for sample in make_group(rng)])
    found = []
    for is_on in (False, True):
        policy = load_policy(mini_model, ALONE, dtype=torch.float32, is_frozen=is_frozen)
        policy.checkpoint_activations(is_on)
        tenant = None
        if is_frozen:
            from mettle.trainer.tenant import Tenant

            tenant = Tenant.of_adapter("a", Adapter.create(policy.network, LoraConfig(rank=2), 0))
        learner = Learner(policy, make_recipe(), ALONE, tenant=tenant)
        learner.train(batch, 1)
        found.append(torch.cat([p.detach().flatten() for p in learner.tenant.trained]))
    assert torch.equal(*found)
