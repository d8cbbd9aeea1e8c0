"""The network of the commonest families, trained without transformers: plain llama, mistral, qwen2 and qwen3.

transformers' modelling files cost a process two to three seconds of a processor before its first step (they bring
torch's compiler and sympy with them), and some hundred Python calls a layer. What is here has the names of its modules,
computes what they compute in their order, and stands in their place where one process on a CPU trains all weights;
several ranks, GPUs, adapters and every other model are transformers'.

Parts: `dense_network` (None where transformers has to), `DenseNetwork`. Invariant: logits and gradients are those of
transformers' network to the last bit, which `tests/trainer/test_dense.py` holds for each family.
Legend: B rows, T columns, H hidden size, N heads, K key heads, D head size.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mettle.errors import UserError
from mettle.inference.engine.architecture import ModelShape, read_config, shape_from_config
from mettle.inference.engine.weights import read_state

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
HEAD = "lm_head.weight"


class NetworkConfig(SimpleNamespace):
    """What stands in a model's config.json, as attributes."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class BodyOutput(NamedTuple):
    """What transformers' networks answer with, as far as it is asked for: [B, T, H]."""

    last_hidden_state: Tensor


class LogitsOutput(NamedTuple):
    """[B, T, V]."""

    logits: Tensor


class UnfilledLinear(nn.Linear):
    """Without random weights: they are read. (On "meta", torch would import its compiler to draw them.)"""

    def reset_parameters(self) -> None:
        return


class UnfilledEmbedding(nn.Embedding):
    """The same of an embedding."""

    def reset_parameters(self) -> None:
        return


class RootNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(inputs.dtype)


class GatedMlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner, hidden, bias = shape.intermediate_size, shape.hidden_size, shape.has_mlp_bias
        self.gate_proj = UnfilledLinear(hidden, inner, bias=bias)
        self.up_proj = UnfilledLinear(hidden, inner, bias=bias)
        self.down_proj = UnfilledLinear(inner, hidden, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs))
        return made


class RotaryAttention(nn.Module):
    """Grouped queries with rotary positions; causal, or as a mask [B, 1, T, T] says."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, bias = shape.hidden_size, shape.has_qkv_bias
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.head_size, self.num_shared = shape.head_size, shape.num_heads // shape.num_kv_heads
        self.q_proj = UnfilledLinear(hidden, queries, bias=bias)
        self.k_proj = UnfilledLinear(hidden, keys, bias=bias)
        self.v_proj = UnfilledLinear(hidden, keys, bias=bias)
        self.o_proj = UnfilledLinear(queries, hidden, bias=shape.has_output_bias)
        self.has_norms = shape.qk_norm == "head"
        if self.has_norms:
            self.q_norm = RootNorm(shape.head_size, shape.norm_eps)
            self.k_norm = RootNorm(shape.head_size, shape.norm_eps)

    def forward(self, inputs: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        heads = (*inputs.shape[:-1], -1, self.head_size)
        # The order in which they are made is that in which the backward pass adds their gradients up, reversed.
        queries = self.q_proj(inputs).view(heads)
        if self.has_norms:
            queries = self.q_norm(queries)
        keys = self.k_proj(inputs).view(heads)
        if self.has_norms:
            keys = self.k_norm(keys)
        # [B, T, N, D] to [B, N, T, D]
        queries, keys = _rotated(queries.transpose(1, 2), cos, sin), _rotated(keys.transpose(1, 2), cos, sin)
        values = self.v_proj(inputs).view(heads).transpose(1, 2)
        is_grouped = self.num_shared > 1
        if is_grouped and mask is not None:  # with a mask, torch's kernel wants a key for each query
            keys, values, is_grouped = _repeated(keys, self.num_shared), _repeated(values, self.num_shared), False
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None and inputs.shape[1] > 1,
            scale=self.head_size**-0.5,
            enable_gqa=is_grouped,
        )
        made: Tensor = self.o_proj(attended.transpose(1, 2).contiguous().flatten(2))
        return made


class DenseLayer(nn.Module):
    """Attention and MLP, each after a norm and added to what went in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = RootNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RootNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        made: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return made


