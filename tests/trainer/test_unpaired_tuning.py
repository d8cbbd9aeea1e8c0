"""Tuning on judged answers: its gradient is autograd's, good and bad move apart, a kill costs nothing."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from tests.trainer.conftest import make_learner
from transformers import AutoModelForCausalLM

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import sha256_file
from mettle.trainer.unpaired import UnpairedLoss
from mettle.trainer.unpaired_tuning import (
    UnpairedTuning,
    read_judged,
    take_unpaired_step,
    tune_unpaired,
    with_strange_answers,
)

ROWS = [
    {"prompt": f"say {n}", "completion": "a" * (1 + n % 4) if n % 2 else "bb", "label": bool(n % 2)} for n in range(12)
]


@pytest.fixture
def rows(tmp_path):
    def write(*found):
        path = tmp_path / "judged.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    return write


def test_the_gradient_is_that_of_the_loss_written_out(mini_model, rows, monkeypatch):
    learner = make_learner(mini_model)
    judged = read_judged(rows(*ROWS), Renderer.from_directory(mini_model))[:5]
    strangers = with_strange_answers([each.answer for each in judged])
    reference = np.random.default_rng(0).normal(-20, 3, (2, 5))
    gradients = []
    monkeypatch.setattr(
        type(learner), "step",
        lambda self, params: gradients.append(torch.cat([p.grad.flatten() for p in self.policy.parameters()])) or {},
    )  # fmt: skip
    figures = take_unpaired_step(learner, UnpairedLoss(0.1, 1.0, 0.5), judged, strangers, reference, 1)
    network = AutoModelForCausalLM.from_pretrained(mini_model, attn_implementation="eager")

    def summed(answer):
        ids = torch.from_numpy(answer.token_ids).long()
        logprobs = torch.log_softmax(network(ids[None]).logits[0, :-1].float(), -1)
        return logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(answer.is_trained[1:])].sum()

    strange = sum(summed(answer).item() - r for answer, r in zip(strangers, reference[1], strict=True)) / 5
    z, losses = max(0.0, strange), []
    for each, r in zip(judged, reference[0], strict=True):
        reward = summed(each.answer) - r
        sign, weight = (1, 1.0) if each.is_good else (-1, 0.5)
        losses.append(weight * (1 - torch.sigmoid(0.1 * sign * (reward - z))))
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert figures["divergence"] == pytest.approx(z, rel=1e-4)
    (found,) = gradients
    assert torch.linalg.vector_norm(found - expected) <= 1e-4 * torch.linalg.vector_norm(expected)


class Killed(BaseException):
    """What a kill is to the code that it ends."""


def test_good_and_bad_move_apart_and_a_killed_tuning_goes_on_to_the_same_bytes(mini_model, rows, tmp_path):
    task = UnpairedTuning(
        rows(*ROWS), mini_model, tmp_path / "whole", None, lr=1e-2, epochs=5, batch_size=6, checkpoint_s=0.0
    )
    whole = tune_unpaired(task, lambda *_: None)
    assert (whole["answers"], whole["good"]) == (12, 6)
    assert whole["first"]["loss"] == pytest.approx(0.5, rel=1e-3)  # the reference is the model itself
    assert whole["last"]["loss"] < 0.9 * whole["first"]["loss"]
    assert whole["last"]["accuracy"] == 1.0
    again = dataclasses.replace(task, to=tmp_path / "killed")

    def kill(step, *_):
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        tune_unpaired(again, kill)
    assert {**tune_unpaired(again, lambda *_: None), "resumed_after": 0} == whole
    assert sha256_file(again.to / "model.safetensors") == sha256_file(task.to / "model.safetensors")


def test_pairs_are_two_answers_and_a_strange_answer_is_the_next_one_s(mini_model, rows):
    path = rows(*ROWS[:2], {"prompt": "say 9", "chosen": "aa", "rejected": "b"})
    renderer = Renderer.from_directory(mini_model)
    judged = read_judged(path, renderer)
    assert [each.is_good for each in judged] == [False, True, True, False]
    strange = with_strange_answers([each.answer for each in judged])
    assert renderer.decode(strange[0].token_ids.tolist()) == renderer.decode(
        judged[0].answer.token_ids.tolist()
    ).replace("bb", "aa")
    assert (
        strange[0].token_ids[strange[0].is_trained].tolist()
        == judged[1].answer.token_ids[judged[1].answer.is_trained].tolist()
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([{**ROWS[0], "label": "yes"}], ":1: a label is true or false; this one is 'yes'"),
        (ROWS[:1], "holds no good answer"),
        ([{"prompt": "a", "label": True}], ":1: an example has"),
    ],
)
def test_a_line_that_does_not_fit_is_named(mini_model, rows, found, words):
    with pytest.raises(UserError, match=words):
        read_judged(rows(*found), Renderer.from_directory(mini_model))
