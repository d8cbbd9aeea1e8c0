"""Orders: both encodings mean the same, and what does not add up is named."""

from __future__ import annotations

import numpy as np
import pytest

from mettle.errors import UserError
from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.orders import message_of_json, read_order, read_tokens
from mettle.trainer.service.wire.tensors import json_tensor


def json_body(**changes):
    inputs = {"target_tokens": json_tensor(np.array([2, 3])), "weights": json_tensor(np.array([0.5, -1.0], "f4"))}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": inputs}
    order = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 0.1, "loss_id": "x"}} | changes
    return {"model_id": "s:train:0", "seq_id": 1, "forward_backward_input": order}


def read(body, *, is_forward_only=False):
    message = message_of_json(body, "forward_backward_input", is_forward_only=is_forward_only)
    return read_order(messages.parse(messages.ForwardBackwardRequest, messages.encode(message)))


def test_an_order_in_json_is_the_order_of_its_message():
    order = read(json_body())
    assert (order.loss_fn, order.is_forward_only, order.config) == (
        "cross_entropy",
        False,
        {"beta": 0.1, "loss_id": "x"},
    )
    (datum,) = order.data
    assert datum.token_ids.tolist() == [1, 2]
    assert datum.inputs["target_tokens"].tolist() == [2, 3]
    assert datum.inputs["weights"].tolist() == [0.5, -1.0]
    assert read(json_body(), is_forward_only=True).is_forward_only


def datum_with(**changes):
    return json_body()["forward_backward_input"]["data"][0] | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_fn": 3}, "loss_fn"),
        ({"loss_fn_config": {"beta": [1]}}, "loss_fn_config.beta"),
        ({"data": 3}, "data: a list"),
        ({"data": [3]}, r"data\[0\]"),
        ({"data": [datum_with(model_input={"chunks": []})]}, "no tokens"),
        ({"data": [datum_with(model_input={"chunks": [{"type": "image", "data": ""}]})]}, "text"),
        ({"data": [datum_with(model_input={"chunks": [{"tokens": [-1]}]})]}, "token ids"),
        ({"data": [datum_with(model_input={"chunks": [{"tokens": [1]}]})]}, "2 rows for 1 tokens"),
        ({"data": [datum_with(loss_fn_inputs={"advantages": {"data": [1e999, 0], "dtype": "float32"}})]}, "finite"),
    ],
)
def test_what_does_not_add_up_is_named(changes, said):
    with pytest.raises(UserError, match=said):
        read(json_body(**changes))


def test_an_image_in_a_message_is_named():
    message = messages.ForwardBackwardRequest(data=[{"model_input": [{"image": {}}]}])
    with pytest.raises(UserError, match=r"data\[0\].*image"):
        read_order(message)


def test_tokens_of_a_prompt_are_its_chunks_end_to_end():
    assert read_tokens({"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]}, "prompt") == [1, 2, 3]
