"""A base stored in bfloat16 on a processor that multiplies no such numbers: the numbers of float32, its bytes on disk."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.conftest import ALONE, make_batch, make_group, make_recipe

from mettle.trainer import widened
from mettle.trainer.adapter import Adapter
from mettle.trainer.config import LoraConfig, OptimConfig
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.loss import BatchLoss
from mettle.trainer.publish import compute_canary, fixed_sequences
from mettle.trainer.tenant import Tenant


def stored_as(model, folder, dtype):
    folder.mkdir()
    state = {name: tensor.bfloat16().to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"dtype": str(dtype).removeprefix("torch.")}))
    return folder


def gradients(learner, batch):
    sequences = Sequences.of(batch)
    learner.accumulate(sequences, BatchLoss(learner.recipe.loss, sequences.counts))
    return torch.cat([parameter.grad.flatten() for parameter in learner.tenant.trained])


def learner_on(policy):
    adapter = Adapter.create(policy.network, LoraConfig(rank=4, alpha=8), 0)
    for pair in adapter.pairs.values():
        torch.nn.init.normal_(pair.b, std=0.1, generator=torch.Generator().manual_seed(1))
    return Learner(policy, make_recipe(), ALONE, tenant=Tenant.of_adapter("a", adapter, OptimConfig()))


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return make_batch([sample for _ in range(2) for sample in make_group(rng, prompt_length=8, max_completion=6)])


@pytest.mark.parametrize("block", [widened.BLOCK_NUMBERS, 1000])
def test_short_weights_give_the_numbers_of_float32(mini_model, tmp_path, batch, monkeypatch, block):
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(widened, "BLOCK_NUMBERS", block)
    folders = {dtype: stored_as(mini_model, tmp_path / str(dtype), dtype) for dtype in (torch.bfloat16, torch.float32)}
    short, wide = (learner_on(load_policy(at, ALONE, dtype=dtype, is_frozen=True)) for dtype, at in folders.items())
    assert not short.policy.computes_short
    matrices = {p.dtype for p in short.policy.network.parameters() if p.ndim > 1}
    assert matrices == {torch.bfloat16}
    torch.testing.assert_close(gradients(short, batch), gradients(wide, batch), rtol=1e-4, atol=1e-6)
    sequences = fixed_sequences(264, 3)
    seen, wanted = (compute_canary(each.policy, sequences, ALONE).logprobs for each in (short, wide))
    np.testing.assert_allclose(seen, wanted, atol=2e-6)


def test_a_processor_with_bfloat16_uses_it(mini_model, tmp_path, monkeypatch):
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda: True)
    folder = stored_as(mini_model, tmp_path / "model", torch.bfloat16)
    assert load_policy(folder, ALONE, dtype=torch.bfloat16, is_frozen=True).computes_short


def test_stacked_experts_are_computed_as_they_are_stored(mixture, tmp_path, monkeypatch):
    monkeypatch.setattr(widened, "multiplies_bfloat16", lambda: False)
    folder = stored_as(mixture, tmp_path / "model", torch.bfloat16)
    assert load_policy(folder, ALONE, dtype=torch.bfloat16, is_frozen=True).computes_short
