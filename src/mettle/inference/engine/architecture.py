"""Reading `config.json`: the shape of a decoder of a family that is computed here, or one line saying why it is not.

No torch here. Invariant: a model whose config says anything that the decoder would not compute is refused, for a model
computed approximately gives log-probabilities that are silently wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mettle.errors import UserError
from mettle.inference.engine.families import FAMILIES, MODEL_TYPES, Family, Norms, QkNorm

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


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
class LayerShape:
    """In what one layer may differ from the next: a token sees `window` tokens, itself among them, or all before it."""

    rope: Rope | None
    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: each token goes through `per_token` of `count` small MLPs, whose shares may be made to sum to 1."""

    count: int
    per_token: int
    intermediate_size: int
    has_shares_of_one: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and switches of a decoder with rotary positions, grouped queries and a gated MLP."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerShape, ...]
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_positions: int
    activation: Activation
    norms: Norms
    qk_norm: QkNorm
    experts: Experts | None
    attention_scale: float | None
    embedding_scale: float
    logit_cap: float | None
    has_offset_norms: bool
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows that occur, None being none."""
        return frozenset(layer.window for layer in self.layers)


def read_config(folder: Path) -> dict[str, Any]:
    """What stands in `folder/config.json`.

    Raises: UserError when there is no such file or it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a model directory: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object")
    return config


def read_shape(folder: Path) -> ModelShape:
    """The shape in `folder/config.json`.

    Raises: UserError when there is no such file or the model is not one that is served.
    """
    config = read_config(folder)
    try:
        return shape_from_config(config)
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from error


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config (as a dict) describes."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UserError(f"model type {model_type!r} is not served by the embedded engine; it serves {MODEL_TYPES}")
    family = FAMILIES[model_type]
    config = {**family.defaults, **config}
    _refuse_unsupported(config, family)
    try:
        shape = _shape(config, family, model_type)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the model's config lacks or garbles a field: {error!r}") from error
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(f"{shape.num_heads} attention heads do not divide into {shape.num_kv_heads} groups")
    return shape


