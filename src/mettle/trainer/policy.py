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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from mettle.clients.byte_level import BYTE_OF_CHARACTER
from mettle.storage.files import folder_aside, write_atomic, write_json
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
        build_model(config).save_pretrained(scratch)
        write_json(scratch / "generation_config.json", {"eos_token_id": END_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID})
        write_tokenizer(scratch, max_positions=config.max_positions)
    return folder


def build_model(config: PolicyConfig) -> Qwen3ForCausalLM:
    """A freshly initialised model; leaves the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return Qwen3ForCausalLM(model_config(config)).to(torch.float32)


def model_config(config: PolicyConfig) -> Qwen3Config:
    """The transformers config of a policy."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        initializer_range=config.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        dtype="float32",
    )


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
