"""Weights in the layout that the decoder multiplies with: q, k and v as one matrix, gate and up as another.

Built beside the weights in use and never from views of what was handed in, so that a trainer may go on changing its
parameters. Invariant: each tensor of the source is used exactly once, has the shape that the config promises, and is
finite; anything else is an error, since a tensor left out would be served as the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mettle.errors import UserError
from mettle.inference.engine.architecture import LayerShape, ModelShape
from mettle.inference.engine.broadcast import receive
from mettle.inference.engine.families import Norms
from mettle.inference.engine.matrices import Matrix

_NORM_NAMES: Mapping[Norms, tuple[str | None, str | None, str | None, str | None]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""A layer's norms: before attention, after it, before the MLP, after it. Checkpoints name them by their age."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """A gated MLP. D hidden, F intermediate: `gate_up` is [2F, D], `down` [D, F]."""

    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertMlps:
    """A mixture of C experts: `router` is [C, D], `gate_up` [C, 2F, D], `down` [C, D, F]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. D hidden, H heads, K kv heads, E head size; matrices are [outputs, inputs].

    `qk_norm` is [H + K, E]: the weights of the query heads' norm, then those of the key heads'. A norm that the family
    has not is None.
    """

    attention_norm: Tensor | None
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    attention_end_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: DenseMlp | ExpertMlps
    mlp_end_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """All weights of a model. `head` is of `embedding`'s numbers when the two are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Matrix
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """All numbers of the model, tied ones once."""
        return sum(_count_numbers(part) for part in (self.embedding, self.layers, self.norm)) + (
            0 if self.is_tied else self.head.num_parameters
        )

    @property
    def matrices(self) -> list[Matrix]:
        """Those that every row is multiplied with."""
        dense = [layer.mlp for layer in self.layers if isinstance(layer.mlp, DenseMlp)]
        attention = [matrix for layer in self.layers for matrix in (layer.qkv, layer.output)]
        return [*attention, *(matrix for mlp in dense for matrix in (mlp.gate_up, mlp.down)), self.head]


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder, by collective where the publisher of a version broadcasts it.

    Raises: UserError when there are none or one is damaged.
    """
    if (received := receive(folder)) is not None:
        return received
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no .safetensors file")
    state: dict[str, Tensor] = {}
    for path in files:
        try:
            state.update(load_file(str(path)))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    return state


def fuse(shape: ModelShape, state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> FusedWeights:
    """Copy a Hugging Face state dict into the fused layout.

    Raises: UserError when a tensor is missing, unknown, of another shape, or not finite.
    """
    source = _Source(shape, state, device, dtype)
    with torch.no_grad():
        embedding = source.take("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        layers = tuple(_fuse_layer(shape, kind, source, f"model.layers.{i}.") for i, kind in enumerate(shape.layers))
        norm = source.norm("model.norm.weight", shape.hidden_size)
        if shape.has_tied_embeddings:
            head = Matrix(embedding)
            source.ignore("lm_head.weight")
        else:
            head = Matrix(source.take("lm_head.weight", shape.vocab_size, shape.hidden_size))
    source.check_all_used()
    return FusedWeights(embedding, layers, norm, head, shape.has_tied_embeddings)


def _fuse_layer(shape: ModelShape, kind: LayerShape, source: _Source, prefix: str) -> LayerWeights:
    hidden = shape.hidden_size
    queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    attention = prefix + "self_attn."
    parts = ((attention + "q_proj", queries), (attention + "k_proj", keys), (attention + "v_proj", keys))
    names = _NORM_NAMES[shape.norms]
    norms = [None if name is None else source.norm(f"{prefix}{name}.weight", hidden) for name in names]
    return LayerWeights(
        attention_norm=norms[0],
        qkv=Matrix(torch.cat([source.take(name + ".weight", size, hidden) for name, size in parts])),
        qkv_bias=_cat_biases(source, parts) if shape.has_qkv_bias else None,
        qk_norm=_qk_norm(shape, source, attention),
        output=Matrix(source.take(attention + "o_proj.weight", hidden, queries)),
        output_bias=source.take(attention + "o_proj.bias", hidden) if shape.has_output_bias else None,
        attention_end_norm=norms[1],
        mlp_norm=norms[2],
        mlp=_fuse_experts(shape, source, prefix + "mlp.")
        if kind.has_experts
        else _fuse_mlp(shape, source, prefix + "mlp."),
        mlp_end_norm=norms[3],
    )


def _fuse_mlp(shape: ModelShape, source: _Source, mlp: str) -> DenseMlp:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    pair = ((mlp + "gate_proj", inner), (mlp + "up_proj", inner))
    return DenseMlp(
        gate_up=Matrix(torch.cat([source.take(name + ".weight", size, hidden) for name, size in pair])),
        gate_up_bias=_cat_biases(source, pair) if shape.has_mlp_bias else None,
        down=Matrix(source.take(mlp + "down_proj.weight", hidden, inner)),
        down_bias=source.take(mlp + "down_proj.bias", hidden) if shape.has_mlp_bias else None,
    )


def _fuse_experts(shape: ModelShape, source: _Source, mlp: str) -> ExpertMlps:
    assert shape.experts is not None, "a layer has experts only in a model that has them"
    hidden, inner, count = shape.hidden_size, shape.experts.intermediate_size, shape.experts.count
    router = source.take(mlp + "gate.weight", count, hidden)
    if source.has(mlp + "experts.gate_up_proj"):  # as a live model of transformers names them; files have each expert's
        gate_up = source.take(mlp + "experts.gate_up_proj", count, 2 * inner, hidden)
        return ExpertMlps(router, gate_up, source.take(mlp + "experts.down_proj", count, hidden, inner))
    gate_up = torch.stack(
        [
            torch.cat([source.take(f"{mlp}experts.{i}.{half}_proj.weight", inner, hidden) for half in ("gate", "up")])
            for i in range(count)
        ]
    )
    down = torch.stack([source.take(f"{mlp}experts.{i}.down_proj.weight", hidden, inner) for i in range(count)])
    return ExpertMlps(router, gate_up, down)


def _cat_biases(source: _Source, parts: tuple[tuple[str, int], ...]) -> Tensor:
    return torch.cat([source.take(name + ".bias", size) for name, size in parts])


def _qk_norm(shape: ModelShape, source: _Source, prefix: str) -> Tensor | None:
    if shape.qk_norm == "none":
        return None
    both = []
    for name, heads in (("q_norm.weight", shape.num_heads), ("k_norm.weight", shape.num_kv_heads)):
        if shape.qk_norm == "head":
            both.append(source.norm(prefix + name, shape.head_size).expand(heads, -1))
        else:
            both.append(source.norm(prefix + name, heads * shape.head_size).view(heads, -1))
    return torch.cat(both)


class _Source:
    """A state dict that notices what is missing, odd, or left over."""

    def __init__(
        self, shape: ModelShape, state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._state = state
        self._device, self._dtype = device, dtype
        self._left = {name for name in state if not name.endswith("rotary_emb.inv_freq")}
        self._model = shape.model_type
        self._norm_offset = 1.0 if shape.has_offset_norms else 0.0

    def has(self, name: str) -> bool:
        return name in self._state

    def norm(self, name: str, size: int) -> Tensor:
        """What a norm multiplies by."""
        weight = self.take(name, size)
        return weight + self._norm_offset if self._norm_offset else weight

    def take(self, name: str, *sizes: int) -> Tensor:
        if name not in self._state:
            raise UserError(f"the weights lack {name!r}, which the {self._model} config asks for")
        tensor = self._state[name].detach()
        if tuple(tensor.shape) != sizes:
            raise UserError(f"{name!r} has shape {tuple(tensor.shape)}, the config asks for {sizes}")
        self._left.discard(name)
        copy = tensor.to(device=self._device, dtype=self._dtype, copy=True, memory_format=torch.contiguous_format)
        if not bool(torch.isfinite(copy.sum())) and not bool(torch.isfinite(copy).all()):
            raise UserError(f"{name!r} holds values that are not finite")
        return copy

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def check_all_used(self) -> None:
        if self._left:
            some = sorted(self._left)[:3]
            raise UserError(f"{len(self._left)} tensors have no place in a {self._model} model, {some} among them")


def tokens_of_a_step(num_parameters: int) -> int:
    """How many tokens of prompts go into one step by default: those of about two seconds of a CPU core.

    Less would read large weights too often for too few rows; more would keep an abort and what runs waiting, and what a
    layer makes of more than 2,048 rows of even a small model leaves the cache before it is read.
    """
    return min(2048, max(128, int(2e11 / (2 * num_parameters)) // 32 * 32))


def _count_numbers(value: object) -> int:
    # In all tensors and matrices of a dataclass, in whatever it is made of.
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Matrix):
        return value.num_parameters
    if isinstance(value, tuple):
        return sum(_count_numbers(item) for item in value)
    return sum(_count_numbers(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0


@contextmanager
def inference_threads(num_threads: int) -> Iterator[None]:
    """Compute in the calling thread with `num_threads` for one operation; more than one only pays on idle cores."""
    before = torch.get_num_threads()
    if before != num_threads:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if before != num_threads:
            torch.set_num_threads(before)
