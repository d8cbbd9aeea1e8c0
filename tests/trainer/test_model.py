"""Other architectures: the layouts that a model does not obey are not used on it."""

import numpy as np
import pytest
import torch
from tests.trainer.conftest import ALONE, gradients, make_batch, make_group, make_recipe, planned
from transformers import AutoConfig, AutoModelForCausalLM

from mettle.trainer import model as model_module
from mettle.trainer.config import MicroBatchConfig
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner
from mettle.trainer.loading import load_policy
from mettle.trainer.model import Traits

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
ROPE = {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}}
MODELS = {
    "llama": {**SIZES, **HEADS, **ROPE},
    "mistral": {**SIZES, **HEADS, **ROPE, "sliding_window": 6},
    "qwen2": {**SIZES, **HEADS, **ROPE, "tie_word_embeddings": True},
    "gpt2": {
        "vocab_size": 264,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
}
EXPECTED = {"llama": (True, True), "mistral": (False, True), "qwen2": (True, True), "gpt2": (False, False)}


@pytest.fixture(params=sorted(MODELS))
def model(request, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **MODELS[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / request.param)
    return request.param, load_policy(tmp_path / request.param, ALONE, dtype=torch.float32)


def test_layouts_agree_on_every_model_that_they_are_used_on(model):
    name, policy = model
    traits = Traits.of(policy)
    assert (traits.can_share, traits.can_pack) == EXPECTED[name]
    rng = np.random.default_rng(0)
    groups = [make_group(rng, prompt_length=12, max_completion=8) for _ in range(3)]
    batch = make_batch([sample for group in groups for sample in group])
    single = Learner(policy, make_recipe(micro_batch=MicroBatchConfig(share_prompts=False, max_rows=1)), ALONE)
    usual = Learner(policy, make_recipe(), ALONE)
    expected, _ = gradients(single, batch)
    found, _ = gradients(usual, batch)
    assert {layout.form for layout in usual.plan(Sequences.of(batch))} == {"shared" if traits.can_share else "padded"}
    torch.testing.assert_close(found, expected, rtol=3e-4, atol=3e-7)
    if traits.can_pack:
        layouts = planned(batch, MicroBatchConfig(), attention_cost=1, is_packed=True)
        usual.plan = lambda _: layouts
        found, _ = gradients(usual, batch)
        torch.testing.assert_close(found, expected, rtol=3e-4, atol=3e-7)


@torch.no_grad()
def test_what_is_said_of_a_sequence_is_the_same_in_chunks(model, monkeypatch):
    _, policy = model
    ids, places = np.arange(1, 41), np.array([1, 5, 6, 7, 20, 39])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0])
    scaled = policy.logits_at(ids, places, None) / temperatures[:, None]
    expected = torch.log_softmax(scaled, -1)[torch.arange(6), torch.from_numpy(ids[places])]
    sizes = []
    head = policy.head
    monkeypatch.setattr(policy, "head", lambda hidden: sizes.append(len(hidden)) or head(hidden))
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 4 * policy.vocab_size)
    torch.testing.assert_close(policy.logprobs_at(ids, places, None, temperatures), expected, rtol=0, atol=1e-6)
    assert sizes == [4, 2]


def test_a_shared_prompt_would_be_wrong_under_a_sliding_window(model):
    name, policy = model
    if name != "mistral":
        return
    rng = np.random.default_rng(0)
    batch = make_batch(make_group(rng, prompt_length=12, max_completion=8))
    learner = Learner(policy, make_recipe(), ALONE)
    expected, _ = gradients(learner, batch)
    layouts = planned(batch, MicroBatchConfig(), attention_cost=0.01)
    assert layouts[0].form == "shared"
    learner.plan = lambda _: layouts
    found, _ = gradients(learner, batch)
    assert (found - expected).abs().max() > 1e-3 * expected.abs().max()
