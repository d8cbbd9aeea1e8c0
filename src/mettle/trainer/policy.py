"""Makes the initial policy: a Hugging Face model directory with random weights, tokenizer and chat template.

Parts: the byte tokenizer (one id a byte, ids 0 to 255, then the special tokens of `presets`), the append-only chat
template, and a Qwen3 model. Invariant: the directory loads with transformers and vLLM, and the same config always gives
the same weights.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from mettle.clients.byte_level import BYTE_OF_CHARACTER
from mettle.inference.engine.architecture import shape_from_config
from mettle.storage.files import folder_aside, write_atomic, write_json
from mettle.trainer.dense import DenseBody, RootNorm
from mettle.trainer.presets import (
    END_TOKEN_ID,
    NUM_BYTES,
    PAD_TOKEN_ID,
    SPECIAL_TOKENS,
    THINK_TOKENS,
    VOCAB_SIZE,
    PolicyConfig,
)


def write_policy(folder: Path, config: PolicyConfig) -> Path:
    """Write the model directory of a new policy at `folder`, complete or not at all."""
    with folder_aside(folder) as scratch:
        save_file(initial_weights(config), scratch / "model.safetensors", {"format": "pt"})
        write_json(scratch / "config.json", model_config(config))
        write_json(scratch / "generation_config.json", {"eos_token_id": END_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID})
        write_tokenizer(scratch, max_positions=config.max_positions)
    return folder


def initial_weights(config: PolicyConfig) -> dict[str, Tensor]:
    """Those that transformers gives a new Qwen3 model, by the same draws; leaves the global random state as it was.

    It draws twice: torch's own weights when a module is made, and in their place those of the config's deviation.
    """
    body = DenseBody(shape_from_config(model_config(config)), config.rope_theta, PAD_TOKEN_ID)
    modules = [module for module in body.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(config.seed)
        for module in modules:
            kind: Any = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
            kind.reset_parameters(module)
        for module in modules:
            module.weight.normal_(0.0, config.init_std)
        body.embed_tokens.weight[PAD_TOKEN_ID] = 0.0
        for norm in (module for module in body.modules() if isinstance(module, RootNorm)):
            norm.weight.fill_(1.0)
    return {f"model.{name}": parameter.data for name, parameter in body.named_parameters()}


def model_config(config: PolicyConfig) -> dict[str, Any]:
    """The config.json of a policy, as transformers writes it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": END_TOKEN_ID,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.init_std,
        "intermediate_size": config.mlp_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": PAD_TOKEN_ID,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def write_tokenizer(folder: Path, *, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja into `folder`."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        **names,
    }
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", names)
    write_atomic(folder / "chat_template.jinja", chat_template().encode())


def chat_template() -> str:
    """Mettle's append-only chat template."""
    return resources.files("mettle.trainer").joinpath("chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer() -> Tokenizer:
    """A byte-level tokenizer in which byte b has the id b."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK_TOKENS])
    assert json.loads(tokenizer.to_str())["added_tokens"][0]["id"] == NUM_BYTES, "special tokens follow the bytes"
    return tokenizer
