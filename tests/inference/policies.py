"""Tiny policies on disk and the byte tokenizer that goes with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from mettle.inference.engine.adapter_files import read_adapter
from mettle.storage.weights import AdapterNotes, Canary, model_digest, publish_weights

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>"]
END = 257
TEMPLATE = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)


def tiny_config(**changes: Any) -> Qwen3Config:
    """A Qwen3 that samples something at once: two layers, grouped queries, weights large enough to have opinions."""
    settings: dict[str, Any] = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "eos_token_id": END,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    return Qwen3Config(**{**settings, **changes})


def make_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, norms and biases included, so that a swapped pair would be noticed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def reference_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T - 1, V] that transformers gives for the tokens after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def picked_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T - 1] of the tokens themselves."""
    return reference_logprobs(model, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def save_policy(model: PreTrainedModel, folder: Path) -> Path:
    """A model directory as the server takes it."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<|pad|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def publish(model: PreTrainedModel, root: Path, version: int, *, canary_offset: float = 0.0) -> Path:
    """Publish a model's weights with a canary that is off by `canary_offset`."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        state["lm_head.weight"] = model.state_dict()["lm_head.weight"]
    canary = canary_of(model, version, canary_offset)
    return Path(publish_weights(root, version, lambda path: save_file(state, str(path)), canary).path)


def publish_adapter(
    model: PreTrainedModel, folder: Path, base: Path, root: Path, version: int, *, canary_offset: float = 0.0
) -> Path:
    """Publish the adapter in a folder, with a canary of the model in `base` under it that is off by `canary_offset`."""
    notes = AdapterNotes(json.loads((folder / "adapter_config.json").read_text()), model_digest(base))
    canary = canary_of(with_adapter(model, folder), version, canary_offset)
    factors = (folder / "adapter_model.safetensors").read_bytes()

    def save(path: Path) -> None:
        path.write_bytes(factors)

    return Path(publish_weights(root, version, save, canary, adapter=notes).path)


def canary_of(model: PreTrainedModel, seed: int, offset: float) -> Canary:
    """Random tokens with a model's own log-probabilities, off by `offset`."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 256, size=(3, 12)).astype(np.int32)
    lengths = np.array([12, 7, 9], dtype=np.int32)
    logprobs = np.zeros(ids.shape, dtype=np.float32)
    for row, length in enumerate(lengths):
        picked = picked_logprobs(model, ids[row, :length].tolist())
        logprobs[row, 1:length] = picked.numpy() + offset
    return Canary(ids, lengths, logprobs)


ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A PEFT folder with random factors, large enough to change what is sampled. A mixture's experts are among the
    targets by their matrices' short names, as they stand in checkpoints.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, (outputs, inputs) in _matrices(model).items():
        if name.rpartition(".")[2] in targets:
            a = torch.randn(rank, inputs, generator=generator) * 0.3
            b = torch.randn(outputs, rank, generator=generator) * 0.3
            state[f"base_model.model.{name}.lora_A.weight"] = a
            state[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, str(folder / "adapter_model.safetensors"))
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    return folder


def with_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A copy of a model with an adapter's products added to its weights."""
    merged = copy.deepcopy(model)
    file = read_adapter(folder)
    with torch.no_grad():
        for name, pair in file.pairs.items():
            _matrix(merged, name).add_((pair.b @ pair.a) * file.scale)
    return merged


def _matrices(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a model's matrices by their names in checkpoints, where each expert has its own."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif name.endswith(".mlp.gate"):  # a mixture's router
            found[name] = tuple(module.weight.shape)
        elif name.endswith(".experts"):
            count, hidden, inner = module.down_proj.shape
            for expert in range(count):
                found[f"{name}.{expert}.gate_proj"] = found[f"{name}.{expert}.up_proj"] = (inner, hidden)
                found[f"{name}.{expert}.down_proj"] = (hidden, inner)
    return found


def _matrix(model: PreTrainedModel, name: str) -> torch.Tensor:
    owner, experts, place = name.partition(".experts.")
    if not experts:
        return model.get_submodule(name).weight
    module, (expert, _, kind) = model.get_submodule(f"{owner}.experts"), place.partition(".")
    if kind == "down_proj":
        return module.down_proj[int(expert)]
    return module.gate_up_proj[int(expert)].chunk(2)[["gate_proj", "up_proj"].index(kind)]