def _shape(config: Mapping[str, Any], family: Family, model_type: str) -> ModelShape:
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    has_bias = family.has_attention_bias_field and bool(config.get("attention_bias", False))
    scalar, cap = config.get("query_pre_attn_scalar"), config.get("final_logit_softcapping")
    return ModelShape(
        model_type=model_type,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        layers=_layers(config, family),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_size=int(config.get("head_dim") or hidden_size // num_heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        activation=_ACTIVATIONS[_activation(config)],
        norms=family.norms,
        qk_norm=family.qk_norm,
        experts=_experts(config) if family.has_experts else None,
        attention_scale=None if scalar is None else float(scalar) ** -0.5,
        embedding_scale=math.sqrt(hidden_size) if family.has_scaled_embeddings else 1.0,
        logit_cap=None if cap is None else float(cap),
        has_offset_norms=family.has_offset_norms,
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=family.has_fixed_qkv_bias or has_bias,
        has_output_bias=has_bias and not family.has_fixed_qkv_bias,
        has_mlp_bias=family.has_mlp_bias_field and bool(config.get("mlp_bias", False)),
    )


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    if config.get("quantization_config"):
        raise UserError("quantized weights are not served by the embedded engine")
    kinds = {"full_attention"} if family.windows == "none" else {"full_attention", "sliding_attention"}
    odd = sorted(set(config.get("layer_types") or ()) - kinds)
    if odd:
        raise UserError(f"layers of type {odd[0]!r} are not served by the embedded engine in this family")
    if _activation(config) not in _ACTIVATIONS:
        served = " and ".join(_ACTIVATIONS)
        raise UserError(f"activation {_activation(config)!r} is not served by the embedded engine; {served} are")
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UserError(f"{name} is {config[name]!r}, which the embedded engine does not compute")


def _activation(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_activation") or config.get("hidden_act", "silu"))


def _layers(config: Mapping[str, Any], family: Family) -> tuple[LayerShape, ...]:
    count = int(config["num_hidden_layers"])
    is_rotated = _rotated_layers(config, count)
    windows = _windows(config, family, count, is_rotated)
    ropes = {name: _rope(config, family, name) for name in ("full_attention", "sliding_attention")}
    return tuple(
        LayerShape(
            rope=ropes["sliding_attention" if windows[i] else "full_attention"] if is_rotated[i] else None,
            window=windows[i],
            has_experts=family.has_experts and _is_sparse(config, i),
        )
        for i in range(count)
    )


def _rotated_layers(config: Mapping[str, Any], count: int) -> list[bool]:
    """Which layers have rotary positions; SmolLM3 leaves them out in every fourth one."""
    interval = config.get("no_rope_layer_interval")
    given = config.get("no_rope_layers")
    if given is not None and interval is not None:
        if len(given) < count:
            raise UserError(f"no_rope_layers names {len(given)} layers, the model has {count}")
        return [bool(given[i]) for i in range(count)]
    return [interval is None or (i + 1) % int(interval) != 0 for i in range(count)]


def _windows(config: Mapping[str, Any], family: Family, count: int, is_rotated: list[bool]) -> list[int | None]:
    is_on = not family.has_window_switch or bool(config.get("use_sliding_window", False))
    window = config.get("sliding_window") if is_on and family.windows != "none" else None
    if window is not None and int(window) < 1:
        raise UserError(f"sliding_window is {window}; a token sees at least itself")
    if family.windows != "by layer":
        return [None if window is None else int(window)] * count
    types = config.get("layer_types") or _default_layer_types(config, count, is_rotated, has_window=window is not None)
    if len(types) != count:
        raise UserError(f"layer_types names {len(types)} layers, the model has {count}")
    if "sliding_attention" in types and window is None:
        raise UserError("the config has sliding-window layers and no sliding_window")
    return [int(window) if window is not None and kind == "sliding_attention" else None for kind in types]


def _default_layer_types(
    config: Mapping[str, Any], count: int, is_rotated: list[bool], *, has_window: bool
) -> list[str]:
    if "sliding_window_pattern" in config:  # Gemma: every n-th layer sees everything
        slides = [(i + 1) % int(config["sliding_window_pattern"]) != 0 for i in range(count)]
    elif "no_rope_layer_interval" in config:  # SmolLM3: those without positions
        slides = [not rotated for rotated in is_rotated]
    else:  # Qwen: the upper ones
        slides = [i >= int(config.get("max_window_layers", 28)) for i in range(count)]
    return ["sliding_attention" if has_window and slide else "full_attention" for slide in slides]


def _experts(config: Mapping[str, Any]) -> Experts:
    count = int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
    per_token = int(config["num_experts_per_tok"])
    if not 1 <= per_token <= count:
        raise UserError(f"num_experts_per_tok is {per_token}, the model has {count} experts")
    return Experts(count, per_token, int(config["moe_intermediate_size"]), bool(config["norm_topk_prob"]))


def _is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    return layer not in (config["mlp_only_layers"] or ()) and (layer + 1) % int(config["decoder_sparse_step"]) == 0


def _rope(config: Mapping[str, Any], family: Family, layer_type: str) -> Rope:
    # transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`; where the two kinds of
    # layer have positions of their own, `rope_parameters` has a table for each and scaling is for the full ones.
    given = dict(config.get("rope_parameters") or {})
    settings: dict[str, Any] = dict(config.get("rope_scaling") or {})
    theta = config.get("rope_theta", 10_000.0)
    if family.has_rope_by_layer_type:
        if layer_type == "sliding_attention":
            settings, theta = {}, config["rope_local_base_freq"]
        given = dict(given.get(layer_type) or {})
    settings.update(given)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"rotary positions of type {kind!r} are not served; default, linear and llama3 are")
    if float(settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UserError("partial rotary positions are not served by the embedded engine")
    max_positions = config.get("max_position_embeddings", 8192)
    return Rope(
        theta=float(settings.get("rope_theta", theta)),
        kind=kind,
        factor=float(settings.get("factor", 1.0)),
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        original_max_positions=int(settings.get("original_max_position_embeddings", max_positions)),
    )
