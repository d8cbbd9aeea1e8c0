"""Any causal language model of transformers, computed by its own forward over the engine's keys and values.

transformers lets a function of ours stand for attention in its models. It takes the rows' queries, keys and values to
the engine's own attention, so that such a model has the same cache, batches and prefixes as one that the engine
computes itself; it is slower, for nothing is fused. What a model asks of attention (windows, scales) is seen by running
it once, and its log-probabilities are then compared with those of transformers' own attention.

Invariants: a model for which the two differ is refused; on a CPU a row's numbers do not depend on the others, as long
as the model itself computes row by row.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from mettle.errors import UserError
from mettle.inference.engine.adapters import RowsOfAdapters
from mettle.inference.engine.architecture import LayerShape, ModelShape
from mettle.inference.engine.attention import Attend
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.matrices import with_rows

_NAME: Final = "mettle_engine"
_CHECK_LENGTHS: Final = (19, 11)
_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_LENGTH_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """What a layer's attention was asked when the model ran once."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None


class _Current(threading.local):
    """What attention does in this thread: record its calls, or attend by the engine's keys and values."""

    calls: list[_AttentionCall] | None = None
    decoder: TransformersDecoder | None = None
    attend: Attend | None = None


_current = _Current()


class TransformersDecoder(Decoder):
    """A decoder that is a model of transformers. Made by `of_state`."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, calls: list[_AttentionCall]) -> None:
        self.shape = shape
        self.device, self.dtype = model.device, model.dtype
        self._model = model
        scales = [call.scale * math.sqrt(shape.head_size) for call in calls]
        self._scales = [1.0 if abs(scale - 1.0) < 1e-6 else scale for scale in scales]
        self._numbers = {id(call.module): number for number, call in enumerate(calls)}
        self._has_plain_head = True
        self._leaves_out_rows = False  # their last layer computes every row

    @classmethod
    def of_state(
        cls, config: Mapping[str, Any], state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> TransformersDecoder:
        """The model of a Hugging Face config (as a dict) with the weights in `state`, which are copied.

        Raises: UserError when transformers has no such model, it cannot be run so, or the weights do not fit.
        """
        try:
            model = _load(config, state, dtype).to(device).eval()
            decoder = cls._of_model(model)
        except UserError:
            raise
        except Exception as error:  # the boundary to code that may raise anything, as configs may say anything
            first = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"transformers cannot compute it: {type(error).__name__}: {first}") from error
        return decoder

    @property
    def forward_of(self) -> str:
        """Whose forward pass it is."""
        return "transformers"

    @property
    def num_parameters(self) -> int:
        """Weights of the model, tied ones once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def with_state(self, state: Mapping[str, Tensor]) -> TransformersDecoder:
        """A decoder of the same model with other weights. Raises: UserError when they do not fit."""
        return self.of_state(self._model.config.to_dict(), state, self.device, self.dtype)

    def forward(
        self,
        token_ids_R: Tensor,
        positions_R: Tensor,
        attend: Attend,
        adapters: object = (),
        routes: list[Tensor] | None = None,
        asked: object = None,
    ) -> Tensor:
        """Hidden states [R, D], or logits [R, V] of a model whose head is more than a product."""
        assert asked is None, "every row is computed here"
        assert routes is None, "experts are recorded of models that the engine computes itself"
        assert not adapters, "adapters are fitted to models that the engine computes itself"
        _current.decoder, _current.attend = self, attend
        try:
            inputs = {"input_ids": with_rows(token_ids_R)[None], "position_ids": with_rows(positions_R)[None]}
            if self._has_plain_head:
                found: Tensor = self._model.base_model(**inputs, use_cache=False).last_hidden_state
            else:
                found = self._model(**inputs, use_cache=False).logits
            return found[0, : len(token_ids_R)]
        finally:
            _current.decoder = _current.attend = None

    def logits(self, hidden: Tensor, adapters: Sequence[RowsOfAdapters] = ()) -> Tensor:
        """Logits [R, V] in float32."""
        assert not adapters, "no adapters are served by row here"
        if not self._has_plain_head:
            return hidden.float()
        head: nn.Module = self._model.get_output_embeddings()
        found: Tensor = head(with_rows(hidden))[: len(hidden)]
        return found.float()

    def attended(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend: Attend) -> Tensor:
        """What the rows of one layer attended to, [1, R, H, E]; queries, keys and values are [1, heads, R, E]."""
        number = self._numbers[id(module)]
        if self._scales[number] != 1.0:
            query = query * self._scales[number]
        heads_RHE = torch.cat([query, key, value], 1)[0].transpose(0, 1)
        return with_rows(attend(number, heads_RHE)).view(1, len(heads_RHE), query.shape[1], -1)

    @classmethod
    @torch.inference_mode()
    def _of_model(cls, model: PreTrainedModel) -> TransformersDecoder:
        generator = torch.Generator().manual_seed(0)
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        prompts = [torch.randint(0, vocab_size, (n,), generator=generator).to(model.device) for n in _CHECK_LENGTHS]
        model.set_attn_implementation("eager")
        expected = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in prompts]
        model.set_attn_implementation(_NAME)
        _current.calls = []
        try:
            model(input_ids=prompts[0][None], use_cache=False)
            calls = _current.calls
        finally:
            _current.calls = None
        decoder = cls(model, _shape_of(model, calls, int(expected[0].shape[-1])), calls)
        if not decoder._agrees(prompts, expected):
            decoder._has_plain_head = False
            if not decoder._agrees(prompts, expected):
                what = f"model type {model.config.model_type!r} does more to attention than the engine's own can"
                raise UserError(f"{what}: its log-probabilities would be wrong")
        return decoder

    def _agrees(self, prompts: list[Tensor], expected: list[Tensor]) -> bool:
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        hidden_NPD = self.prefill(padded)
        for hidden, logits in zip(hidden_NPD, expected, strict=True):
            ours = torch.log_softmax(self.logits(hidden[: len(logits)]), -1)
            theirs = torch.log_softmax(logits.float(), -1)
            if ours.shape != theirs.shape or not (ours - theirs).abs().mean() <= _TOLERANCES[self.dtype]:
                return False
        return True


