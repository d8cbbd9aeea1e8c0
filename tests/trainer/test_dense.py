"""The trainer's own network is transformers' to the last bit, where it stands in its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mettle.trainer.dense import DenseNetwork, dense_network
from mettle.trainer.loading import full_state, load_policy
from mettle.trainer.world import World

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 100.0, "pad_token_id": 7},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, a key for each query": {"model_type": "llama", "num_key_value_heads": 4},
    "mistral": {"model_type": "mistral", "sliding_window": None},
}
ALONE = World(0, 1, torch.device("cpu"))


def saved(folder: Path, **config: Any) -> Any:
    """A transformers model with random weights, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = AutoConfig.for_model(**{**SIZES, **config})
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    return model.train()


def passes() -> list[dict[str, Tensor]]:
    """Causal; one token; sequences behind each other; and a mask of its own with positions that start again."""
    ids = torch.arange(22).view(2, 11) * 7 % 61
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    mask[8:, 4:8] = False
    positions = torch.tensor([[*range(8), 4, 5, 6]] * 2)
    return [
        {"input_ids": ids},
        {"input_ids": ids[:1, :1]},
        {"input_ids": ids, "position_ids": torch.tensor([[*range(4), *range(5), 0, 1], [*range(11)]])},
        {"input_ids": ids, "position_ids": torch.arange(11)[None].expand(2, 11)},
        {"input_ids": ids, "position_ids": positions, "attention_mask": mask.expand(2, 1, 11, 11)},
    ]


def computed(network: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and every gradient of a scalar that depends on all of them."""
    network.zero_grad()
    logits = network.get_output_embeddings()(network.base_model(use_cache=False, **inputs).last_hidden_state)
    (logits.log_softmax(-1)[..., 0].sum() + logits.pow(2).mean()).backward()
    return logits.detach(), {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    theirs = saved(tmp_path, **KINDS[kind])
    ours = dense_network(tmp_path)
    assert ours is not None
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for inputs in passes():
        logits, gradients = computed(ours.train(), inputs)
        expected_logits, expected = computed(theirs, inputs)
        assert torch.equal(logits, expected_logits)
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_layers_that_are_computed_again_give_the_same_gradients(tmp_path: Path) -> None:
    saved(tmp_path, **KINDS["qwen3, tied"])
    policy = load_policy(tmp_path, ALONE, dtype=torch.float32)
    inputs = passes()[-1]
    _, whole = computed(policy.network, inputs)
    calls: list[int] = []
    body: Any = policy.network.base_model
    body.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    policy.checkpoint_activations(True)
    _, again = computed(policy.network, inputs)
    assert len(calls) == 2
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_published_weights_have_the_names_of_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved(tmp_path, **KINDS["qwen3, tied"])
    policy = load_policy(tmp_path, ALONE, dtype=torch.float32)
    assert isinstance(policy.network, DenseNetwork)
    state, files = full_state(policy), load_file(tmp_path / "model.safetensors")
    assert state.keys() == files.keys()
    assert all(torch.equal(state[name], files[name]) for name in files)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"model_type": "mistral", "sliding_window": 4},
        {"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"model_type": "llama", "attention_dropout": 0.1},
        {"model_type": "llama", "hidden_act": "gelu_pytorch_tanh"},
        {"model_type": "olmo2"},
    ],
    ids=["windows", "a window", "scaled positions", "dropout", "another activation", "another family"],
)
def test_what_is_not_computed_here_is_left_to_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    saved(tmp_path, **config)
    assert dense_network(tmp_path) is None
    assert not isinstance(load_policy(tmp_path, ALONE, dtype=torch.float32).network, DenseNetwork)


def test_a_base_under_adapters_and_other_names_in_the_files_are_left_to_transformers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, **KINDS["qwen2"])
    frozen = load_policy(tmp_path, ALONE, dtype=torch.float32, is_frozen=True)
    assert not isinstance(frozen.network, DenseNetwork)
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.gamma"] = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert dense_network(tmp_path) is None


def test_a_step_of_one_process_imports_no_compiler_no_sympy_and_no_transformers(tmp_path: Path) -> None:
    saved(tmp_path, **KINDS["qwen3, tied"])
    program = """
import sys
from pathlib import Path
import mettle.trainer.process, torch
from mettle.trainer.loading import load_policy
from mettle.trainer.tenant import OptimParams
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.world import World
world = World(0, 1, torch.device("cpu"))
learner = Learner(load_policy(Path(sys.argv[1]), world, dtype=torch.float32), Recipe(), world)
body = learner.policy.network.base_model
body(torch.arange(5)[None]).last_hidden_state.sum().backward()
learner.step(OptimParams(1e-3, (0.9, 0.99), 1e-8, 0.0, 1.0))
print(*sorted({"torch._dynamo", "sympy", "transformers", "torch.distributed.tensor"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.split() == []
