"""Results: the JSON form holds what the message holds."""

from __future__ import annotations

import numpy as np

from mettle.trainer.service.wire import messages
from mettle.trainer.service.wire.answers import (
    SampleAnswer,
    SampledText,
    json_loss_answer,
    json_sample_answer,
    loss_answer,
)


def test_logprobs_of_each_datum_come_back_in_order_and_shape():
    rows = [np.array([-1.0, -2.0]), np.array([-3.0]), np.array([[-4.0, -5.0]])]
    data = loss_answer(rows, {"loss:sum": 1.5})
    body = json_loss_answer(data)
    assert body["metrics"] == {"loss:sum": 1.5}
    assert [output["logprobs"]["data"] for output in body["loss_fn_outputs"]] == [[-1, -2], [-3], [-4, -5]]
    assert body["loss_fn_outputs"][2]["logprobs"]["shape"] == [1, 2]
    found = messages.parse(messages.ForwardBackwardOutput, data)
    assert [record.num_datums for record in found.loss_fn_outputs] == [2, 1]
    assert np.frombuffer(found.loss_fn_outputs[0].fields["logprobs"].offsets, "<i8").tolist() == [0, 8, 12]


def test_a_sample_has_all_that_was_asked_for():
    answer = SampleAnswer(
        [SampledText([1, 2], [-0.5, -0.25], True), SampledText([3], [-1.0], False, [[(3, -1.0), (4, -2.0)]])],
        prompt_logprobs=np.array([np.nan, -0.5]),
        prompt_alternatives=[None, [(7, -0.5)]],
        num_alternatives=2,
        target_logprobs=np.array([[-1.0, 0.0]]),
        drawn=(np.array([[5]]), np.array([[-0.5]])),
    )
    body = json_sample_answer(answer.encode())
    assert [sequence["tokens"] for sequence in body["sequences"]] == [[1, 2], [3]]
    assert [sequence["stop_reason"] for sequence in body["sequences"]] == ["stop", "length"]
    assert body["sequences"][1]["topk_logprobs"] == [[(3, -1.0), (4, -2.0)]]
    assert body["prompt_logprobs"] == [None, -0.5]
    assert body["topk_prompt_logprobs"] == [None, [(7, -0.5)]]
    assert body["target_prompt_logprobs"]["data"] == [-1.0, 0.0]
    assert body["prompt_alt_tokens"]["tokens"]["data"] == [5]


def test_nothing_that_was_not_asked_for_is_in_a_sample():
    assert set(json_sample_answer(SampleAnswer([SampledText([1], [-1.0], True)]).encode())) == {"type", "sequences"}
