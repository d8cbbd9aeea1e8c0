"""Reading `config.json`: the shape of a Llama, Qwen2 or Qwen3 decoder, or one line saying why it is not served.

No torch here. Invariant: a model whose config says anything that the decoder would not compute is refused, for a model
computed approximately gives log-probabilities that are silently wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.errors import UserError

MODEL_TYPES = ("qwen3", "qwen2", "llama")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. `kind` is default, linear or llama3; the factors belong to the last two."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a pre-norm decoder with rotary positions, grouped queries and a gated SiLU MLP."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    rope: Rope
    max_positions: int
    has_tied_embeddings: bool
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool


def read_shape(folder: Path) -> ModelShape:
    """The shape in `folder/config.json`.

    Raises: UserError when there is no such file or the model is not one that is served.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a model directory: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    try:
        return shape_from_config(config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config (as a dict) describes."""
    model_type = str(config.get("model_type"))
    _refuse_unsupported(config, model_type)
    try:
        num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
        shape = ModelShape(
            model_type=model_type,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_size=int(config.get("head_dim") or hidden_size // num_heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            has_qk_norm=model_type == "qwen3",
            has_qkv_bias=model_type == "qwen2" or bool(config.get("attention_bias", False)),
            has_output_bias=model_type != "qwen2" and bool(config.get("attention_bias", False)),
            has_mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the model's config lacks or garbles a field: {error!r}") from error
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(f"{shape.num_heads} attention heads do not divide into {shape.num_kv_heads} groups")
    return shape


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    if model_type not in MODEL_TYPES:
        raise UserError(f"model type {model_type!r} is not served by the embedded engine; it serves {MODEL_TYPES}")
    if config.get("quantization_config"):
        raise UserError("quantized weights are not served by the embedded engine")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if config.get("use_sliding_window") or layer_types != {"full_attention"}:
        raise UserError("sliding-window attention is not served by the embedded engine")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"activation {config['hidden_act']!r} is not served by the embedded engine; silu is")


def _rope(config: Mapping[str, Any]) -> Rope:
    # transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
    settings: dict[str, Any] = dict(config.get("rope_scaling") or {})
    settings.update(config.get("rope_parameters") or {})
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rotary positions of type {kind!r} are not served; default, linear and llama3 are")
    if float(settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UserError("partial rotary positions are not served by the embedded engine")
    max_positions = config.get("max_position_embeddings", 8192)
    return Rope(
        theta=float(settings.get("rope_theta", config.get("rope_theta", 10_000.0))),
        kind=kind,
        factor=float(settings.get("factor", 1.0)),
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        original_max_positions=int(settings.get("original_max_position_embeddings", max_positions)),
    )