def _load(config: Mapping[str, Any], state: Mapping[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    settings = dict(config)
    found = AutoConfig.for_model(settings.pop("model_type"), **settings)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(found), None)
    if kind is None:
        raise UserError(f"model type {found.model_type!r} is no causal language model")
    copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in state.items()}
    with _no_progress_bar():
        model, told = kind.from_pretrained(None, config=found, state_dict=copies, dtype=dtype, output_loading_info=True)
    for what in ("missing", "unexpected", "mismatched"):
        if odd := told[f"{what}_keys"]:
            raise UserError(f"{len(odd)} tensors are {what} in the weights, {min(map(str, odd))} among them")
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        raise UserError("the weights hold values that are not finite")
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _shape_of(model: PreTrainedModel, calls: list[_AttentionCall], vocab_size: int) -> ModelShape:
    config: Any = model.config
    if not calls or len({(call.num_heads, call.num_kv_heads, call.head_size) for call in calls}) != 1:
        raise UserError(f"model type {config.model_type!r} has attention that cannot be served by the engine's own")
    lengths = [int(value) for name in _LENGTH_FIELDS if (value := getattr(config, name, None))]
    first = calls[0]
    hidden_size = int(model.get_input_embeddings().weight.shape[1])
    return ModelShape(
        model_type=str(config.model_type),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        layers=tuple(LayerShape(None, call.window) for call in calls),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        norm_eps=0.0,
        max_positions=min(lengths, default=2048),
        activation="silu",
        norms="before",
        qk_norm="none",
        experts=None,
        attention_scale=None,
        embedding_scale=1.0,
        logit_cap=None,
        has_offset_norms=False,
        has_tied_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What stands for attention in models of transformers that run here."""
    if _current.calls is not None:
        if softcap is not None or value.shape != key.shape:
            raise UserError("its attention has a cap, or values of another size than its keys")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        sizes = query.shape[1], key.shape[1], query.shape[-1]
        _current.calls.append(_AttentionCall(module, *sizes, scale, sliding_window))
        return query.transpose(1, 2).contiguous(), None
    assert _current.decoder is not None, "the engine's attention is for decoders"
    assert _current.attend is not None, "a decoder attends to something"
    return _current.decoder.attended(module, query, key, value, _current.attend), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The engine's own attention knows what each row may see."""


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _no_mask)
