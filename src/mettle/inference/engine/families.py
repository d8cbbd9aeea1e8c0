"""The families of models that the decoder computes itself, and in what each differs from the others. No torch here.

All of them are decoders with rotary positions, grouped queries and a gated MLP; what is left to say is where the norms
stand, what is normed, which biases and windows there are, and what a config that is silent about a field means.
Invariant: a default here is the one of the family's own configuration class, for checkpoints leave out what they share
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Norms = Literal["before", "after", "around"]
"""Where the norms of a layer stand: before attention and MLP, after both, or on either side of each."""
QkNorm = Literal["none", "head", "projection"]
"""What of queries and keys is normed: nothing, each head by itself, or all heads of a token as one vector."""
Windows = Literal["none", "all", "by layer"]
"""Which layers see only a window: none can, all do when the config has one, or those of the config's `layer_types`."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of one `model_type` share."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms = "before"
    qk_norm: QkNorm = "none"
    windows: Windows = "none"
    has_window_switch: bool = False
    """Whether a window counts only when `use_sliding_window` says so."""
    has_fixed_qkv_bias: bool = False
    """Whether queries, keys and values always have a bias and the output never; else `attention_bias` says."""
    has_attention_bias_field: bool = True
    has_mlp_bias_field: bool = False
    has_offset_norms: bool = False
    """Whether a norm multiplies by 1 + its weight."""
    has_scaled_embeddings: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    has_rope_by_layer_type: bool = False
    has_experts: bool = False


FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(has_mlp_bias_field=True),
    "mistral": Family({"sliding_window": 4096}, windows="all", has_attention_bias_field=False),
    "qwen2": Family(windows="by layer", has_window_switch=True, has_fixed_qkv_bias=True),
    "qwen3": Family(qk_norm="head", windows="by layer", has_window_switch=True),
    "qwen3_moe": Family(
        {"num_experts_per_tok": 8, "decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": []},
        qk_norm="head",
        windows="all",
        has_window_switch=True,
        has_experts=True,
    ),
    "smollm3": Family(
        {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, "no_rope_layer_interval": 4},
        windows="by layer",
        has_window_switch=True,
        has_mlp_bias_field=True,
    ),
    "olmo2": Family({"rms_norm_eps": 1e-5}, norms="after", qk_norm="projection"),
    "gemma3_text": Family(
        {
            "tie_word_embeddings": True,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        norms="around",
        qk_norm="head",
        windows="by layer",
        has_offset_norms=True,
        has_scaled_embeddings=True,
        has_rope_by_layer_type=True,
    ),
}
MODEL_TYPES: Final = tuple(FAMILIES)
