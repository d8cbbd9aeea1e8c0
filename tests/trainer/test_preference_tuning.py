"""Tuning on pairs: its gradient is autograd's, its answers move apart, a kill costs nothing, bad lines are named."""

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
from mettle.trainer.config import LoraConfig
from mettle.trainer.preference_tuning import (
    PreferenceTuning,
    read_pairs,
    take_step,
    tune,
)
from mettle.trainer.preferences import PreferenceLoss
from mettle.trainer.whole_answers import sequences_of, summed_logprobs

ROWS = [{"prompt": f"say {n}", "chosen": "aaaa"[: 1 + n % 4], "rejected": "bb" * (1 + n % 2)} for n in range(12)]


@pytest.fixture
def rows(tmp_path):
    def write(*found):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    return write


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_the_gradient_is_that_of_the_loss_written_out(mini_model, rows, name, monkeypatch):
    learner = make_learner(mini_model)
    pairs = read_pairs(rows(*ROWS), Renderer.from_directory(mini_model))[:5]
    reference = np.random.default_rng(0).normal(-20, 3, (2, 5))
    form = PreferenceLoss(name)
    gradients = []
    monkeypatch.setattr(
        type(learner), "step",
        lambda self, params: gradients.append(torch.cat([p.grad.flatten() for p in self.policy.parameters()])) or {},
    )  # fmt: skip
    figures = take_step(learner, form, pairs, reference, 1)

    network = AutoModelForCausalLM.from_pretrained(mini_model, attn_implementation="eager")

    def summed(answer):
        ids = torch.from_numpy(answer.token_ids).long()
        logprobs = torch.log_softmax(network(ids[None]).logits[0, :-1].float(), -1)
        chosen = logprobs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(answer.is_trained[1:])]
        return chosen.sum(), len(chosen)

    losses = []
    for i, pair in enumerate(pairs):
        (good, num_good), (bad, num_bad) = summed(pair.chosen), summed(pair.rejected)
        apart = (good - reference[0, i]) - (bad - reference[1, i])
        m, n = good / num_good, bad / num_bad
        odds = (m - torch.log1p(-m.exp())) - (n - torch.log1p(-n.exp()))
        losses.append({
            "dpo": -torch.nn.functional.logsigmoid(0.1 * apart),
            "ipo": (apart - 5.0) ** 2,
            "simpo": -torch.nn.functional.logsigmoid(2.0 * (m - n) - 1.0),
            "orpo": -m - 0.1 * torch.nn.functional.logsigmoid(odds),
        }[name])  # fmt: skip
    loss = torch.stack(losses).mean()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-4)
    (found,) = gradients
    assert torch.linalg.vector_norm(found - expected) <= 1e-4 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)], ids=["full", "adapter"])
def test_answers_move_apart(mini_model, rows, tmp_path, lora):
    task = PreferenceTuning(rows(*ROWS), mini_model, tmp_path / "out", lora, lr=1e-2, epochs=10, batch_size=6)
    told = []
    done = tune(task, lambda step, *_: told.append(step))
    assert told == list(range(1, 21))
    assert done["first"]["loss"] == pytest.approx(np.log(2), rel=1e-3)  # the reference is the model itself
    assert done["last"]["loss"] < 0.8 * done["first"]["loss"]
    assert done["last"]["accuracy"] == 1.0
    with pytest.raises(UserError, match="is there already"):
        tune(task, lambda *_: None)


class Killed(BaseException):
    """What a kill is to the code that it ends."""


def test_a_killed_tuning_goes_on_to_the_same_bytes_with_the_same_reference(mini_model, rows, tmp_path):
    lora = LoraConfig(rank=4, alpha=8)
    task = PreferenceTuning(
        rows(*ROWS), mini_model, tmp_path / "whole", lora, lr=1e-2, epochs=3, batch_size=8, checkpoint_s=0.0
    )
    whole = tune(task, lambda *_: None)
    again = dataclasses.replace(task, to=tmp_path / "killed")

    def kill(step, *_):
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        tune(again, kill)
    with pytest.raises(UserError, match="was begun with loss"):
        tune(dataclasses.replace(again, loss=PreferenceLoss("ipo")), lambda *_: None)
    assert {**tune(again, lambda *_: None), "resumed_after": 0} == whole
    assert sha256_file(again.to / "adapter_model.safetensors") == sha256_file(task.to / "adapter_model.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["killed", "pairs.jsonl", "whole"]


def test_a_pair_may_be_texts_messages_or_whole_chats(mini_model, rows):
    ask = [{"role": "user", "content": "say 1"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("aa", "bb"))
    path = rows(
        {"prompt": "say 1", "chosen": "aa", "rejected": "bb"},
        {"prompt": ask, "chosen": good, "rejected": bad},
        {"chosen": [*ask, *good], "rejected": [*ask, *bad]},
    )
    found = read_pairs(path, Renderer.from_directory(mini_model))
    assert len({pair.chosen.token_ids.tobytes() + pair.rejected.token_ids.tobytes() for pair in found}) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, ":2: a pair has prompt, chosen, rejected; this one has prompt, chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, ":2: chosen and rejected are the same"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, ":2 is no pair"),
    ],
)
def test_a_line_that_does_not_fit_is_named(mini_model, rows, row, words):
    with pytest.raises(UserError, match=words):
        read_pairs(rows(ROWS[0], row), Renderer.from_directory(mini_model))


def test_an_empty_file_is_refused(mini_model, rows):
    with pytest.raises(UserError, match="holds no pairs"):
        read_pairs(rows(), Renderer.from_directory(mini_model))


def test_sums_are_told_by_answer(mini_model, rows):
    pairs = read_pairs(rows(*ROWS[:2]), Renderer.from_directory(mini_model))
    answers = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    sums, counts = summed_logprobs(make_learner(mini_model), sequences_of(answers, 0))
    assert counts.tolist() == [2, 3, 3, 5]  # with the end token
    assert (sums < -counts).all()
