"""Fine-tuning on a file: masks by where tokens came from, losses that fall, folders that other commands take."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import sha256_file
from mettle.trainer.config import LoraConfig, SchedulerConfig
from mettle.trainer.epochs import Tuning, config_of
from mettle.trainer.finetuning import fine_tune, read_examples
from mettle.trainer.merging import write_merged


@pytest.fixture
def rows(tmp_path):
    def write(*found):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
        return path

    return write


def trained_text(example, renderer):
    return renderer.decode(example.token_ids[example.is_trained].tolist(), skip_special_tokens=False)


def test_chats_and_pairs_train_their_answers_alone(mini_model, rows):
    renderer = Renderer.from_directory(mini_model)
    chat = [{"role": "user", "content": "reverse ab"}, {"role": "assistant", "content": "ba"}]
    path = rows(
        {"messages": chat},
        {"prompt": "reverse ab", "completion": "ba"},
        {"prompt": chat[:1], "completion": chat[1:]},
    )
    examples = read_examples(path, renderer)
    assert [trained_text(example, renderer) for example in examples] == ["ba<|end|>"] * 3
    assert len({example.token_ids.tobytes() for example in examples}) == 1


def test_a_model_without_a_template_takes_texts_as_they_are(mini_model, rows):
    class Bare:
        """The renderer of a model that cannot chat."""

        def __init__(self):
            self._own = Renderer.from_directory(mini_model)
            self.encode, self.stop_token_ids = self._own.encode, self._own.stop_token_ids

        has_chat_template = False

    (example,) = read_examples(rows({"prompt": "ab", "completion": "cd"}), Bare())
    assert example.token_ids.tolist() == [*b"abcd", 257]
    np.testing.assert_array_equal(example.is_trained, [0, 0, 1, 1, 1])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, r":2: an example has 'messages', or 'prompt' and 'completion'; this one has text"),
        ({"messages": [{"role": "user", "content": "x"}]}, ":2: a demonstration ends with at least one assistant"),
        ({"prompt": 3, "completion": "x"}, ":2 is no example"),
    ],
)
def test_a_line_that_does_not_fit_is_named(mini_model, rows, row, said):
    path = rows({"prompt": "a", "completion": "b"}, row)
    with pytest.raises(UserError, match=said):
        read_examples(path, Renderer.from_directory(mini_model))


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8)])
def test_the_loss_falls_and_the_folder_loads(mini_model, rows, tmp_path, lora):
    path = rows(*({"prompt": f"say {n}", "completion": "aaaa"} for n in range(16)))
    told = []
    task = Tuning(path, mini_model, tmp_path / "out", lora, lr=1e-2, epochs=12, batch_size=8)
    done = fine_tune(task, lambda step, *_: told.append(step))
    assert told == list(range(1, 25))
    # An adapter of random weights can't move the tied head, which is what would help most.
    assert done["last_loss"] < (0.5 if lora is None else 0.95) * done["first_loss"]
    folder = tmp_path / "out" if lora is None else write_merged(mini_model, tmp_path / "out", tmp_path / "merged")
    AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UserError, match="is there already"):
        fine_tune(task, lambda *_: None)
    assert not list(Path(tmp_path).glob(".*"))


class Killed(BaseException):
    """What a kill is to the code that it ends."""


@pytest.mark.parametrize("lora", [LoraConfig(rank=4, alpha=8), None], ids=["adapter", "full"])
def test_a_killed_fine_tuning_goes_on_to_the_same_bytes(mini_model, rows, tmp_path, lora):
    path = rows(*({"prompt": f"say {n}", "completion": "aaaa"} for n in range(12)))
    task = Tuning(path, mini_model, tmp_path / "whole", lora, lr=1e-2, epochs=4, batch_size=8, checkpoint_s=0.0)
    whole = fine_tune(task, lambda *_: None)
    again = dataclasses.replace(task, to=tmp_path / "killed")

    def kill(step, *_):
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        fine_tune(again, kill)
    assert not again.to.exists()
    with pytest.raises(UserError, match=r"was begun with lr 0\.01, not 0\.02"):
        fine_tune(dataclasses.replace(again, lr=2e-2), lambda *_: None)
    told = []
    done = fine_tune(again, lambda step, *_: told.append(step))
    assert 1 < told[0] <= 4
    assert told[-1] == 6
    assert {**done, "resumed_after": 0} == whole
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    assert sha256_file(again.to / name) == sha256_file(task.to / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "killed", "whole"]


def test_a_tuning_of_one_step_has_nothing_to_decay_over(mini_model, tmp_path):
    task = Tuning(tmp_path / "rows.jsonl", mini_model, tmp_path / "out", None, lr=1e-2, epochs=1, batch_size=8)
    assert config_of(task, 1).scheduler == SchedulerConfig()
    assert config_of(task, 40).scheduler.type == "linear"
