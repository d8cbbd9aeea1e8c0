"""Models outside of the engine's families: transformers' own forward over the engine's cache, or one line saying why not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import SIZES
from policies import make_model, picked_logprobs, publish, save_adapter, save_policy
from transformers import (
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
)

from mettle.errors import UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.embedded import start_engine
from mettle.inference.engine.local import generate_batch
from mettle.inference.engine.protocol import Choice, WeightsRejected
from mettle.records.sampling import SamplingParams

IDS = {"bos_token_id": 1, "eos_token_id": 257, "pad_token_id": 0}
PROMPTS = [[1, 2, 3], [5] * 40, [7], [1, 2, 3]]
GPT2 = GPT2Config(vocab_size=264, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, **IDS)
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2,
    "phi": PhiConfig(**{**SIZES, "num_key_value_heads": 4}, **IDS),
    "gpt_neox": GPTNeoXConfig(**SIZES, **IDS),
    "phi3 with a window": Phi3Config(**SIZES, **IDS, sliding_window=9),
    "cohere, whose head does more than a product": CohereConfig(**SIZES, **IDS, logit_scale=0.3),
    "mixtral": MixtralConfig(**SIZES, **IDS, num_local_experts=4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_and_greedy_tokens_agree_with_transformers(name: str) -> None:
    model = make_model(CONFIGS[name])
    config, state = model.config.to_dict(), model.state_dict()
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = []
    for prompt, generation in zip(PROMPTS, generate_batch(config, state, PROMPTS, params, n=2, seed=0), strict=True):
        for choice in generation.choices:
            expected = picked_logprobs(model, [*prompt, *choice.token_ids])[len(prompt) - 1 :]
            found.append((expected - torch.tensor(choice.logprobs)).abs())
    assert torch.cat(found).mean() <= 1e-5
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    (generation,) = generate_batch(config, state, [[1, 2, 3]], greedy)
    ids = [1, 2, 3]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generation.choices[0].token_ids == ids[3:]


@pytest.mark.parametrize("name", ["gpt2", "phi3 with a window"])
def test_company_in_the_batch_changes_no_bit(name: str) -> None:
    model = make_model(CONFIGS[name])
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)

    def sample(prompts: list[list[int]]) -> Choice:
        return generate_batch(model.config.to_dict(), model.state_dict(), prompts, params)[0].choices[0]

    alone = sample([[5] * 18])
    for company in ([[9, 8]], [[7] * 30, [1]], [[3] * 19, *([i] for i in range(20))]):
        together = sample([[5] * 18, *company])
        assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FalconConfig(vocab_size=264, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **IDS), "attention"),
        (Gemma2Config(**SIZES, head_dim=16, **IDS), "cap"),
        (GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, **IDS), "would be wrong"),
    ],
)
def test_a_model_that_would_be_computed_wrong_is_refused_in_one_line(config: Any, message: str) -> None:
    model = make_model(config)
    with pytest.raises(UserError, match=message) as caught:
        generate_batch(config.to_dict(), model.state_dict(), [[1]], SamplingParams(max_tokens=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nothing-of-the-kind"}, "nothing-of-the-kind"),
        ({"model_type": None}, "None"),
        ({"n_head": 5}, "gpt2"),
        ({"n_layer": 3}, "missing"),
    ],
)
def test_what_neither_computes_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    model = make_model(GPT2)
    with pytest.raises(UserError, match=message) as caught:
        generate_batch({**GPT2.to_dict(), **change}, model.state_dict(), [[1]], SamplingParams(max_tokens=1))
    assert "\n" not in str(caught.value)


def test_an_engine_says_whose_forward_it_is_takes_updates_and_refuses_adapters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_policy(make_model(GPT2), tmp_path / "policy")
    with caplog.at_level(logging.WARNING):
        engine = start_engine(InferenceConfig(model=folder, max_slots=4))
    assert "slower" in caplog.text
    try:
        assert (engine.status().forward_of, engine.status().max_model_len) == ("transformers", 128)
        newer = make_model(GPT2, seed=1)
        update = engine.update_weights(publish(newer, tmp_path / "run", 1), 1)
        assert update.canary is not None
        assert update.canary.mean_abs_diff < 1e-5
        with pytest.raises(WeightsRejected, match="tensors are missing"):
            engine.update_weights(
                publish(make_model(GPT2Config(**{**GPT2.to_dict(), "n_layer": 1})), tmp_path / "x", 2), 2
            )
        with pytest.raises(WeightsRejected, match="no adapters are served of 'gpt2'"):
            engine.load_adapter("a", save_adapter(newer, tmp_path / "a"))
    finally:
        engine.close()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "scale_attn_weights": False}))
    with pytest.raises(UserError, match="max_model_len is 129"):
        start_engine(InferenceConfig(model=folder, max_model_len=129))
