"""Results as they travel: kept as protobuf, given out as that or as JSON, by what the client asks for.

Parts: `loss_answer` and `json_loss_answer`, `SampledText`, `SampleAnswer`, `json_sample_answer`. Invariant: both forms
of a result hold the same numbers, float32 as they were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.tensors import json_tensor, read_tensor, tensor_message

STOP, LENGTH = 0, 1
EMPTY_CELL: Final = (0, -99999.0)
Alternatives = Sequence[Sequence[tuple[int, float]] | None]
"""For each position its tokens and log-probabilities, sorted downwards; None where there are none."""


def loss_answer(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The result of a pass: `logprobs` has an array for each datum, [N] or all of them [N, K]."""
    found = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    # One record for each width: the client joins them in order.
    start = 0
    while start < len(logprobs):
        width = logprobs[start].shape[1:]
        end = start
        while end < len(logprobs) and logprobs[end].shape[1:] == width:
            end += 1
        arrays = [np.ascontiguousarray(array, "<f4") for array in logprobs[start:end]]
        record = found.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        column = record.fields["logprobs"]
        column.data = b"".join(array.tobytes() for array in arrays)
        column.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes()
        column.dtype = 1
        column.trailing_shape.extend(width)
        start = end
    return messages.encode(found)


def json_loss_answer(data: bytes) -> dict[str, Any]:
    """The same as JSON."""
    found = messages.parse(messages.ForwardBackwardOutput, data)
    outputs = []
    for record in found.loss_fn_outputs:
        column = record.fields["logprobs"]
        offsets = np.frombuffer(column.offsets, "<i8")
        for start, end in pairwise(offsets):
            array = np.frombuffer(column.data[start:end], "<f4").reshape(-1, *column.trailing_shape)
            outputs.append({"logprobs": json_tensor(array)})
    return {
        "loss_fn_output_type": found.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(found.metrics),
    }


@dataclass(frozen=True, slots=True)
class SampledText:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """All of a sample request. NaN in `prompt_logprobs` is a position without one."""

    sequences: Sequence[SampledText]
    prompt_logprobs: np.ndarray | None = None
    prompt_alternatives: Alternatives | None = None
    num_alternatives: int = 0
    target_logprobs: np.ndarray | None = None
    drawn: tuple[np.ndarray, np.ndarray] | None = None

    def encode(self) -> bytes:
        found = messages.SampleResponse()
        for text in self.sequences:
            sequence = found.sequences.add(stop_reason=STOP if text.is_stopped else LENGTH)
            sequence.tokens = np.array(text.token_ids, "<i4").tobytes()
            sequence.logprobs = np.array(text.logprobs, "<f4").tobytes()
            if text.alternatives is not None:
                width = max((len(row) for row in text.alternatives if row is not None), default=0)
                _put_alternatives(sequence.topk_sampled_logprobs, text.alternatives, width)
        if self.prompt_logprobs is not None:
            found.prompt_logprobs = np.ascontiguousarray(self.prompt_logprobs, "<f4").tobytes()
        if self.prompt_alternatives is not None:
            _put_alternatives(found.topk_prompt_logprobs, self.prompt_alternatives, self.num_alternatives)
        if self.target_logprobs is not None:
            found.target_prompt_logprobs.CopyFrom(tensor_message(self.target_logprobs.astype("<f4")))
        if self.drawn is not None:
            found.prompt_alt_tokens.tokens.CopyFrom(tensor_message(self.drawn[0].astype("<i8")))
            found.prompt_alt_tokens.logprobs.CopyFrom(tensor_message(self.drawn[1].astype("<f4")))
        return messages.encode(found)


def json_sample_answer(data: bytes) -> dict[str, Any]:
    """The same as JSON."""
    found = messages.parse(messages.SampleResponse, data)
    body: dict[str, Any] = {"type": "sample", "sequences": [_json_sequence(each) for each in found.sequences]}
    if found.prompt_logprobs:
        row = np.frombuffer(found.prompt_logprobs, "<f4")
        body["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in row]
    if found.HasField("topk_prompt_logprobs"):
        body["topk_prompt_logprobs"] = _read_alternatives(found.topk_prompt_logprobs)
    if found.HasField("target_prompt_logprobs"):
        body["target_prompt_logprobs"] = json_tensor(read_tensor(found.target_prompt_logprobs, "target"))
    if found.HasField("prompt_alt_tokens"):
        drawn = found.prompt_alt_tokens
        pair = {"tokens": drawn.tokens, "logprobs": drawn.logprobs}
        body["prompt_alt_tokens"] = {name: json_tensor(read_tensor(value, name)) for name, value in pair.items()}
    return body


def _json_sequence(sequence: messages.Message) -> dict[str, Any]:
    body = {
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
        "stop_reason": "stop" if sequence.stop_reason == STOP else "length",
    }
    if sequence.HasField("topk_sampled_logprobs"):
        body["topk_logprobs"] = _read_alternatives(sequence.topk_sampled_logprobs)
    return body


def _put_alternatives(into: messages.Message, rows: Alternatives, width: int) -> None:
    into.k, into.length = width, len(rows)
    cells = [[*(row or ()), *[EMPTY_CELL] * width][:width] for row in rows]
    into.token_ids = np.array([cell[0] for row in cells for cell in row], "<i4").tobytes()
    into.logprobs = np.array([cell[1] for row in cells for cell in row], "<f4").tobytes()


def _read_alternatives(found: messages.Message) -> list[list[tuple[int, float]] | None]:
    shape = (found.length, found.k)
    ids = np.frombuffer(found.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(found.logprobs, "<f4").reshape(shape).tolist()
    rows = [
        [(i, p) for i, p in zip(*pair, strict=True) if p > EMPTY_CELL[1]] for pair in zip(ids, logprobs, strict=True)
    ]
    return [row or None for row in rows]
