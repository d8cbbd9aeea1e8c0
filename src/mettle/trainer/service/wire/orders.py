"""What a forward or forward_backward asks for, from either encoding; both are kept as one protobuf message.

Parts: `LossOrder`, `Datum`; `message_of_json`, `read_order`, `read_tokens`. Invariant: an order that is read is whole:
each array has a row for each token of its datum, and is finite; a complaint names the datum and the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mettle.errors import UserError
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import read_json_tensor, read_tensor, tensor_message

MAX_DATUMS: Final = 16_384
_MAX_TOKEN: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Datum:
    """`token_ids` [N] and the arrays of the loss, each [N] or [N, K]."""

    token_ids: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LossOrder:
    """One pass over the data of one model."""

    data: Sequence[Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    is_forward_only: bool


def message_of_json(body: Mapping[str, Any], part: str, *, is_forward_only: bool) -> messages.Message:
    """The message of a JSON request whose order stands under `part`. Raises: UserError."""
    order = body.get(part)
    if not isinstance(order, Mapping):
        raise UserError(f"{part}: an object with data and loss_fn is needed")
    found = messages.ForwardBackwardRequest(
        model_id=str(body["model_id"]), seq_id=int(body["seq_id"]), forward_only=is_forward_only
    )
    found.loss_fn = _text(order.get("loss_fn"), "loss_fn")
    for key, value in _mapping(order.get("loss_fn_config") or {}, "loss_fn_config").items():
        if isinstance(value, str):
            found.loss_fn_config_v2[key].text = value
        elif type(value) in (int, float):
            found.loss_fn_config_v2[key].number = float(value)
        else:
            raise UserError(f"loss_fn_config.{key}: {value!r} is neither a number nor a text")
    for place, datum in enumerate(_list(order.get("data"), "data")):
        where = f"data[{place}]"
        row = found.data.add()
        _read_json_chunks(_mapping(datum, where).get("model_input"), where, row)
        for name, tensor in _mapping(datum.get("loss_fn_inputs") or {}, where).items():
            row.loss_fn_inputs[name].CopyFrom(tensor_message(read_json_tensor(tensor, f"{where}.{name}")))
    return found


def read_order(request: messages.Message) -> LossOrder:
    """The order in a message. Raises: UserError."""
    if len(request.data) > MAX_DATUMS:
        raise UserError(f"data: {len(request.data):,} datums, at most {MAX_DATUMS:,} are taken in one request")
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    data = [_read_datum(datum, f"data[{place}]") for place, datum in enumerate(request.data)]
    return LossOrder(data, request.loss_fn, config, request.forward_only)


def read_tokens(model_input: object, name: str) -> list[int]:
    """The token ids of a JSON ModelInput. Raises: UserError."""
    chunks = _list(_mapping(model_input, name).get("chunks"), f"{name}.chunks")
    return [token for chunk in chunks for token in _json_tokens(chunk, name)]


def _read_datum(datum: messages.Message, where: str) -> Datum:
    pieces = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise UserError(f"{where}: this server trains on text; the input holds {kind or 'an empty chunk'}")
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise UserError(f"{where}: {len(data)} bytes are no whole number of int32 tokens")
        pieces.append(np.frombuffer(data, "<i4").astype(np.int64))
    token_ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    if not len(token_ids):
        raise UserError(f"{where}: the model input has no tokens")
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        array = read_tensor(tensor, f"{where}.{name}")
        if array.shape[0] != len(token_ids):
            raise UserError(f"{where}.{name}: {array.shape[0]} rows for {len(token_ids)} tokens of input")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"{where}.{name}: a value is not finite")
        inputs[name] = array
    return Datum(token_ids, inputs)


def _read_json_chunks(model_input: object, where: str, row: messages.Message) -> None:
    for chunk in _list(_mapping(model_input, where).get("chunks"), f"{where}.model_input.chunks"):
        row.model_input.add().encoded_text.tokens = np.array(_json_tokens(chunk, where), "<i4").tobytes()


def _json_tokens(chunk: object, where: str) -> list[int]:
    kind = _mapping(chunk, where).get("type", "encoded_text")
    if kind != "encoded_text":
        raise UserError(f"{where}: this server takes text; the input holds {str(kind)[:40]!r}")
    assert isinstance(chunk, Mapping)
    tokens = _list(chunk.get("tokens"), f"{where}.tokens")
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN for token in tokens):
        raise UserError(f"{where}: token ids are whole numbers from 0")
    return tokens


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{name}: an object is needed")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{name}: a list is needed")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name}: a text is needed")
    return value