class DenseBody(nn.Module):
    """Token ids [B, T] to the last hidden states."""

    def __init__(self, shape: ModelShape, theta: float, padding_id: int | None) -> None:
        super().__init__()
        # The padding's vector gets no gradient as an input, though it does as a row of a tied head.
        self.embed_tokens = UnfilledEmbedding(shape.vocab_size, shape.hidden_size, padding_id)
        self.layers = nn.ModuleList([DenseLayer(shape) for _ in shape.layers])
        self.norm = RootNorm(shape.hidden_size, shape.norm_eps)
        self.is_checkpointing = False
        with torch.device("cpu"):  # not stored, so not filled by what is read
            powers = torch.arange(0, shape.head_size, 2, dtype=torch.float) / shape.head_size
            self.inv_freq = nn.Buffer(1.0 / (theta**powers), persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        use_cache: bool = False,
    ) -> BodyOutput:
        """`attention_mask` [B, 1, T, T] is True where a token may look; without it, at what is before it, up to where
        positions start again."""
        assert not use_cache, "what is trained has no cache"
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        elif attention_mask is None:
            attention_mask = _packed_mask(position_ids)
        with torch.no_grad():
            angles = position_ids[..., None].float() * self.inv_freq
            both = torch.cat((angles, angles), -1)[:, None]  # [B, 1, T, D]
            cos, sin = both.cos().to(hidden.dtype), both.sin().to(hidden.dtype)
        for layer in self.layers:
            if self.is_checkpointing and self.training:
                hidden = checkpoint(layer, hidden, cos, sin, attention_mask, use_reentrant=False)
            else:
                hidden = layer(hidden, cos, sin, attention_mask)
        return BodyOutput(self.norm(hidden))


class DenseNetwork(nn.Module):
    """Body and head. `config` has what stands in the model's config.json."""

    def __init__(self, config: NetworkConfig, shape: ModelShape, theta: float) -> None:
        super().__init__()
        self.config = config
        self.model = DenseBody(shape, theta, getattr(config, "pad_token_id", None))
        self.lm_head = UnfilledLinear(shape.hidden_size, shape.vocab_size, bias=False)
        self.all_tied_weights_keys = {HEAD: "model.embed_tokens.weight"} if shape.has_tied_embeddings else {}

    def forward(self, input_ids: Tensor) -> LogitsOutput:
        """Logits of whole sequences. What is trained goes through the body, and the head only where it is asked."""
        return LogitsOutput(self.lm_head(self.model(input_ids).last_hidden_state))

    @property
    def base_model(self) -> DenseBody:
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def activation_checkpointing_enable(self, _: Any = None) -> None:
        self.model.is_checkpointing = True

    def activation_checkpointing_disable(self) -> None:
        self.model.is_checkpointing = False


def dense_network(folder: Path) -> DenseNetwork | None:
    """The network of a model directory on the CPU, in float32; None where it is for transformers.

    Raises: UserError when the directory holds no model, or damaged files.
    """
    config = read_config(folder)
    theta = _theta_of(config)
    if theta is None:
        return None
    shape = shape_from_config(config)
    told = {"head_dim": shape.head_size, "num_key_value_heads": shape.num_kv_heads}
    kinds = ["full_attention"] * shape.num_layers
    about = {**config, **told, "layer_types": kinds, "tie_word_embeddings": shape.has_tied_embeddings}
    with torch.device("meta"):
        network = DenseNetwork(NetworkConfig(**about), shape, theta)
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in read_state(folder).items()}
    if shape.has_tied_embeddings:
        state.pop(HEAD, None)
    wanted = {name: parameter.shape for name, parameter in network.named_parameters()}
    if shape.has_tied_embeddings:
        del wanted[HEAD]
    if {name: tensor.shape for name, tensor in state.items()} != wanted:
        return None  # transformers knows older names, and says what is missing
    network.load_state_dict(state, strict=False, assign=True)
    if shape.has_tied_embeddings:
        network.lm_head.weight = network.model.embed_tokens.weight
    return network


def _theta_of(config: dict[str, Any]) -> float | None:
    """The base of the rotary positions of a model that is plain in all that families and configs can differ in."""
    if config.get("model_type") not in FAMILIES or config.get("attention_dropout"):
        return None
    try:
        shape = shape_from_config(config)
    except UserError:
        return None
    ropes = {layer.rope for layer in shape.layers}
    rope = next(iter(ropes))
    is_plain = len(ropes) == 1 and rope is not None and rope.kind == "default" and shape.windows == {None}
    return rope.theta if is_plain and rope is not None and shape.activation == "silu" else None


def _packed_mask(positions_BT: Tensor) -> Tensor | None:
    """[B, 1, T, T] for rows in which positions start again: each sequence sees itself alone. None where none do."""
    starts = torch.diff(positions_BT, prepend=positions_BT[:, :1] - 1) != 1
    if not starts.any():
        return None
    which = starts.cumsum(-1)
    width = positions_BT.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=positions_BT.device).tril()
    return ((which[:, :, None] == which[:, None, :]) & causal)[:, None]


def _rotated(heads_BNTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (heads_BNTD * cos) + (_turned(heads_BNTD) * sin)


def _turned(heads_BNTD: Tensor) -> Tensor:
    half = heads_BNTD.shape[-1] // 2
    return torch.cat((-heads_BNTD[..., half:], heads_BNTD[..., :half]), -1)


def _repeated(heads_BKTD: Tensor, times: int) -> Tensor:
    """[B, N, T, D]: each key head as often as queries share it."""
    rows, num_heads, width, size = heads_BKTD.shape
    return heads_BKTD[:, :, None].expand(rows, num_heads, times, width, size).reshape(rows, -1, width, size)
