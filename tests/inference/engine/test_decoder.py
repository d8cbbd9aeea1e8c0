"""The engine against transformers: what it records is what transformers computes for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import CONFIGS, SERVED, SIZES
from policies import make_model, picked_logprobs, reference_logprobs, tiny_config

from mettle.errors import UserError
from mettle.inference.engine.architecture import Rope, read_shape, shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.local import generate_batch
from mettle.inference.engine.protocol import Choice
from mettle.inference.engine.weights import fuse, read_state
from mettle.records.sampling import SamplingParams

PROMPTS = [[1, 2, 3], [5] * 40, [7], [1, 2, 3]]


def differences(model: Any, prompt: list[int], choice: Choice) -> torch.Tensor:
    expected = picked_logprobs(model, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
    return (expected - torch.tensor(choice.logprobs)).abs()


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_of_prefill_and_decode_agree_with_transformers(name: str) -> None:
    model = make_model(CONFIGS[name])
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    generations = generate_batch(model.config.to_dict(), model.state_dict(), PROMPTS, params, n=3, seed=0)
    found = [
        differences(model, prompt, choice)
        for prompt, generation in zip(PROMPTS, generations, strict=True)
        for choice in generation.choices
    ]
    first = torch.stack([d[0] for d in found])
    assert first.mean() <= 1e-5
    assert torch.cat(found).mean() <= 1e-5
    assert torch.cat(found).max() <= 1e-4
    assert all(len(choice.token_ids) == 30 for g in generations for choice in g.choices)


@pytest.mark.parametrize("name", ["qwen3 tied", *SERVED])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    model = make_model(CONFIGS[name])
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    (generation,) = generate_batch(model.config.to_dict(), model.state_dict(), [[1, 2, 3]], params)
    ids = [1, 2, 3]
    for _ in range(20):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generation.choices[0].token_ids == ids[3:]


@pytest.mark.parametrize("name", SERVED)
def test_company_in_the_batch_changes_no_bit_in_any_family(name: str) -> None:
    model = make_model(CONFIGS[name])
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=3)

    def sample(prompts: list[list[int]], n: int) -> Choice:
        return generate_batch(model.config.to_dict(), model.state_dict(), prompts, params, n=n)[0].choices[0]

    alone = sample([[5] * 18], 1)
    for company, n in (([[9, 8]], 1), ([[7] * 30, [1]], 5), ([[3] * 19, *([i] for i in range(40))], 1)):
        together = sample([[5] * 18, *company], n)
        assert together.token_ids == alone.token_ids
        assert together.logprobs == alone.logprobs


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe with dense layers"])
def test_a_saved_model_is_read_like_a_live_one(name: str, tmp_path: Path) -> None:
    model = make_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape == shape_from_config(model.config.to_dict())
    live, saved = (
        fuse(shape, s, torch.device("cpu"), torch.float32) for s in (model.state_dict(), read_state(tmp_path))
    )
    ids = torch.arange(20)[None]
    assert torch.equal(Decoder(shape, live, 32).prefill(ids), Decoder(shape, saved, 32).prefill(ids))


def test_recorded_logprobs_are_those_of_the_temperature_and_the_support_sampled_from(model: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.7, top_k=5, ignore_eos=True)
    (generation,) = generate_batch(model.config.to_dict(), model.state_dict(), [[9, 8]], params, n=4, seed=1)
    for choice in generation.choices:
        ids = [9, 8, *choice.token_ids]
        logits = reference_logprobs(model, ids)[1:] / 0.7
        lowest_kept = logits.topk(5, -1).values[:, -1:]
        expected = torch.log_softmax(logits.masked_fill(logits < lowest_kept, -torch.inf), -1)
        picked = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
        assert torch.allclose(picked, torch.tensor(choice.logprobs), atol=1e-4)


def test_sampled_frequencies_are_the_models_probabilities(model: Any) -> None:
    # 20,000 draws of one token: total variation from the true distribution is below 0.06 with overwhelming odds.
    params = SamplingParams(max_tokens=1)
    generations = generate_batch(
        model.config.to_dict(), model.state_dict(), [[1, 2, 3]] * 20, params, n=1000, max_slots=1000, seed=0
    )
    drawn = torch.tensor([c.token_ids[0] for g in generations for c in g.choices])
    frequencies = torch.bincount(drawn, minlength=264) / len(drawn)
    with torch.no_grad():
        probabilities = torch.softmax(model(torch.tensor([[1, 2, 3]])).logits[0, -1], -1)
    assert 0.5 * (frequencies - probabilities).abs().sum() < 0.06


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "sliding_window": 0}, "at least itself"),
        ({"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}, "4 experts"),
        ({"model_type": "qwen3_moe"}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"num_key_value_heads": 3}, "groups"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        shape_from_config({**tiny_config().to_dict(), **change})
    assert "\n" not in str(caught.value)


def test_theta_is_read_from_old_configs_too() -> None:
    config = tiny_config().to_dict()
    del config["rope_parameters"]
    assert shape_from_config({**config, "rope_theta": 123.0}).layers[0].rope == Rope(123.0, original_max_positions=256)


def test_what_a_gemma_config_leaves_out_is_what_its_class_assumes() -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
    shape = shape_from_config({"model_type": "gemma3_text", **sizes, "num_hidden_layers": 6, "rope_scaling": None})
    assert [layer.window for layer in shape.layers] == [4096] * 5 + [None]
    assert [layer.rope.theta for layer in shape.layers if layer.rope] == [1e4] * 5 + [1e6]
    assert shape.head_size == 256
    assert shape.has_tied_embeddings
    assert shape.activation == "gelu_tanh"
    assert shape.attention_scale == 1 / 16


def test_weights_that_do_not_fit_are_refused(model: Any) -> None:
    config, state = model.config.to_dict(), model.state_dict()
    params = SamplingParams(max_tokens=1)
    with pytest.raises(UserError, match="lack"):
        generate_batch(config, {k: v for k, v in state.items() if "norm" not in k}, [[1]], params)
    with pytest.raises(UserError, match="no place"):
        generate_batch(config, {**state, "model.layers.0.extra.weight": torch.zeros(1)}, [[1]], params)
    with pytest.raises(UserError, match="shape"):
        generate_batch(config, {**state, "model.norm.weight": torch.zeros(3)}, [[1]], params)
    with pytest.raises(UserError, match="not finite"):
        generate_batch(config, {**state, "model.norm.weight": torch.full((32,), torch.nan)}, [[1]], params)
