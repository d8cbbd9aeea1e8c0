"""Small models of every family that the embedded engine computes itself."""

from __future__ import annotations

from typing import Any

from policies import tiny_config
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_theta": 10_000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FOUR_LAYERS = {"num_hidden_layers": 4}
SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 257, "pad_token_id": 0}
GEMMA: dict[str, Any] = {
    **FOUR_LAYERS,
    "head_dim": 16,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
MIXED_LAYERS = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": True}
CONFIGS = {
    "qwen3 tied": tiny_config(),
    "qwen3 untied": tiny_config(tie_word_embeddings=False),
    "qwen3 with attention bias": tiny_config(attention_bias=True),
    "qwen3 without grouped queries": tiny_config(num_key_value_heads=4),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama with stretched positions": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama with linear positions": LlamaConfig(
        **SIZES, rope_parameters={"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}
    ),
    "qwen2 with windows above": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=20, head_dim=16),
    "smollm3": SmolLM3Config(**{**SIZES, **FOUR_LAYERS}, **SPECIAL_IDS, mlp_bias=True),
    "smollm3 with windows": SmolLM3Config(
        **{**SIZES, **FOUR_LAYERS},
        **SPECIAL_IDS,
        use_sliding_window=True,
        sliding_window=7,
        no_rope_layers=[1, 0, 1, 0],
    ),
    "olmo2": Olmo2Config(**SIZES, **SPECIAL_IDS, attention_bias=True),
    "gemma3": Gemma3TextConfig(**{**SIZES, **GEMMA}),
    "gemma3 with a cap and stretched positions": Gemma3TextConfig(
        **{**SIZES, **GEMMA},
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe with dense layers": Qwen3MoeConfig(**{**SIZES, **FOUR_LAYERS}, **EXPERTS, **MIXED_LAYERS),
}
SERVED = (
    "mistral with a window",
    "smollm3 with windows",
    "olmo2",
    "gemma3 with a cap and stretched positions",
    "qwen3_moe with dense layers",
)
